package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// running starts the program and returns it with what it says on standard error.
func running(t *testing.T, env []string, args ...string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	cmd := exec.Command(binary, args...)
	cmd.Env = append(os.Environ(), env...)
	errs := &bytes.Buffer{}
	cmd.Stderr = errs
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return cmd, errs
}

// ends waits for the end, which must come soon, and returns the exit code.
func ends(t *testing.T, cmd *exec.Cmd) int {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Fatal("still running after 30 s")
	}
	return cmd.ProcessState.ExitCode()
}

// training waits until a run has finished some steps.
func training(t *testing.T, dir string) {
	t.Helper()
	waitFor(t, func() bool {
		b, err := os.ReadFile(filepath.Join(dir, "metrics.jsonl"))
		return err == nil && len(b) > 2000
	})
}

// Without it two jobs in one directory would write over one another, or a job that
// goes on would lose the log of its first life.
func TestOneJobPerDirectory(t *testing.T) {
	dir, data := t.TempDir(), text(t)
	flags := tiny(data, dir, "--steps", "1000000", "--batch", "4", "--resume", "auto")
	first, errs := running(t, nil, flags...)
	training(t, dir)
	_, stderr, code := train(t, nil, flags...)
	require.Equal(t, 1, code)
	require.Equal(t, 1, strings.Count(stderr, "\n"), stderr)
	require.Contains(t, stderr, dir)
	require.Contains(t, stderr, "process "+strconv.Itoa(first.Process.Pid))
	require.NoError(t, first.Process.Signal(syscall.SIGHUP))
	require.Equal(t, 129, ends(t, first), errs)
	log, err := os.ReadFile(filepath.Join(dir, "rank0.log"))
	require.NoError(t, err)
	all := metrics(t, dir)
	_, stderr, code = train(t, nil, tiny(data, dir, "--steps", strconv.Itoa(len(all)+2), "--batch", "4", "--resume", "auto")...)
	require.Zero(t, code, stderr)
	again, err := os.ReadFile(filepath.Join(dir, "rank0.log"))
	require.NoError(t, err)
	require.True(t, bytes.HasPrefix(again, log))
}

// Without it a job of which somebody stopped one rank would pass for finished.
func TestStoppedRank(t *testing.T) {
	dir := t.TempDir()
	cmd, errs := running(t, nil, tiny(text(t), dir, "--steps", "1000000", "--batch", "4")...)
	ranks := children(t, cmd.Process.Pid, 2)
	training(t, dir)
	require.NoError(t, syscall.Kill(ranks[1], syscall.SIGTERM))
	require.Equal(t, 143, ends(t, cmd), errs)
	require.Contains(t, errs.String(), "another rank was told to")
	all := metrics(t, dir)
	require.Equal(t, all[len(all)-1].Step, latest(t, dir).Step, "it was saved")
}

// Without it a rank that waits for others, or a command that has nothing to save,
// could not be interrupted with one signal.
func TestFirstSignalEndsWhatHasNothingToSave(t *testing.T) {
	t.Run("waiting rank", func(t *testing.T) {
		env := []string{"RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + free(t)}
		dir := t.TempDir()
		cmd, errs := running(t, env, tiny(text(t), dir)...)
		waitFor(t, func() bool { _, err := os.Stat(filepath.Join(dir, lockFile)); return err == nil })
		require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		require.Equal(t, 143, ends(t, cmd), errs)
	})
	t.Run("bench step", func(t *testing.T) {
		cmd, errs := running(t, nil, "bench", "step", "--steps", "1000000")
		children(t, cmd.Process.Pid, 2)
		require.NoError(t, cmd.Process.Signal(os.Interrupt))
		require.Equal(t, 130, ends(t, cmd), errs)
	})
}
