//go:build netns

package bench_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/bench"
	"github.com/tandem-go/tandem/internal/netns"
)

// needsNetns skips where no network can be made, by making one.
func needsNetns(t *testing.T) {
	t.Helper()
	n, err := netns.Up(t.Context(), netns.Options{Ranks: 2, Rate: "100mbit"})
	if errors.Is(err, netns.ErrUnsupported) {
		t.Skipf("needs root, ip and tc: %v", err)
	}
	require.NoError(t, err)
	require.NoError(t, n.Down())
}

// Without it the sweep could measure loopback under a link's name, lose rank 0's
// result on its way to the starter, or leave namespaces behind.
func TestBucketsOverSlowLinks(t *testing.T) {
	needsNetns(t)
	dir := t.TempDir()
	program := filepath.Join(dir, "train")
	out, err := exec.Command("go", "build", "-o", program, "../cmd/train").CombinedOutput()
	require.NoError(t, err, string(out))

	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, "bench", "buckets", "--netns", "400mbit,100mbit", "--nproc", "2", "--preset", "mini",
		"--caps", "0.5,100", "--small-ends", "none", "--rounds", "1", "--steps", "2", "--warmup", "1", "--out", filepath.Join(dir, "sweep"), "--json")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	require.NoError(t, cmd.Run(), "%s", &stderr)

	r := &bench.BucketsReport{}
	require.NoError(t, json.Unmarshal(stdout.Bytes(), r))
	require.Len(t, r.Links, 2)
	for i, want := range []struct {
		link  string
		bytes float64 // per second
	}{{"400mbit", 50e6}, {"100mbit", 12.5e6}} {
		l := r.Links[i]
		require.Equal(t, want.link, l.Link)
		require.Equal(t, 2, l.WorldSize)
		one := l.At(bench.Setting{CapMB: 100, Ends: bench.SmallNone})
		require.NotNil(t, one)
		require.Equal(t, 1, one.Buckets)
		// Between two ranks a ring sends the gradient once; no link is faster than
		// its rate, but for what its token bucket has saved up.
		least := 0.8 * l.GradientMB * (1 << 20) / want.bytes * 1000
		require.Greater(t, one.CommMS, least, "%s: %.2f MiB in less time than the link has for them", l.Link, l.GradientMB)
		require.Greater(t, one.NoOverlapMS, least)
		require.Positive(t, one.NoCommMS)
	}
	for _, name := range []string{"buckets.json", "buckets.csv", "buckets.png", "buckets.svg"} {
		st, err := os.Stat(filepath.Join(dir, "sweep", name))
		require.NoError(t, err)
		require.Positive(t, st.Size(), name)
	}
	require.Contains(t, stderr.String(), "100mbit: cap ", "no progress")
	left, err := exec.Command("ip", "netns", "list").Output()
	require.NoError(t, err)
	require.NotContains(t, string(left), fmt.Sprintf("tandem-%d-", cmd.Process.Pid))
}
