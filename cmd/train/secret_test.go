package main

import (
	"bytes"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// Without it the job's secret could end up where others read it: on the
// command line, in a log, an error file or a flight record.
func TestSecretIsNowhere(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("reads /proc")
	}
	t.Run("our own launcher", func(t *testing.T) {
		dir := t.TempDir()
		out := &bytes.Buffer{}
		cmd := exec.Command(binary, tiny(text(t), dir, "--steps", "1000000", "--nproc", "2", "--batch", "4")...)
		cmd.Stdout, cmd.Stderr = out, out
		require.NoError(t, cmd.Start())
		defer func() { _ = cmd.Process.Kill() }()
		ranks := children(t, cmd.Process.Pid, 2)
		waitFor(t, func() bool { _, err := os.Stat(filepath.Join(dir, "metrics.jsonl")); return err == nil })
		secret := environ(t, ranks[0], "TANDEM_SECRET")
		require.Greater(t, len(secret), 20, "the launcher makes a secret of its own")
		notOnCommandLines(t, secret, append(ranks, cmd.Process.Pid)...)
		require.NoError(t, cmd.Process.Signal(syscall.SIGUSR1))
		waitFor(t, func() bool { _, err := os.Stat(filepath.Join(dir, "flight-rank1.json")); return err == nil })
		require.NoError(t, syscall.Kill(ranks[1], syscall.SIGKILL))
		_ = cmd.Wait()
		require.FileExists(t, filepath.Join(dir, "error.json"))
		require.FileExists(t, filepath.Join(dir, "flight-rank0.json"))
		require.NotContains(t, out.String(), secret)
		require.Greater(t, notInFiles(t, secret, dir), 4)
	})
	t.Run("another launcher", func(t *testing.T) {
		const secret = "do-not-tell-anybody-5f1d"
		dir, data := t.TempDir(), text(t)
		var outs [2]bytes.Buffer
		var cmds [2]*exec.Cmd
		port := free(t)
		for r := range cmds {
			mine := secret
			if r == 1 {
				mine = "not-what-the-others-know-77a0" // so that there is something to complain about
			}
			cmds[r] = exec.Command(binary, tiny(data, filepath.Join(dir, fmt.Sprint(r)), "--steps", "5")...)
			cmds[r].Env = append(os.Environ(), fmt.Sprintf("RANK=%d", r), "WORLD_SIZE=2", fmt.Sprintf("LOCAL_RANK=%d", r),
				"LOCAL_WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT="+port, "TANDEM_SECRET="+mine)
			cmds[r].Stdout, cmds[r].Stderr = &outs[r], &outs[r]
			require.NoError(t, cmds[r].Start())
			defer func() { _ = cmds[r].Process.Kill() }()
		}
		require.Error(t, cmds[1].Wait(), "a wrong secret")
		require.Contains(t, outs[1].String(), "secret")
		require.NoError(t, cmds[0].Process.Kill())
		_ = cmds[0].Wait()
		for _, s := range []string{secret, "not-what-the-others-know-77a0"} {
			for r := range outs {
				require.NotContains(t, outs[r].String(), s)
			}
			notInFiles(t, s, dir)
		}
	})
}

// environ is a variable of a running process.
func environ(t *testing.T, pid int, name string) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	require.NoError(t, err)
	for kv := range strings.SplitSeq(string(b), "\x00") {
		if k, v, _ := strings.Cut(kv, "="); k == name {
			return v
		}
	}
	t.Fatalf("process %d has no %s", pid, name)
	return ""
}

func notOnCommandLines(t *testing.T, secret string, pids ...int) {
	t.Helper()
	for _, pid := range pids {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		require.NoError(t, err)
		require.NotEmpty(t, b)
		require.NotContains(t, string(b), secret)
	}
}

// notInFiles reads everything that a run has written and counts the files.
func notInFiles(t *testing.T, secret, dir string) (n int) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		n++
		b, err := os.ReadFile(path)
		require.NotContains(t, string(b), secret, path)
		return err
	}))
	return n
}

func free(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	require.NoError(t, err)
	return port
}
