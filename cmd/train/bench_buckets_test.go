package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/bench"
)

// quick are the flags of a sweep that is over soon.
var quick = []string{"bench", "buckets", "--caps", "0.5,100", "--small-ends", "none", "--rounds", "1", "--steps", "2", "--warmup", "1"}

// Without it the sweep could end without a table, or write a file that is no
// picture or no report; and ranks that are processes could lose their result.
func TestBenchBuckets(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "sweep")
	stdout, stderr, code := train(t, nil, append(quick, "--nproc", "2", "--out", dir)...)
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, "mini over this machine: 2 ranks × 1 threads")
	require.Contains(t, stdout, "best: ")
	require.Contains(t, stderr, "left\n", "no progress")

	j, err := os.ReadFile(filepath.Join(dir, "buckets.json"))
	require.NoError(t, err)
	r := &bench.BucketsReport{}
	require.NoError(t, json.Unmarshal(j, r))
	require.Len(t, r.Links, 1)
	require.NotNil(t, r.Links[0].At(bench.Setting{CapMB: 100, Ends: bench.SmallNone}))
	for name, magic := range map[string]string{"buckets.png": "\x89PNG", "buckets.svg": "<?xml", "buckets.csv": "link,preset,"} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		require.True(t, bytes.HasPrefix(b, []byte(magic)), "%s begins with %q", name, b[:min(len(b), 20)])
	}
	left, err := filepath.Glob(filepath.Join(dir, "*.tmp"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// Without it one rank, which runs in this very process, could print nothing;
// and what a script reads could have other lines around it.
func TestBenchBucketsOneRankJSON(t *testing.T) {
	stdout, stderr, code := train(t, nil, append(quick, "--nproc", "1", "--json")...)
	require.Zero(t, code, stderr)
	r := &bench.BucketsReport{}
	require.NoError(t, json.Unmarshal([]byte(stdout), r), stdout)
	require.Equal(t, 1, r.Links[0].WorldSize)
	require.Equal(t, bench.Share(1), r.Links[0].Rows[0].HiddenShare, "one rank has nothing to hide")
}

// Without it a typing mistake would cost a sweep over the links before it, or
// be reported by every rank.
func TestBenchBucketsRefuses(t *testing.T) {
	for flag, want := range map[string]string{
		"--caps=1,none":           `"none" is not a positive number`,
		"--small-ends=middle":     `"middle"`,
		"--preset=huge":           `"huge"`,
		"--netns=1gbit,fast":      `"fast"`,
		"--steps=0":               "at least 1",
		"--nproc=1 --netns=1gbit": "needs at least --nproc 2",
	} {
		_, stderr, code := train(t, nil, append(quick, strings.Fields(flag)...)...)
		require.NotZero(t, code, flag)
		require.Contains(t, stderr, want, flag)
		require.Equal(t, 1, strings.Count(stderr, "\n"), stderr)
	}
	_, stderr, code := train(t, []string{"RANK=0", "WORLD_SIZE=1", "LOCAL_RANK=0", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=1"}, append(quick, "--netns", "1gbit")...)
	require.NotZero(t, code)
	require.Contains(t, stderr, "already a rank")
}

// Without it the lines that move the sweep's bar would scroll past above it, or
// swallow what else is said.
func TestBarOnly(t *testing.T) {
	var b bytes.Buffer
	w := newBarWriter(&b)
	w.barOnly = true
	for _, s := range []string{"step 1/9  a link\nsomething", " else\n", "step 2/9  a link\n"} {
		_, err := w.Write([]byte(s))
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	require.Contains(t, b.String(), "something else\n")
	require.NotContains(t, b.String(), "a link")
}

// Without it progress over several links would start over with each, or promise
// an end after the first.
func TestReportEvery(t *testing.T) {
	var b strings.Builder
	o := &benchBuckets{rates: []string{"1gbit", "200mbit"}, link: 1, progress: &b}
	o.Link = "200mbit"
	report := o.reportEvery(time.Hour)
	p := bench.BucketsProgress{Done: 3, Total: 30, Elapsed: time.Second, Left: 9 * time.Second, Setting: bench.Setting{CapMB: 2, Ends: bench.SmallBoth}}
	report(p)
	p.Done = 6
	report(p) // too soon
	p.Done, p.Left = 30, 0
	report(p)
	require.Equal(t, "step 33/60  200mbit: cap 2 MiB, small ends both; about 9s left\n"+
		"step 60/60  200mbit: cap 2 MiB, small ends both; about 0s left\n", b.String())
	require.Regexp(t, stepLine, b.String(), "the bar doesn't move")
}
