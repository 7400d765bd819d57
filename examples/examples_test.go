package examples

import (
	"bytes"
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// build builds an example.
func build(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), filepath.Base(name))
	out, err := exec.Command("go", "build", "-o", path, "./"+name).CombinedOutput()
	require.NoError(t, err, string(out))
	return path
}

// run runs a program to its end, which must come soon.
func run(t *testing.T, path string, env ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, path)
	cmd.Env = append(os.Environ(), env...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	require.NoError(t, cmd.Run(), errs.String())
	return out.String()
}

// losses are the numbers behind "loss" in the lines of a run.
func losses(t *testing.T, out string) (all []float64) {
	t.Helper()
	for _, m := range regexp.MustCompile(`loss ([0-9.]+)`).FindAllStringSubmatch(out, -1) {
		x, err := strconv.ParseFloat(m[1], 64)
		require.NoError(t, err)
		all = append(all, x)
	}
	return all
}

// Without it what people copy first might not run, or not learn.
func TestExamplesLearn(t *testing.T) {
	for name, below := range map[string]float64{"smallest": 0.1, "customop": 0.02} {
		path := build(t, name)
		for _, env := range [][]string{nil, {"RANK=0", "WORLD_SIZE=1", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1"}} {
			got := losses(t, run(t, path, env...))
			require.NotEmpty(t, got, name)
			require.Less(t, got[len(got)-1], below, "%s with %v", name, env)
		}
	}
}

// Without it the promise of the move from one process to many, the same losses,
// would be an assertion.
func TestMovedProgramTrainsAlike(t *testing.T) {
	want := losses(t, run(t, build(t, "fromtape/before")))
	require.Len(t, want, 4)
	after := build(t, "fromtape/after")
	for _, env := range [][]string{nil, {"RANK=0", "WORLD_SIZE=1", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1"}} {
		got := losses(t, run(t, after, env...))
		require.Len(t, got, len(want))
		for i := range want {
			require.InEpsilon(t, want[i], got[i], 1e-2, "%v", env)
		}
	}
}

// Without it the README would show another diff than the one between the programs.
func TestDiffIsShown(t *testing.T) {
	diff, err := exec.LookPath("diff")
	if err != nil {
		t.Skip("needs diff")
	}
	out, _ := exec.Command(diff, "-u", "fromtape/before/main.go", "fromtape/after/main.go").Output() // exit code 1: they differ
	_, hunks, ok := strings.Cut(string(out), "\n@@")
	require.True(t, ok)
	readme, err := os.ReadFile("fromtape/README.md")
	require.NoError(t, err)
	require.Contains(t, string(readme), "@@"+hunks)
}

// Without it the commands for ranks by hand could be wrong: these are the
// README's, for one machine.
func TestByHand(t *testing.T) {
	path := build(t, "twohosts")
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var outs, errs [2]bytes.Buffer
	var cmds [2]*exec.Cmd
	port := freePort(t)
	for rank := range cmds {
		cmds[rank] = exec.CommandContext(ctx, path)
		cmds[rank].Env = append(os.Environ(), "RANK="+strconv.Itoa(rank), "WORLD_SIZE=2", "LOCAL_RANK="+strconv.Itoa(rank),
			"LOCAL_WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT="+port, "TANDEM_SECRET=of the test")
		cmds[rank].Stdout, cmds[rank].Stderr = &outs[rank], &errs[rank]
	}
	for _, c := range cmds {
		require.NoError(t, c.Start())
	}
	for rank, c := range cmds {
		require.NoError(t, c.Wait(), errs[rank].String())
		require.Contains(t, outs[rank].String(), "rank "+strconv.Itoa(rank)+" of 2")
	}
	require.Contains(t, outs[0].String(), "allreduce of 4 MiB over 2 ranks")
}

// freePort is a port of 127.0.0.1 that nobody listens on.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	require.NoError(t, err)
	return port
}
