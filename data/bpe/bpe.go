// Package bpe is GPT-2's byte-pair encoding, by way of tiktoken-go/tokenizer,
// whose r50k_base has the same tokens under the same numbers.
package bpe

import (
	"fmt"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/tiktoken-go/tokenizer/codec"
)

const (
	// VocabSize is the number of tokens of GPT-2, end of text included.
	VocabSize = 50257
	// EndOfText separates documents. Encode never makes it: a text that spells
	// "<|endoftext|>" is encoded as any other.
	EndOfText int32 = VocabSize - 1
	endOfText       = "<|endoftext|>"
)

// Encoding turns text into tokens and back. Its methods may be called from
// several goroutines at once.
type Encoding struct {
	codec *codec.Codec
	// words holds the bytes of every token.
	words []string
}

// gpt2 is made on first use: the vocabulary costs some milliseconds and 3 MiB.
var gpt2 = sync.OnceValues(build)

// GPT2 is the encoding of GPT-2.
func GPT2() (*Encoding, error) { return gpt2() }

func build() (*Encoding, error) {
	e := &Encoding{codec: codec.NewR50kBase(), words: make([]string, VocabSize)}
	for i := range EndOfText {
		w, err := e.codec.Decode([]uint{uint(i)})
		if err != nil {
			return nil, fmt.Errorf("bpe: the tokenizer's vocabulary has no token %d: %w", i, err)
		}
		e.words[i] = w
	}
	e.words[EndOfText] = endOfText
	return e, nil
}

// Name is "gpt2".
func (e *Encoding) Name() string { return "gpt2" }

// VocabSize is the number of tokens, 50257.
func (e *Encoding) VocabSize() int { return len(e.words) }

// Encode turns s, which has to be UTF-8, into tokens.
func (e *Encoding) Encode(s string) ([]int32, error) {
	if !utf8.ValidString(s) {
		// The tokenizer would silently put U+FFFD for the bad bytes.
		return nil, fmt.Errorf("bpe: text of %d bytes is not UTF-8", len(s))
	}
	ids, _, err := e.codec.Encode(s)
	if err != nil {
		return nil, fmt.Errorf("bpe: encoding %d bytes: %w", len(s), err)
	}
	out := make([]int32, len(ids))
	for i, id := range ids {
		out[i] = int32(id)
	}
	return out, nil
}

// Decode joins the bytes of tokens. They need not be UTF-8: a token may hold a
// part of a character.
func (e *Encoding) Decode(ids []int32) (string, error) {
	var b strings.Builder
	for _, id := range ids {
		if id < 0 || int(id) >= len(e.words) {
			return "", fmt.Errorf("bpe: token %d is not in the vocabulary of %d", id, len(e.words))
		}
		b.WriteString(e.words[id])
	}
	return b.String(), nil
}
