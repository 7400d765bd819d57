package bpe

import (
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func encoding(t testing.TB) *Encoding {
	t.Helper()
	e, err := GPT2()
	require.NoError(t, err)
	return e
}

// Without it tokens could be numbered differently from GPT-2's, and its weights
// would mean nothing.
func TestKnownTokens(t *testing.T) {
	e := encoding(t)
	require.Equal(t, "gpt2", e.Name())
	require.Equal(t, 50257, e.VocabSize())
	// The published examples of tiktoken and of GPT-2's own encoder.
	for s, want := range map[string][]int32{
		"hello world":        {31373, 995},
		"Hello, world!":      {15496, 11, 995, 0},
		"":                   {},
		"\n\n":               {628},
		" the":               {262},
		"<|endoftext|>":      {27, 91, 437, 1659, 5239, 91, 29},
		"tiktoken is great!": {83, 1134, 30001, 318, 1049, 0},
	} {
		ids, err := e.Encode(s)
		require.NoError(t, err)
		require.Equal(t, want, ids, "%q", s)
		back, err := e.Decode(ids)
		require.NoError(t, err)
		require.Equal(t, s, back)
	}
	s, err := e.Decode([]int32{EndOfText})
	require.NoError(t, err)
	require.Equal(t, "<|endoftext|>", s)
}

// Without it a bad token or text would come out as another one, silently.
func TestBadInput(t *testing.T) {
	e := encoding(t)
	_, err := e.Decode([]int32{50257})
	require.ErrorContains(t, err, "50257")
	_, err = e.Decode([]int32{-1})
	require.Error(t, err)
	_, err = e.Encode("caf\xe9")
	require.ErrorContains(t, err, "UTF-8")
}

// Without it the counts that nanoGPT prints for its first data set would not be ours.
func TestTinyShakespeare(t *testing.T) {
	raw, err := os.ReadFile("../../../shared/data/tinyshakespeare.txt")
	if err != nil {
		t.Skip("tinyshakespeare is not here: ", err)
	}
	e, s := encoding(t), []rune(string(raw))
	n := len(s) * 9 / 10
	train, err := e.Encode(string(s[:n]))
	require.NoError(t, err)
	val, err := e.Encode(string(s[n:]))
	require.NoError(t, err)
	require.Len(t, train, 301966)
	require.Len(t, val, 36059)
}

// text draws from what the splitting pattern tells apart, and what it might trip over.
func text() *rapid.Generator[string] {
	piece := rapid.SampledFrom([]string{
		"a", "b", "Word", "é", "中文", "'s", "'ll", "'", "''", "!", "?!", "1", "23", "½", " ", "  ", "\n", "\n\n", "\t",
		"\r\n", "\u00a0", "\u0085", "\u2003", "\u180e", "\u200b", "e\u0301", "ſ", "ا", "😀", "<|endoftext|>", "\x00", "�", "_",
	})
	return rapid.Custom(func(t *rapid.T) string {
		return strings.Join(rapid.SliceOfN(piece, 0, 24).Draw(t, "pieces"), "")
	})
}

// Without it a large text, encoded in parts, would have other tokens than the
// same text encoded whole.
func TestPartsEqualTheWhole(t *testing.T) {
	e := encoding(t)
	rapid.Check(t, func(t *rapid.T) {
		s := text().Draw(t, "text")
		whole, err := e.Encode(s)
		require.NoError(t, err)
		end := rapid.IntRange(0, len(s)).Draw(t, "end") // of the buffer, within a character too
		n := e.Cut([]byte(s[:end]))
		require.True(t, n >= 0 && n <= end)
		require.True(t, utf8.ValidString(s[:n]))
		head, err := e.Encode(s[:n])
		require.NoError(t, err)
		tail, err := e.Encode(s[n:])
		require.NoError(t, err)
		require.Equal(t, whole, append(head, tail...), "cut %q | %q", s[:n], s[n:])
	})
}

// Without it a text could be declared impossible to cut though it can be.
func TestCutFindsPlaces(t *testing.T) {
	e := encoding(t)
	for s, want := range map[string]int{
		"two words":   3,
		"two words ":  9,
		"end\nof":     3,
		"x1":          1,
		"f(x)":        3,
		"中文，中文":       9,
		"it's":        2,
		"one":         0,
		"   ":         0,
		"":            0,
		"a b\xe4\xb8": 1, // the first bytes of a character
	} {
		require.Equal(t, want, e.Cut([]byte(s)), "%q", s)
	}
}

// BenchmarkEncode measures prose, in chunks as data encodes it.
func BenchmarkEncode(b *testing.B) {
	raw, err := os.ReadFile("../../../shared/data/tinyshakespeare.txt")
	if err != nil {
		b.Skip("tinyshakespeare is not here: ", err)
	}
	e := encoding(b)
	s := string(raw[:64<<10])
	b.SetBytes(int64(len(s)))
	for b.Loop() {
		if _, err := e.Encode(s); err != nil {
			b.Fatal(err)
		}
	}
}
