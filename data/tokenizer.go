package data

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/tandem-go/tandem/data/bpe"
)

// Names of tokenizers.
const (
	CharTokenizer = "char" // one token a character, the vocabulary is the text's
	GPT2Tokenizer = "gpt2" // GPT-2's byte-pair encoding, package bpe
)

// Tokenizer turns text into tokens 0 … VocabSize()-1 and back. Its methods may
// be called from several goroutines.
type Tokenizer interface {
	Name() string
	VocabSize() int
	// Encode needs UTF-8. What the vocabulary can't express is an error.
	Encode(s string) ([]int32, error)
	// Decode joins the bytes of tokens, which need not be whole characters.
	Decode(ids []int32) (string, error)
	// Cut returns the largest n > 0 such that p[:n] and p[n:], whatever follows
	// p, encode to the tokens of the whole; 0 if there is no such n.
	Cut(p []byte) int
}

// Vocab describes a tokenizer, for files that have to name one.
type Vocab struct {
	Tokenizer string `json:"tokenizer"`
	Size      int    `json:"vocab_size"`
	// Chars are the characters of tokens 0, 1, …, for CharTokenizer only.
	Chars string `json:"chars,omitempty"`
}

// VocabOf describes t.
func VocabOf(t Tokenizer) Vocab {
	v := Vocab{Tokenizer: t.Name(), Size: t.VocabSize()}
	if c, ok := t.(*Chars); ok {
		v.Chars = string(c.chars)
	}
	return v
}

// Open makes the tokenizer that v describes.
func (v Vocab) Open() (Tokenizer, error) {
	var t Tokenizer
	var err error
	switch v.Tokenizer {
	case CharTokenizer:
		t, err = NewChars([]rune(v.Chars))
	case GPT2Tokenizer:
		t, err = bpe.GPT2()
	default:
		err = checkName(v.Tokenizer)
	}
	if err != nil {
		return nil, err
	}
	if t.VocabSize() != v.Size {
		return nil, fmt.Errorf("a vocabulary of %d is not that of tokenizer %s, which has %d", v.Size, v.Tokenizer, t.VocabSize())
	}
	return t, nil
}

func checkName(name string) error {
	if name != CharTokenizer && name != GPT2Tokenizer {
		return fmt.Errorf("tokenizer %q: there are %s and %s", name, CharTokenizer, GPT2Tokenizer)
	}
	return nil
}

// Chars is a tokenizer whose tokens are characters.
type Chars struct {
	chars []rune
	index []int32 // of each character up to the largest, -1 for those not there
}

// NewChars makes a tokenizer in which chars[i] is token i.
func NewChars(chars []rune) (*Chars, error) {
	if len(chars) == 0 {
		return nil, errors.New("a vocabulary of no characters")
	}
	c := &Chars{chars: slices.Clone(chars), index: make([]int32, slices.Max(chars)+1)}
	for i := range c.index {
		c.index[i] = -1
	}
	for i, r := range chars {
		if !utf8.ValidRune(r) || c.index[r] >= 0 {
			return nil, fmt.Errorf("character %d of the vocabulary, %q, is there twice or no character", i, r)
		}
		c.index[r] = int32(i)
	}
	return c, nil
}

// Name is "char".
func (c *Chars) Name() string { return CharTokenizer }

// VocabSize is the number of characters.
func (c *Chars) VocabSize() int { return len(c.chars) }

// Encode implements Tokenizer.
func (c *Chars) Encode(s string) ([]int32, error) {
	ids := make([]int32, 0, utf8.RuneCountInString(s))
	for i, r := range s {
		if r == utf8.RuneError && !strings.HasPrefix(s[i:], string(utf8.RuneError)) {
			return nil, fmt.Errorf("not UTF-8: byte %d is %#02x", i, s[i])
		}
		id := int32(-1)
		if int(r) < len(c.index) {
			id = c.index[r]
		}
		if id < 0 {
			return nil, fmt.Errorf("character %q is not in the text's vocabulary of %d", r, len(c.chars))
		}
		ids = append(ids, id)
	}
	return ids, nil
}

// Decode implements Tokenizer.
func (c *Chars) Decode(ids []int32) (string, error) {
	rs := make([]rune, len(ids))
	for i, id := range ids {
		if id < 0 || int(id) >= len(c.chars) {
			return "", fmt.Errorf("token %d is not in the vocabulary of %d characters", id, len(c.chars))
		}
		rs[i] = c.chars[id]
	}
	return string(rs), nil
}

// Cut implements Tokenizer.
func (c *Chars) Cut(p []byte) int { return len(p) - partial(p) }

// partial is the number of bytes at the end of p that begin a character which
// p doesn't hold whole.
func partial(p []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(p); n++ {
		if tail := p[len(p)-n:]; utf8.RuneStart(tail[0]) {
			if utf8.FullRune(tail) {
				return 0
			}
			return n
		}
	}
	return 0
}

// TextWriter writes tokens as text while they are made. A character whose bytes
// are spread over tokens is written once it is whole; bytes that are no
// character come out as U+FFFD.
type TextWriter struct {
	w    io.Writer
	t    Tokenizer
	part []byte
}

// NewTextWriter returns a TextWriter to w.
func NewTextWriter(w io.Writer, t Tokenizer) *TextWriter { return &TextWriter{w: w, t: t} }

// Write writes tokens, but for an unfinished character at their end.
func (w *TextWriter) Write(ids ...int32) error {
	s, err := w.t.Decode(ids)
	if err != nil {
		return err
	}
	w.part = append(w.part, s...)
	n := len(w.part) - partial(w.part)
	if n == 0 {
		return nil
	}
	if _, err := io.WriteString(w.w, strings.ToValidUTF8(string(w.part[:n]), string(utf8.RuneError))); err != nil {
		return err
	}
	w.part = append(w.part[:0], w.part[n:]...)
	return nil
}

// Close writes what is left of an unfinished character. It does not close w.
func (w *TextWriter) Close() error {
	if len(w.part) == 0 {
		return nil
	}
	w.part = w.part[:0]
	_, err := io.WriteString(w.w, string(utf8.RuneError))
	return err
}
