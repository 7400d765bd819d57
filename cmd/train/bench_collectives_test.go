package main

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/bench"
	"github.com/tandem-go/tandem/trace"
)

// Without it 25M could be measured as 25 bytes.
func TestParseSize(t *testing.T) {
	for s, want := range map[string]int{"0": 0, "4096": 4096, "4K": 4096, "4k": 4096, "25M": 25 << 20, "1G": 1 << 30, "2KiB": 2048} {
		n, err := parseSize(s)
		require.NoError(t, err)
		require.Equal(t, want, n, s)
	}
	for _, s := range []string{"", "K", "-1", "4T", "99999G", "x"} {
		_, err := parseSize(s)
		require.Error(t, err, s)
	}
}

// Without it a misspelt flag would be found by ranks, or by nobody.
func TestBenchCollectivesFlags(t *testing.T) {
	for _, args := range [][]string{
		{"--nproc", "0"}, {"--nproc", "a"}, {"--nproc", ""}, {"--sizes", "4X"}, {"--type", "float8"}, {"--redop", "mean"},
		{"--backend", "nccl"}, {"--seconds", "0"}, {"--backend", "inmem", "--compare"}, {"--compare", "--redop", "max"},
		{"--backend", "inmem", "--op", "alltoall"},
	} {
		cmd := newBenchCollectives()
		cmd.SetArgs(args)
		cmd.SilenceUsage, cmd.SilenceErrors = true, true
		require.Error(t, cmd.Execute(), "%v", args)
	}
}

// Without it the rows of a run would be no JSON, or not of what was asked for.
func TestBenchCollectivesJSON(t *testing.T) {
	var out bytes.Buffer
	cmd := newBenchCollectives()
	cmd.SetOut(&out)
	cmd.SetArgs([]string{"--backend", "inmem", "--nproc", "1,3", "--sizes", "4K,1K", "--seconds", "0.001", "--json",
		"--type", "bfloat16", "--op", "reduce-scatter", "--redop", "max"})
	require.NoError(t, cmd.Execute())
	var rows []bench.CollectiveRow
	for d := json.NewDecoder(&out); d.More(); {
		var r bench.CollectiveRow
		require.NoError(t, d.Decode(&r))
		require.Equal(t, "reduce-scatter max bfloat16", r.Collective+" "+r.Redop+" "+r.Type)
		require.Zero(t, r.Wrong)
		rows = append(rows, r)
	}
	require.Len(t, rows, 4)
	require.Equal(t, []int{1, 3}, []int{rows[0].Ranks, rows[3].Ranks})
}

// Without it "train flight" could print nothing, or hide that there are no records.
func TestFlightCommand(t *testing.T) {
	dir := t.TempDir()
	run := func() (string, error) {
		var out bytes.Buffer
		cmd := newFlight()
		cmd.SetOut(&out)
		cmd.SetArgs([]string{dir})
		cmd.SilenceUsage, cmd.SilenceErrors = true, true
		err := cmd.Execute()
		return out.String(), err
	}
	_, err := run()
	require.ErrorIs(t, err, trace.ErrNoFlight)
	r, err := trace.NewFlightRecorder(trace.FlightOptions{Rank: 1, Size: 2, Dir: dir})
	require.NoError(t, err)
	r.Queue(&trace.FlightCall{Comm: r.Communicator("world", []int{0, 1}), Kind: "barrier", Bucket: -1, Peer: -1})
	require.NoError(t, r.DumpError("rank 0 died", 0))
	require.FileExists(t, filepath.Join(dir, trace.FlightName(1)))
	text, err := run()
	require.NoError(t, err)
	require.Contains(t, text, "rank 0 left no record")
	require.Contains(t, text, "rank 0 died")
}
