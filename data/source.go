// Package data turns text into batches. Which windows a step trains on is a
// pure function of (seed, step, sample), so runs of different world sizes see
// the same global batches and a resumed run continues exactly.
package data

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/tandem-go/tandem/data/bpe"
)

// Source is what a run trains on: two sequences of tokens and what they mean.
type Source struct {
	// Train and Val are the tokens of the first nine tenths of the characters
	// and of the rest.
	Train, Val Seq
	Tokenizer
	close []func() error
}

// Options say how a text is read. The zero value is one token a character.
type Options struct {
	// Tokenizer is CharTokenizer [""] or GPT2Tokenizer. Prepared tokens say
	// themselves what made them; there it only has to agree.
	Tokenizer string
	// Progress, unless nil, is told how many bytes of the text are encoded and
	// how many there are. It is called from one goroutine at a time.
	Progress func(done, total int64)
}

func (o *Options) validate() (Options, error) {
	var v Options
	if o != nil {
		v = *o
	}
	if v.Tokenizer == "" {
		return v, nil
	}
	return v, checkName(v.Tokenizer)
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

// Open opens what path names: a UTF-8 text, whose tokens are held in memory; or
// tokens that Prepare wrote, by their directory or their train.bin, which stay
// on disk. An empty, missing or undecodable file is an error that names the
// file and, for the last, the first bad byte.
func Open(ctx context.Context, path string, o *Options) (*Source, error) {
	opts, err := o.validate()
	if err != nil {
		return nil, err
	}
	st, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("reading the text: %w; pass --data FILE with any UTF-8 text", err)
	}
	if st.IsDir() || filepath.Ext(path) == ".bin" {
		return openPrepared(path, opts.Tokenizer)
	}
	var s *Source
	err = withText(ctx, path, func(c *corpus) error {
		s, err = c.source(ctx, opts)
		return err
	})
	return s, err
}

// New makes a Source of the characters of s.
func New(s string) (*Source, error) {
	ctx := context.Background()
	c, err := survey(ctx, strings.NewReader(s), int64(len(s)))
	if err != nil {
		return nil, err
	}
	return c.source(ctx, Options{})
}

// withText opens and surveys a text for f; errors name it.
func withText(ctx context.Context, path string, f func(*corpus) error) error {
	file, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("reading the text: %w", err)
	}
	defer file.Close()
	st, err := file.Stat()
	if err != nil {
		return fmt.Errorf("reading the text: %w", err)
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("%s: is no regular file; copy the text to one", path)
	}
	c, err := survey(ctx, file, st.Size())
	if err == nil {
		err = f(c)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// tokenizer is the one called name, "" for characters, for this text.
func (c *corpus) tokenizer(name string) (Tokenizer, error) {
	if name == GPT2Tokenizer {
		return bpe.GPT2()
	}
	return NewChars(c.chars)
}

// source encodes the text into memory.
func (c *corpus) source(ctx context.Context, o Options) (*Source, error) {
	t, err := c.tokenizer(o.Tokenizer)
	if err != nil {
		return nil, err
	}
	var parts [2]Tokens
	for i := range parts {
		emit := func(ids []int32) error {
			parts[i] = append(parts[i], ids...)
			return nil
		}
		if err := c.encode(ctx, t, i == 1, emit, o.Progress); err != nil {
			return nil, err
		}
	}
	return &Source{Train: parts[0], Val: parts[1], Tokenizer: t}, nil
}

// Check reports whether windows of block tokens fit into both parts.
func (s *Source) Check(block int) error {
	need := block + 1
	if s.Train.Len() < need || s.Val.Len() < need {
		return fmt.Errorf("the text is too short: %d tokens to train on and %d to validate on, both need at least %d for a block of %d; pass a longer text or a smaller --block",
			s.Train.Len(), s.Val.Len(), need, block)
	}
	return nil
}

// Close releases files. Nothing may be read from Train and Val afterwards.
func (s *Source) Close() error {
	var errs []error
	for _, f := range s.close {
		errs = append(errs, f())
	}
	s.close = nil
	return errors.Join(errs...)
}
