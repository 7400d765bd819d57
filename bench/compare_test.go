package bench

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Without it ratios could be of different rounds, sizes or turns.
func TestCompare(t *testing.T) {
	var turns []string
	contender := func(name string, times ...float64) Contender {
		round := 0
		return Contender{Name: name, Run: func(_ context.Context, n int) ([]CollectiveRow, error) {
			turns = append(turns, name)
			round++
			return []CollectiveRow{{Backend: name, Ranks: n, Bytes: 100, P50US: times[round-1]},
				{Backend: name, Ranks: n, Bytes: 4, P50US: 2 * times[round-1]}}, nil
		}}
	}
	var rows []CollectiveRow
	all, err := Compare(context.Background(), []int{4}, 3, 2,
		[]Contender{contender("a", 1, 10, 3)}, []Contender{contender("b", 2, 5, 4)},
		func(r CollectiveRow) error { rows = append(rows, r); return nil })
	require.NoError(t, err)
	require.Equal(t, strings.Split("abababab"[:6], ""), turns)
	require.Len(t, rows, 12)
	require.True(t, rows[0].Oversubscribed)
	want := Ratio{Bench: "collectives-ratio", Ours: "a", Theirs: "b", Ranks: 4, Bytes: 4, Median: 0.75, Min: 0.5, Max: 2, Rounds: 3, Oversubscribed: true}
	require.Equal(t, want, all[0])
	want.Bytes = 100
	require.Equal(t, want, all[1])
	var b bytes.Buffer
	require.NoError(t, WriteRatios(&b, all))
	require.Contains(t, b.String(), "* a / b")
	require.Equal(t, 2, strings.Count(b.String(), "0.75 (0.50 … 2.00)"))
}

// Without it a peer that fails half-way would be compared with all the same.
func TestCompareFails(t *testing.T) {
	broken := errors.New("broken")
	_, err := Compare(context.Background(), []int{2}, 1, 0, nil,
		[]Contender{{Name: "x", Run: func(context.Context, int) ([]CollectiveRow, error) { return nil, broken }}}, nil)
	require.ErrorIs(t, err, broken)
}

// Without it a peer that prints a warning, or dies, could pass for one that was measured.
func TestPeerRows(t *testing.T) {
	p := &Peer{Name: "gloo"}
	rows, err := p.rows([]byte(`{"bytes":4096,"count":1024,"iters":5,"wrong":0,"avg_us":3,"p50_us":2,"p99_us":4,"max_us":5}`+"\n"), 2)
	require.NoError(t, err)
	require.Len(t, rows, 1)
	require.Equal(t, 4096/2.0/1e3, rows[0].AlgBW)
	require.Equal(t, rows[0].AlgBW, rows[0].BusBW)
	for _, bad := range []string{"", "warning: x\n", `{"bytes":4096} junk`} {
		_, err := p.rows([]byte(bad), 2)
		require.Error(t, err, bad)
	}
}

// Without it a machine without peers would get a stack of failed commands
// instead of what to install.
func TestNoPeers(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	peers, missing := FindPeers(context.Background(), t.TempDir())
	for _, p := range peers { // /usr/bin/python3 is found without PATH
		require.Equal(t, "gloo", p.Name)
	}
	require.NotEmpty(t, missing)
	for _, err := range missing {
		require.ErrorIs(t, err, ErrNoPeer)
		require.Contains(t, err.Error(), "apt-get install")
	}
}

// Without it the embedded scripts could rot unnoticed.
func TestPeersRun(t *testing.T) {
	if testing.Short() {
		t.Skip("starts other programs")
	}
	peers, missing := FindPeers(context.Background(), t.TempDir())
	for _, err := range missing {
		t.Log(err)
	}
	if len(peers) == 0 {
		t.Skip("no peer is installed here")
	}
	for _, p := range peers {
		rows, err := p.Run(context.Background(), 2, []int{64, 4096}, 0.001, PeerNet{Addr: "127.0.0.1", Interface: "lo"})
		require.NoError(t, err)
		require.Len(t, rows, 2)
		require.Zero(t, rows[1].Wrong)
		require.Equal(t, 4096, rows[1].Bytes)
		require.Positive(t, rows[1].P50US)
	}
}
