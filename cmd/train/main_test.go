package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/trainer"
)

// binary is the program, built once: signals and exit codes are a built
// binary's affair, `go run` has its own.
var binary string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "tandem-test-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		binary = filepath.Join(dir, "train")
		if out, err := exec.Command("go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "go build: %v\n%s", err, out)
			return 1
		}
		return m.Run()
	}())
}

// text writes a text to train on.
func text(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "text")
	var b strings.Builder
	for i := range 3000 {
		fmt.Fprintf(&b, "%d times seven is %d.\n", i%100, i%100*7)
	}
	require.NoError(t, os.WriteFile(path, []byte(b.String()), 0o600))
	return path
}

// train runs the program to its end, which must come soon.
func train(t *testing.T, env []string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Env = append(os.Environ(), env...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	require.NoError(t, ctx.Err(), "the program hangs")
	var ee *exec.ExitError
	if err != nil {
		require.ErrorAs(t, err, &ee)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

func metrics(t *testing.T, dir string) []trainer.Metrics {
	t.Helper()
	f, err := os.Open(filepath.Join(dir, "metrics.jsonl"))
	require.NoError(t, err)
	defer f.Close()
	var all []trainer.Metrics
	for s := bufio.NewScanner(f); s.Scan(); {
		var m trainer.Metrics
		require.NoError(t, json.Unmarshal(s.Bytes(), &m))
		all = append(all, m)
	}
	return all
}

// tiny are flags of a model that trains in no time.
func tiny(data, out string, more ...string) []string {
	return append([]string{"--data", data, "--out", out, "--layers", "2", "--heads", "2", "--d-model", "32", "--block", "16",
		"--threads", "1", "--sample", "0", "--lr", "3e-3", "--warmup", "5"}, more...)
}

// Without it the program's main promise is untested: it starts ranks, trains,
// evaluates, samples, writes metrics and every rank's log.
func TestTrains(t *testing.T) {
	dir := t.TempDir()
	stdout, stderr, code := train(t, nil, tiny(text(t), dir, "--steps", "60", "--batch", "8", "--eval-every", "30", "--sample", "20")...)
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, "no NVIDIA GPU found")
	require.Contains(t, stdout, "2 ranks")
	require.Contains(t, stdout, "step 60/60")
	require.Contains(t, stdout, "---\n", "a sample")
	all := metrics(t, dir)
	require.Len(t, all, 60)
	for i, m := range all {
		require.Equal(t, i+1, m.Step)
		require.Equal(t, (i+1)%30 == 0, m.ValLoss != nil)
		require.Positive(t, m.GradNorm)
		require.Positive(t, m.TokensPerS)
		require.Equal(t, 2, m.WorldSize)
		require.GreaterOrEqual(t, m.Buckets, 8)
		require.Positive(t, m.CommMS)
	}
	require.Less(t, *all[59].ValLoss, 0.75*all[0].Loss, "it learns")
	for rank := range 2 {
		log, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("rank%d.log", rank)))
		require.NoError(t, err)
		require.NotEmpty(t, log)
	}
}

// Without it --bucket-cap-mb auto would search for ever, or not say what it saw.
func TestTunesBuckets(t *testing.T) {
	dir := t.TempDir()
	_, stderr, code := train(t, nil, tiny(text(t), dir, "--steps", "140", "--batch", "2", "--bucket-cap-mb", "auto")...)
	require.Zero(t, code, stderr)
	csv, err := os.ReadFile(filepath.Join(dir, "autotune.csv"))
	require.NoError(t, err)
	require.Equal(t, 1, strings.Count(string(csv), ",true\n"), "one is chosen:\n%s", csv)
	require.Greater(t, strings.Count(string(csv), "\n"), 4)
	all := metrics(t, dir)
	sizes := map[int]bool{}
	for _, m := range all {
		sizes[m.Buckets] = true
	}
	require.Greater(t, len(sizes), 1, "none but the default was tried")
	require.Less(t, all[139].Loss, all[0].Loss)
}

// Without it different numbers of ranks, or micro-steps, would train on
// different batches, or average wrongly.
func TestWorldSizesTrainAlike(t *testing.T) {
	data := text(t)
	var base []trainer.Metrics
	for _, s := range [][]string{
		{"--nproc", "1", "--batch", "8"}, {"--nproc", "2", "--batch", "4"}, {"--nproc", "4", "--batch", "2"},
		{"--nproc", "2", "--batch", "2", "--grad-accum", "2"},
	} {
		dir := t.TempDir()
		_, stderr, code := train(t, nil, tiny(data, dir, append(s, "--steps", "20", "--dropout", "0.1")...)...)
		require.Zero(t, code, stderr)
		all := metrics(t, dir)
		if base == nil {
			base = all
		}
		for i := range all {
			require.InDelta(t, base[i].Loss, all[i].Loss, 1e-3, "%v, step %d", s, i+1)
			require.InEpsilon(t, base[i].GradNorm, all[i].GradNorm, 1e-3, "%v, step %d", s, i+1)
		}
		require.InDelta(t, *base[19].ValLoss, *all[19].ValLoss, 1e-3)
	}
}

// Without it a rerun might not repeat a run, and no report could be reproduced.
func TestRerunsAreIdentical(t *testing.T) {
	data := text(t)
	var runs [2][]trainer.Metrics
	for i := range runs {
		dir := t.TempDir()
		_, stderr, code := train(t, nil, tiny(data, dir, "--steps", "10", "--batch", "4", "--seed", "9")...)
		require.Zero(t, code, stderr)
		runs[i] = metrics(t, dir)
	}
	for i := range runs[0] {
		require.Equal(t, runs[0][i].Loss, runs[1][i].Loss)
		require.Equal(t, runs[0][i].GradNorm, runs[1][i].GradNorm)
	}
	require.Equal(t, *runs[0][9].ValLoss, *runs[1][9].ValLoss)
}

// Without it a mistake would be a stack trace, a hang, or half a run: each is
// one line that names the thing and what to do, a non-zero exit, and no files.
func TestBadInput(t *testing.T) {
	data := text(t)
	dir := t.TempDir()
	file := func(name, s string) string {
		p := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(p, []byte(s), 0o600))
		return p
	}
	for name, c := range map[string]struct {
		args, env []string
		want      string
	}{
		"missing text":       {args: []string{"--data", filepath.Join(dir, "none")}, want: "--data"},
		"empty text":         {args: []string{"--data", file("empty", "")}, want: "empty"},
		"short text":         {args: []string{"--data", file("short", "abc")}, want: "too short"},
		"not utf-8":          {args: []string{"--data", file("latin1", "\xe9")}, want: "UTF-8"},
		"heads":              {args: []string{"--data", data, "--d-model", "33"}, want: "divisible"},
		"no ranks":           {args: []string{"--data", data, "--nproc", "0"}, want: "--nproc 0"},
		"too many ranks":     {args: []string{"--data", data, "--nproc", "100000"}, want: "nproc 100000"},
		"backend":            {args: []string{"--data", data, "--backend", "mpi"}, want: `"mpi"`},
		"no gpu":             {args: []string{"--data", data, "--backend", "nccl"}, want: "nccl"},
		"preset":             {args: []string{"--data", data, "--preset", "huge"}, want: "huge"},
		"caps":               {args: []string{"--data", data, "--bucket-cap-mb", "1,x"}, want: `"x"`},
		"argument":           {args: []string{"extra"}, want: "extra"},
		"flag":               {args: []string{"--stepz", "1"}, want: "stepz"},
		"half an identity":   {args: []string{"--data", data}, env: []string{"RANK=0"}, want: "WORLD_SIZE"},
		"unwritable out":     {args: []string{"--data", data, "--out", filepath.Join(data, "out")}, want: "--out"},
		"learning rate":      {args: []string{"--data", data, "--lr", "-1"}, want: "--lr"},
		"infinite rate":      {args: []string{"--data", data, "--lr", "inf"}, want: "positive and finite"},
		"infinite clip":      {args: []string{"--data", data, "--clip", "inf"}, want: "--clip +Inf: must be finite"},
		"negative sample":    {args: []string{"--data", data, "--sample", "-1"}, want: "--sample -1: must not be negative"},
		"no grace":           {args: []string{"--data", data, "--grace", "-1s"}, want: "--grace -1s: must be positive"},
		"two origins":        {args: []string{"--data", data, "--resume", dir, "--init-from", dir}, want: "--init-from"},
		"timeline nowhere":   {args: []string{"--data", data, "--timeline", filepath.Join(dir, "none", "t.json")}, want: "--timeline"},
		"timeline directory": {args: []string{"--data", data, "--timeline", dir}, want: "is a directory"},
		"preset of a bench":  {args: []string{"bench", "step", "--preset", "huge"}, want: "--preset"},
		"rate of a network":  {args: []string{"bench", "step", "--netns", "fast"}, want: "fast"},
		"bench without rank": {args: []string{"bench", "step", "--nproc", "0"}, want: "--nproc 0"},
	} {
		t.Run(name, func(t *testing.T) {
			out := filepath.Join(t.TempDir(), "out")
			args := c.args
			if name != "unwritable out" && args[0] != "bench" {
				args = append([]string{"--out", out}, args...)
			}
			stdout, stderr, code := train(t, c.env, args...)
			require.NotZero(t, code)
			require.Contains(t, stderr, c.want)
			require.Equal(t, 1, strings.Count(strings.TrimSpace(stderr), "\n")+1, "one line: %s", stderr)
			require.Empty(t, stdout)
			_, err := os.Stat(filepath.Join(out, "metrics.jsonl"))
			require.ErrorIs(t, err, os.ErrNotExist)
		})
	}
}

// Without it a taken port would be somebody's guess.
func TestTakenPort(t *testing.T) {
	_, stderr, code := train(t, []string{"RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + occupied(t)},
		tiny(text(t), t.TempDir())...)
	require.NotZero(t, code)
	require.Contains(t, stderr, "address already in use")
	require.Contains(t, stderr, "127.0.0.1:")
}

// Without it a rank that dies in mid-step could leave the others waiting, the
// culprit unnamed or processes behind.
func TestKilledRank(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command(binary, tiny(text(t), dir, "--steps", "1000000", "--nproc", "3", "--batch", "4")...)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	require.NoError(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill() }()
	ranks := children(t, cmd.Process.Pid, 3)
	waitFor(t, func() bool {
		b, err := os.ReadFile(filepath.Join(dir, "metrics.jsonl"))
		return err == nil && len(b) > 4000
	})
	killed := time.Now()
	victim := ranks[1]
	require.NoError(t, syscall.Kill(victim, syscall.SIGKILL))
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err := <-done:
		var ee *exec.ExitError
		require.ErrorAs(t, err, &ee)
		require.Equal(t, 128+int(syscall.SIGKILL), ee.ExitCode())
	case <-time.After(5 * time.Second):
		t.Fatal("the job is not over 5 s after a rank was killed")
	}
	t.Logf("over after %v", time.Since(killed))
	require.Regexp(t, `rank 1 \(pid \d+\) failed first, .*SIGKILL`, errs.String())
	require.Regexp(t, `culprit=1 seq=\d+`, errs.String(), "the survivors name the culprit and the collective")
	for _, pid := range ranks {
		require.ErrorIs(t, syscall.Kill(pid, 0), syscall.ESRCH, "rank process %d is still there", pid)
	}
}

// Without it an interrupted run would lose its last evaluation, or not stop.
func TestInterruptEndsInOrder(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command(binary, tiny(text(t), dir, "--steps", "1000000", "--batch", "4", "--eval-every", "1000000")...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	require.NoError(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill() }()
	waitFor(t, func() bool {
		b, err := os.ReadFile(filepath.Join(dir, "metrics.jsonl"))
		return err == nil && len(b) > 4000
	})
	require.NoError(t, cmd.Process.Signal(os.Interrupt))
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err := <-done:
		var ee *exec.ExitError
		require.ErrorAs(t, err, &ee, "an interrupted run is not a finished one")
		require.Equal(t, 130, ee.ExitCode())
	case <-time.After(20 * time.Second):
		t.Fatalf("still running 20 s after SIGINT\n%s", errs.String())
	}
	require.Contains(t, out.String(), "val_loss", "the last step is evaluated\n"+errs.String())
}

// Without it training on garbage would go on: the first bad step, rank and
// gradient are named, and all ranks stop.
func TestNotFinite(t *testing.T) {
	_, stderr, code := train(t, nil, tiny(text(t), t.TempDir(), "--steps", "50", "--batch", "4", "--lr", "1e30", "--warmup", "0", "--clip", "0")...)
	require.NotZero(t, code)
	require.Regexp(t, `step \d+`, stderr)
	require.Regexp(t, `NaN|Inf|finite`, stderr)
	require.Regexp(t, `h\.\d|ln_f|wte|wpe`, stderr, "the parameter is named")
}

// Without it machines that read our output would read prose.
func TestJSON(t *testing.T) {
	stdout, stderr, code := train(t, nil, tiny(text(t), t.TempDir(), "--steps", "3", "--batch", "4", "--json")...)
	require.Zero(t, code, stderr)
	n := 0
	for s := bufio.NewScanner(strings.NewReader(stdout)); s.Scan(); n++ {
		var v map[string]any
		require.NoError(t, json.Unmarshal(s.Bytes(), &v), s.Text())
	}
	require.GreaterOrEqual(t, n, 3)
	stdout, stderr, code = train(t, nil, "bench", "step", "--steps", "2", "--json")
	require.Zero(t, code, stderr)
	var r map[string]any
	require.NoError(t, json.Unmarshal([]byte(stdout), &r))
	for _, key := range []string{"step_ms", "forward_ms", "backward_ms", "optimizer_ms", "comm_ms", "exposed_comm_ms", "hidden_share", "tokens_per_s", "gflops", "allocs_per_step"} {
		require.Contains(t, r, key)
	}
}

// children waits for n child processes of pid.
func children(t *testing.T, pid, n int) []int {
	t.Helper()
	var pids []int
	waitFor(t, func() bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
		if errors.Is(err, os.ErrNotExist) {
			t.Skip("needs /proc/PID/task/TID/children")
		}
		pids = pids[:0]
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
		for _, task := range tasks {
			b, _ = os.ReadFile(task)
			for _, f := range strings.Fields(string(b)) {
				p, err := strconv.Atoi(f)
				require.NoError(t, err)
				pids = append(pids, p)
			}
		}
		return len(pids) == n
	})
	return pids
}

func waitFor(t *testing.T, ok func() bool) {
	t.Helper()
	for range 600 {
		if ok() {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatal("nothing happened for 30 s")
}
