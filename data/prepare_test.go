package data

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/tandem-go/tandem/data/bpe"
)

const shakespeare = "../../shared/data/tinyshakespeare.txt"

// prose is a text of about n bytes with all that chunks could be cut at wrongly.
func prose(n int) string {
	var b strings.Builder
	for i := 0; b.Len() < n; i++ {
		fmt.Fprintf(&b, "It's line %d:  «héllo», wörld's 中文，\t3½ tests!'s\n\n", i*i)
	}
	return b.String()
}

// Without it tokens on disk, in memory and of the text encoded at once could differ.
func TestPreparedEqualsMemory(t *testing.T) {
	dir, text := t.TempDir(), prose(3*chunkBytes+17)
	path := write(t, filepath.Join(dir, "text"), text)
	runes := []rune(text)
	split := len(runes) * 9 / 10
	for _, name := range []string{CharTokenizer, GPT2Tokenizer} {
		defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
		var done, total, calls int64
		opts := &Options{Tokenizer: name, Progress: func(d, n int64) {
			require.Greater(t, d, done)
			done, total = d, n
			calls++
		}}
		mem, err := Open(t.Context(), path, opts)
		require.NoError(t, err)
		require.Equal(t, int64(len(text)), done)
		require.Equal(t, int64(len(text)), total)
		require.Greater(t, calls, int64(3))
		for _, part := range []struct {
			text string
			seq  Seq
		}{{string(runes[:split]), mem.Train}, {string(runes[split:]), mem.Val}} {
			want, err := mem.Encode(part.text)
			require.NoError(t, err)
			require.Equal(t, ints(want), ids(t, part.seq))
		}

		out := filepath.Join(dir, name)
		m, err := Prepare(t.Context(), path, out, &Options{Tokenizer: name})
		require.NoError(t, err)
		require.Equal(t, mem.Train.Len(), m.TrainTokens)
		for _, p := range []string{out, filepath.Join(out, TrainFile)} {
			disk, err := Open(t.Context(), p, nil)
			require.NoError(t, err)
			require.Equal(t, mem.VocabSize(), disk.VocabSize())
			require.Equal(t, ids(t, mem.Train), ids(t, disk.Train))
			require.Equal(t, ids(t, mem.Val), ids(t, disk.Val))
			back, err := disk.Encode(text[:50])
			require.NoError(t, err)
			s, err := disk.Decode(back)
			require.NoError(t, err)
			require.Equal(t, text[:50], s)
			require.NoError(t, disk.Close())
		}
		names, err := filepath.Glob(filepath.Join(out, "*"))
		require.NoError(t, err)
		require.Len(t, names, 3, "nothing is left aside")
	}
}

// Without it our files would not be nanoGPT's: same counts, two bytes each.
func TestPrepareTinyShakespeare(t *testing.T) {
	if _, err := os.Stat(shakespeare); err != nil {
		t.Skip("tinyshakespeare is not here: ", err)
	}
	dir := t.TempDir()
	m, err := Prepare(t.Context(), shakespeare, dir, &Options{Tokenizer: GPT2Tokenizer})
	require.NoError(t, err)
	require.Equal(t, 301966, m.TrainTokens)
	require.Equal(t, 36059, m.ValTokens)
	raw, err := os.ReadFile(filepath.Join(dir, TrainFile))
	require.NoError(t, err)
	require.Len(t, raw, 2*301966)
	// "First Citizen:\nBefore we proceed"
	for i, want := range []uint16{5962, 22307, 25, 198, 8421, 356, 5120} {
		require.Equal(t, want, binary.LittleEndian.Uint16(raw[2*i:]))
	}
}

// Without it an interrupted or failing run could leave half of a data set, or
// destroy the one that was there.
func TestPrepareIsWholeOrAsBefore(t *testing.T) {
	dir := t.TempDir()
	path := write(t, filepath.Join(dir, "text"), prose(chunkBytes))
	out := filepath.Join(dir, "out")
	_, err := Prepare(t.Context(), path, out, nil)
	require.NoError(t, err)
	before, err := os.ReadFile(filepath.Join(out, MetaFile))
	require.NoError(t, err)

	ctx, cancel := context.WithCancelCause(t.Context())
	stop := errors.New("enough")
	big := write(t, filepath.Join(dir, "big"), prose(8*chunkBytes))
	_, err = Prepare(ctx, big, out, &Options{Tokenizer: GPT2Tokenizer, Progress: func(int64, int64) { cancel(stop) }})
	require.ErrorIs(t, err, stop)
	_, err = Prepare(t.Context(), write(t, filepath.Join(dir, "long"), strings.Repeat("a", 3*wordBytes)), out, &Options{Tokenizer: GPT2Tokenizer})
	require.ErrorContains(t, err, "no place to cut")
	after, err := os.ReadFile(filepath.Join(out, MetaFile))
	require.NoError(t, err)
	require.Equal(t, string(before), string(after))
	names, err := filepath.Glob(filepath.Join(out, "*"))
	require.NoError(t, err)
	require.Len(t, names, 3, "nothing is left aside")
	_, err = Open(t.Context(), out, nil)
	require.NoError(t, err)
}

// Without it a file of something else would train on garbage, or crash.
func TestBadBins(t *testing.T) {
	dir := t.TempDir()
	tokens := func(ids ...uint16) string {
		var b []byte
		for _, id := range ids {
			b = binary.LittleEndian.AppendUint16(b, id)
		}
		return string(b)
	}
	put := func(name, s string) string { return write(t, filepath.Join(dir, name), s) }
	for name, c := range map[string]struct {
		path  string
		vocab int
		want  string
	}{
		"missing": {filepath.Join(dir, "missing"), 10, "no such file"},
		"empty":   {put("empty", ""), 10, "is empty"},
		"odd":     {put("odd", "abc"), 10, "3 bytes, an odd number"},
		"vocab":   {put("vocab", tokens(1, 2, 10, 3)), 10, "token 2 is 10"},
		"large":   {put("large", tokens(1)), 70000, "two bytes"},
		"none":    {put("none", tokens(1)), 0, "want 1 to 65536"},
		"folder":  {dir, 10, "regular file"},
	} {
		_, err := OpenBin(c.path, c.vocab)
		require.ErrorContains(t, err, c.want, name)
		require.NotContains(t, err.Error(), "\n", name)
	}
	// A bad token in the middle is found when it is used.
	long := make([]uint16, 1<<18)
	long[1<<17] = 11
	b, err := OpenBin(put("long", tokens(long...)), 10)
	require.NoError(t, err)
	x, y := make([]int, 8), make([]int, 8)
	require.NoError(t, copyWindow(x, y, b, 0))
	err = copyWindow(x, y, b, 1<<17-3)
	require.ErrorContains(t, err, "token 131072 is 11, not in a vocabulary of 10")
	require.ErrorContains(t, b.Copy(x, b.Len()-7), "of 262144")
	require.Error(t, b.Copy(x, -1))
	require.NoError(t, b.Close())
	require.Error(t, b.Copy(x, 0))
}

// Without it a data set whose parts don't belong together would be believed.
func TestBadSets(t *testing.T) {
	dir := t.TempDir()
	path := write(t, filepath.Join(dir, "text"), prose(4000))
	open := func(p, tokenizer string) error {
		s, err := Open(t.Context(), p, &Options{Tokenizer: tokenizer})
		if err == nil {
			require.NoError(t, s.Close())
		}
		return err
	}
	_, err := Prepare(t.Context(), path, dir, &Options{Tokenizer: GPT2Tokenizer})
	require.NoError(t, err)
	train, meta := filepath.Join(dir, TrainFile), filepath.Join(dir, MetaFile)
	require.ErrorContains(t, open(train, CharTokenizer), "tokenizer gpt2 made these tokens")
	require.ErrorContains(t, open(filepath.Join(dir, ValFile), ""), "pass the training part")
	good, err := os.ReadFile(meta)
	require.NoError(t, err)
	for bad, want := range map[string]string{
		`{"version":2}`: "version 2",
		`{"version":1,"tokenizer":"gpt2","vocab_size":50256}`:               "a vocabulary of 50256",
		`{"version":1,"tokenizer":"gpt3","vocab_size":9}`:                   `"gpt3"`,
		`{"version":1,"tokenizer":"char","vocab_size":2,"chars":"aa"}`:      "twice",
		`{"version":1,"tokenizer":"gpt2","vocab_size":50257}`:               "prepare the text again",
		`{"version":1,"tokenizer":"gpt2","vocab_size":5,"train_tokens":-1}`: "train_tokens -1",
		"nonsense": "invalid character",
	} {
		write(t, meta, bad)
		require.ErrorContains(t, open(dir, ""), want, bad)
	}
	require.NoError(t, os.Remove(meta))
	require.ErrorContains(t, open(train, ""), "pass --tokenizer gpt2")
	require.NoError(t, open(train, GPT2Tokenizer), "nanoGPT's own files have no description")
	write(t, meta, string(good))
	require.NoError(t, os.Remove(filepath.Join(dir, ValFile)))
	require.ErrorIs(t, open(train, ""), fs.ErrNotExist)
}

// Without it systems that can't map files would read other tokens.
func TestReadingEqualsMapping(t *testing.T) {
	raw := make([]byte, 2*300000)
	for i := range raw {
		raw[i] = byte(i * i >> 3)
	}
	path := write(t, filepath.Join(t.TempDir(), "x.bin"), string(raw))
	mapped, err := OpenBin(path, maxBinVocab)
	require.NoError(t, err)
	defer mapped.Close()
	read, err := openBin(path, maxBinVocab, func(*os.File, int) ([]byte, func() error, error) {
		return nil, nil, errors.ErrUnsupported
	})
	require.NoError(t, err)
	defer read.Close()
	require.Nil(t, read.raw)
	rapid.Check(t, func(t *rapid.T) {
		at := rapid.IntRange(0, mapped.Len()).Draw(t, "at")
		n := rapid.IntRange(0, min(5000, mapped.Len()-at)).Draw(t, "n")
		x, y := make([]int, n), make([]int, n)
		require.NoError(t, mapped.Copy(x, at))
		require.NoError(t, read.Copy(y, at))
		require.Equal(t, x, y)
	})
}

// Without it a steady step would make garbage.
func TestFillAllocatesNothing(t *testing.T) {
	path := write(t, filepath.Join(t.TempDir(), "x.bin"), strings.Repeat("\x01\x00", 5000))
	bin, err := OpenBin(path, 2)
	require.NoError(t, err)
	defer bin.Close()
	for _, seq := range []Seq{bin, make(Tokens, 5000)} {
		s := &Sampler{Tokens: seq, Block: 64}
		x, y := make([]int, 640), make([]int, 640)
		require.Zero(t, testing.AllocsPerRun(100, func() {
			if err := s.Fill(x, y, 1, 2); err != nil {
				t.Fatal(err)
			}
		}))
	}
}

// Without it a character that spans two tokens would be printed as two wrong ones.
func TestTextWriter(t *testing.T) {
	e, err := bpe.GPT2()
	require.NoError(t, err)
	text := "naïve 中文 😀 end"
	all, err := e.Encode(text)
	require.NoError(t, err)
	var b bytes.Buffer
	w := NewTextWriter(&b, e)
	for _, id := range all {
		require.NoError(t, w.Write(id))
		require.True(t, strings.HasPrefix(text, b.String()), b.String())
	}
	require.NoError(t, w.Close())
	require.Equal(t, text, b.String())
	smile, err := e.Encode("😀")
	require.NoError(t, err)
	require.NoError(t, w.Write(smile[0]))
	require.Equal(t, text, b.String())
	require.NoError(t, w.Close())
	require.Equal(t, text+"�", b.String())
}

// Without it a description from outside could panic the reader, or promise what
// can't be opened.
func FuzzMeta(f *testing.F) {
	f.Add([]byte(`{"version":1,"tokenizer":"char","vocab_size":2,"chars":"ab","train_tokens":3,"val_tokens":1}`))
	f.Add([]byte(`{"version":1,"tokenizer":"gpt2","vocab_size":50257}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		m, err := parseMeta(bytes.NewReader(raw))
		if err != nil {
			return
		}
		tok, err := m.Open()
		if err != nil {
			return
		}
		if tok.VocabSize() != m.Size || VocabOf(tok).Tokenizer != m.Tokenizer {
			t.Fatalf("%+v opened as %+v", m, VocabOf(tok))
		}
		again, err := json.Marshal(VocabOf(tok))
		if err != nil {
			t.Fatal(err)
		}
		var v Vocab
		if err := json.Unmarshal(again, &v); err != nil {
			t.Fatal(err)
		}
		if _, err := v.Open(); err != nil {
			t.Fatalf("%s: %v", again, err)
		}
	})
}

// Without it bytes from outside could get past the vocabulary, or panic the reader.
func FuzzBin(f *testing.F) {
	f.Add([]byte("\x01\x00\x02\x00"), uint16(3), uint16(0), uint8(2))
	f.Add([]byte("\x01"), uint16(3), uint16(0), uint8(1))
	path := filepath.Join(f.TempDir(), "fuzz.bin")
	f.Fuzz(func(t *testing.T, raw []byte, vocab, at uint16, n uint8) {
		write(t, path, string(raw))
		b, err := OpenBin(path, int(vocab))
		if err != nil {
			return
		}
		defer b.Close()
		dst := make([]int, n)
		if b.Copy(dst, int(at)) != nil {
			return
		}
		for i, id := range dst {
			if id >= int(vocab) || id != int(binary.LittleEndian.Uint16(raw[2*(int(at)+i):])) {
				t.Fatalf("token %d is %d", i, id)
			}
		}
	})
}
