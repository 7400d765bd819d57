// Package data turns text into batches. Which windows a step trains on is a
// pure function of (seed, step, sample), so runs of different world sizes see
// the same global batches and a resumed run continues exactly.
package data

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"unicode/utf8"
)

// Text is a text with its characters as vocabulary, the last tenth kept for validation.
type Text struct {
	// Vocab holds the characters that occur, ascending; a token is an index into it.
	Vocab []rune
	// Train and Val are the tokens of the first nine tenths and of the rest.
	Train, Val []int32
	index      map[rune]int32
}

// ErrNoDefault says that this machine has no text of its own to train on.
var ErrNoDefault = errors.New("no default text here")

// DefaultFile is the text that every Go installation ships: Newton's Opticks,
// in the public domain. goroot is what `go env GOROOT` prints.
func DefaultFile(goroot string) (string, error) {
	path := filepath.Join(goroot, "src", "testdata", "Isaac.Newton-Opticks.txt")
	if _, err := os.Stat(path); goroot == "" || err != nil {
		return "", fmt.Errorf("%w: it would be Newton's Opticks from a Go installation (%s); pass --data FILE with any UTF-8 text", ErrNoDefault, path)
	}
	return path, nil
}

// Open reads a UTF-8 text whole. An empty, missing or undecodable file is an
// error that names the file and, for the last, the first bad byte.
func Open(path string) (*Text, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading the text: %w; pass --data FILE with any UTF-8 text", err)
	}
	t, err := New(string(raw))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return t, nil
}

// New makes a Text of s.
func New(s string) (*Text, error) {
	if s == "" {
		return nil, errors.New("the text is empty; pass a UTF-8 text of at least some thousand characters")
	}
	if i := firstInvalid(s); i >= 0 {
		return nil, fmt.Errorf("not UTF-8: byte %d is %#02x; convert the file, e.g. with iconv -t UTF-8", i, s[i])
	}
	t := &Text{index: make(map[rune]int32)}
	for _, r := range s {
		t.index[r] = 0
	}
	for r := range t.index {
		t.Vocab = append(t.Vocab, r)
	}
	slices.Sort(t.Vocab)
	for i, r := range t.Vocab {
		t.index[r] = int32(i)
	}
	ids := make([]int32, 0, utf8.RuneCountInString(s))
	for _, r := range s {
		ids = append(ids, t.index[r])
	}
	n := len(ids) * 9 / 10
	t.Train, t.Val = ids[:n:n], ids[n:]
	return t, nil
}

func firstInvalid(s string) int {
	for i, r := range s {
		if r == utf8.RuneError {
			if _, n := utf8.DecodeRuneInString(s[i:]); n == 1 {
				return i
			}
		}
	}
	return -1
}

// Check reports whether windows of block tokens fit into both parts.
func (t *Text) Check(block int) error {
	need := block + 1
	if len(t.Train) < need || len(t.Val) < need {
		return fmt.Errorf("the text is too short: %d characters to train on and %d to validate on, both need at least %d for a block of %d; pass a longer text or a smaller --block",
			len(t.Train), len(t.Val), need, block)
	}
	return nil
}

// Encode turns s into tokens. A character that the text doesn't have is an error.
func (t *Text) Encode(s string) ([]int32, error) {
	ids := make([]int32, 0, len(s))
	for _, r := range s {
		id, ok := t.index[r]
		if !ok {
			return nil, fmt.Errorf("character %q is not in the text's vocabulary of %d", r, len(t.Vocab))
		}
		ids = append(ids, id)
	}
	return ids, nil
}

// Decode turns tokens back into a string.
func (t *Text) Decode(ids []int) string {
	rs := make([]rune, len(ids))
	for i, id := range ids {
		rs[i] = t.Vocab[id]
	}
	return string(rs)
}
