package data

import "fmt"

// Seq is a sequence of tokens that windows are copied out of: Tokens in memory,
// or a Bin on disk. Copy may be called from several goroutines.
type Seq interface {
	// Len is the number of tokens.
	Len() int
	// Copy writes tokens at … at+len(dst)-1 to dst. A range that isn't within
	// the sequence and a token that isn't in the vocabulary are errors.
	Copy(dst []int, at int) error
}

// Tokens is a Seq in memory.
type Tokens []int32

// Len is the number of tokens.
func (t Tokens) Len() int { return len(t) }

// Copy implements Seq.
func (t Tokens) Copy(dst []int, at int) error {
	if err := checkRange(len(dst), at, len(t)); err != nil {
		return err
	}
	for i, id := range t[at : at+len(dst)] {
		dst[i] = int(id)
	}
	return nil
}

func checkRange(n, at, total int) error {
	if at < 0 || at > total || n > total-at {
		return fmt.Errorf("data: tokens %d to %d of %d", at, at+n, total)
	}
	return nil
}

// copyWindow fills x with tokens from at and y with the ones that follow each.
func copyWindow(x, y []int, from Seq, at int) error {
	if err := from.Copy(x[:1], at); err != nil {
		return err
	}
	if err := from.Copy(y, at+1); err != nil {
		return err
	}
	copy(x[1:], y)
	return nil
}
