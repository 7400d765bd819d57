package data

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// ids are all tokens of a sequence.
func ids(t testing.TB, s Seq) []int {
	t.Helper()
	out := make([]int, s.Len())
	require.NoError(t, s.Copy(out, 0))
	return out
}

func join(parts ...[]int) (out []int) {
	for _, p := range parts {
		out = append(out, p...)
	}
	return out
}

func ints(x []int32) []int {
	out := make([]int, len(x))
	for i, v := range x {
		out[i] = int(v)
	}
	return out
}

// Without it a text would come back changed, or the split would move.
func TestRoundTripAndSplit(t *testing.T) {
	s := strings.Repeat("héllo, wörld\n", 10)
	x, err := New(s)
	require.NoError(t, err)
	all, err := x.Encode(s)
	require.NoError(t, err)
	back, err := x.Decode(all)
	require.NoError(t, err)
	require.Equal(t, s, back)
	require.Equal(t, 117, x.Train.Len())
	require.Equal(t, 13, x.Val.Len())
	require.Equal(t, ints(all), join(ids(t, x.Train), ids(t, x.Val)))
	_, err = x.Encode("é!")
	require.ErrorContains(t, err, `'!'`)
	_, err = x.Encode("h\xff")
	require.ErrorContains(t, err, "byte 1 is 0xff")
	_, err = x.Decode([]int32{int32(x.VocabSize())})
	require.Error(t, err)
}

func write(t testing.TB, path, s string) string {
	t.Helper()
	require.NoError(t, os.WriteFile(path, []byte(s), 0o600))
	return path
}

// Without it a user with a bad file gets a stack trace instead of a sentence.
func TestBadTexts(t *testing.T) {
	dir, ctx := t.TempDir(), t.Context()
	open := func(path string) error {
		_, err := Open(ctx, path, nil)
		return err
	}
	put := func(name, s string) string { return write(t, filepath.Join(dir, name), s) }
	require.ErrorIs(t, open(filepath.Join(dir, "missing")), os.ErrNotExist)
	require.ErrorContains(t, open(put("empty", "")), "empty")
	require.ErrorContains(t, open(put("latin1", "caf\xe9")), "byte 3 is 0xe9")
	require.ErrorContains(t, open(put("late", strings.Repeat("é", 1<<20)+"\xc3")), "byte 2097152 is 0xc3")
	x, err := Open(ctx, put("short", "a replacement character � is fine"), nil)
	require.NoError(t, err)
	require.ErrorContains(t, x.Check(64), "too short")
	require.NoError(t, x.Check(2))
	_, err = DefaultFile(dir)
	require.ErrorIs(t, err, ErrNoDefault)
	_, err = Open(ctx, "short", &Options{Tokenizer: "words"})
	require.ErrorContains(t, err, `"words"`)
}

// Without it `train` with no flags might not find the text that Go ships.
func TestDefaultFile(t *testing.T) {
	path, err := DefaultFile(runtime.GOROOT())
	if err != nil {
		t.Skipf("no Go installation with its test data: %v", err)
	}
	x, err := Open(t.Context(), path, nil)
	require.NoError(t, err)
	require.NoError(t, x.Check(1024))
}

// Without it world sizes would not compare: a rank's slice must be the same
// samples that a single process sees.
func TestSamplesDoNotDependOnRanks(t *testing.T) {
	x, err := New(strings.Repeat("abcdefghij", 200))
	require.NoError(t, err)
	s := &Sampler{Tokens: x.Train, Block: 8, Seed: 3}
	const batch = 8
	all, ally := make([]int, batch*8), make([]int, batch*8)
	require.NoError(t, s.Fill(all, ally, 5, 0))
	for _, ranks := range []int{2, 4, 8} {
		var got, goty []int
		for r := range ranks {
			n := batch / ranks
			a, b := make([]int, n*8), make([]int, n*8)
			require.NoError(t, s.Fill(a, b, 5, r*n))
			got, goty = append(got, a...), append(goty, b...)
		}
		require.Equal(t, all, got)
		require.Equal(t, ally, goty)
	}
	for i := range all[:len(all)-1] {
		if i%8 != 7 {
			require.Equal(t, all[i+1], ally[i], "a target is the next token")
		}
	}
}

// Without it some windows would never be drawn, or one drawn past the end.
func TestStartsCoverTheText(t *testing.T) {
	s := &Sampler{Tokens: make(Tokens, 20), Block: 8, Seed: 1}
	seen := map[int]int{}
	for step := range 400 {
		for i := range 4 {
			seen[s.Start(step, i)]++
		}
	}
	require.Len(t, seen, 12)
	for at, n := range seen {
		require.True(t, at >= 0 && at+8 < 20)
		require.InDelta(t, 1600/12, n, 60)
	}
	other := &Sampler{Tokens: s.Tokens, Block: 8, Seed: 2}
	same := 0
	for step := range 100 {
		if s.Start(step, 0) == other.Start(step, 0) {
			same++
		}
	}
	require.Less(t, same, 30)
}

// Without it the validation loss would leave out or repeat a part of the text.
func TestWindows(t *testing.T) {
	part := make(Tokens, 50)
	for i := range part {
		part[i] = int32(i)
	}
	require.Equal(t, 6, Windows(part, 8))
	x, y := make([]int, 32), make([]int, 32)
	n, err := FillWindows(x, y, part, 8, 4, 6)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	require.Equal(t, 32, x[0])
	require.Equal(t, 33, y[0])
	require.Equal(t, 48, y[15])
	require.Equal(t, -1, y[16])
	require.Equal(t, 0, Windows(part[:8], 8))
	n, err = FillWindows(x, y, part, 8, 0, 3)
	require.NoError(t, err)
	require.Equal(t, 3, n, "a rank's share ends before the part does")
	require.Equal(t, -1, y[24])
	_, err = FillWindows(x[:31], y, part, 8, 0, 6)
	require.Error(t, err)
}

// Without it the windows that a seed draws could move with a new version, and a
// resumed run would not continue the one that was stopped.
func TestStartsAreFixed(t *testing.T) {
	s := &Sampler{Tokens: make(Tokens, 1000003), Block: 64, Seed: 1337}
	require.Equal(t, []int{890210, 550684, 570915, 749685}, []int{s.Start(0, 0), s.Start(0, 1), s.Start(1, 0), s.Start(99999, 511)})
}

// BenchmarkFill measures a batch of windows, in memory and from a mapped file.
func BenchmarkFill(b *testing.B) {
	tokens := make(Tokens, 1<<20)
	for i := range tokens {
		tokens[i] = int32(i % 50257)
	}
	dir := b.TempDir()
	var raw []byte
	for _, id := range tokens {
		raw = append(raw, byte(id), byte(id>>8))
	}
	write(b, filepath.Join(dir, "train.bin"), string(raw))
	bin, err := OpenBin(filepath.Join(dir, "train.bin"), 50257)
	require.NoError(b, err)
	defer bin.Close()
	for name, seq := range map[string]Seq{"memory": tokens, "bin": bin} {
		b.Run(name, func(b *testing.B) {
			s := &Sampler{Tokens: seq, Block: 1024}
			x, y := make([]int, 16*1024), make([]int, 16*1024)
			b.SetBytes(int64(8 * 2 * len(x)))
			b.ReportAllocs()
			step := 0
			for b.Loop() {
				if err := s.Fill(x, y, step, 0); err != nil {
					b.Fatal(err)
				}
				step++
			}
		})
	}
}
