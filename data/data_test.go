package data

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Without it a text would come back changed, or the split would move.
func TestRoundTripAndSplit(t *testing.T) {
	s := strings.Repeat("héllo, wörld\n", 10)
	x, err := New(s)
	require.NoError(t, err)
	ids, err := x.Encode(s)
	require.NoError(t, err)
	ints := make([]int, len(ids))
	for i, id := range ids {
		ints[i] = int(id)
	}
	require.Equal(t, s, x.Decode(ints))
	require.Len(t, x.Train, 117)
	require.Len(t, x.Val, 13)
	require.Equal(t, ids, append(append([]int32{}, x.Train...), x.Val...))
	_, err = x.Encode("é!")
	require.ErrorContains(t, err, `'!'`)
}

// Without it a user with a bad file gets a stack trace instead of a sentence.
func TestBadTexts(t *testing.T) {
	dir := t.TempDir()
	write := func(name, s string) string {
		p := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(p, []byte(s), 0o600))
		return p
	}
	_, err := Open(filepath.Join(dir, "missing"))
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = Open(write("empty", ""))
	require.ErrorContains(t, err, "empty")
	_, err = Open(write("latin1", "caf\xe9"))
	require.ErrorContains(t, err, "byte 3 is 0xe9")
	x, err := Open(write("short", "a replacement character � is fine"))
	require.NoError(t, err)
	require.ErrorContains(t, x.Check(64), "too short")
	require.NoError(t, x.Check(2))
	_, err = DefaultFile(dir)
	require.ErrorIs(t, err, ErrNoDefault)
}

// Without it `train` with no flags might not find the text that Go ships.
func TestDefaultFile(t *testing.T) {
	path, err := DefaultFile(runtime.GOROOT())
	if err != nil {
		t.Skipf("no Go installation with its test data: %v", err)
	}
	x, err := Open(path)
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
	s.Fill(all, ally, 5, 0)
	for _, ranks := range []int{2, 4, 8} {
		var got, goty []int
		for r := range ranks {
			n := batch / ranks
			a, b := make([]int, n*8), make([]int, n*8)
			s.Fill(a, b, 5, r*n)
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
	s := &Sampler{Tokens: make([]int32, 20), Block: 8, Seed: 1}
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
	part := make([]int32, 50)
	for i := range part {
		part[i] = int32(i)
	}
	require.Equal(t, 6, Windows(part, 8))
	x, y := make([]int, 32), make([]int, 32)
	n, err := FillWindows(x, y, part, 8, 4)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	require.Equal(t, 32, x[0])
	require.Equal(t, 33, y[0])
	require.Equal(t, 48, y[15])
	require.Equal(t, -1, y[16])
	require.Equal(t, 0, Windows(part[:8], 8))
	_, err = FillWindows(x[:31], y, part, 8, 0)
	require.Error(t, err)
}
