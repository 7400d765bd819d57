package main

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/checkpoint"
)

// Without it a trained model would be of no use: its text must continue the
// prompt, depend on the seed alone and have the length that was asked for.
func TestSample(t *testing.T) {
	out := t.TempDir()
	_, stderr, code := train(t, nil, tiny(text(t), out, "--steps", "60", "--batch", "8")...)
	require.Zero(t, code, stderr)
	run := func(args ...string) string {
		stdout, stderr, code := train(t, nil, append([]string{"sample", "--checkpoint"}, args...)...)
		require.Zero(t, code, stderr)
		require.Empty(t, stderr)
		return stdout
	}
	a := run(out, "--prompt", "times ", "-n", "50", "--seed", "3")
	require.True(t, strings.HasPrefix(a, "times "))
	require.Len(t, a, len("times ")+50+1, "one token a character, and the end of the line")
	require.Equal(t, a, run(latest(t, out).Dir, "--prompt", "times ", "-n", "50", "--seed", "3", "--threads", "1"))
	require.NotEqual(t, a, run(out, "--prompt", "times ", "-n", "50", "--seed", "4"))
	require.Equal(t, run(out, "--prompt", "is ", "--temperature", "0", "--seed", "1"), run(out, "--prompt", "is ", "--top-k", "1", "--seed", "2"))
	require.NotEmpty(t, strings.TrimSpace(run(out, "-n", "30")), "without a prompt")
	require.Equal(t, "7\n", run(out, "--prompt", "7", "-n", "0"))

	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"no checkpoint": {nil, "--checkpoint"},
		"empty":         {[]string{"--checkpoint", t.TempDir()}, "no complete checkpoint"},
		"character":     {[]string{"--checkpoint", out, "--prompt", "Ж"}, `'Ж' is not in the text's vocabulary`},
		"temperature":   {[]string{"--checkpoint", out, "--temperature", "-1"}, "--temperature -1"},
		"top-k":         {[]string{"--checkpoint", out, "--top-k", "-1"}, "--top-k -1"},
		"length":        {[]string{"--checkpoint", out, "-n", "-1"}, "--tokens -1"},
	} {
		_, stderr, code := train(t, nil, append([]string{"sample"}, c.args...)...)
		require.NotZero(t, code, name)
		require.Contains(t, stderr, c.want, name)
		require.Equal(t, 1, strings.Count(strings.TrimSpace(stderr), "\n")+1, "one line: %s", stderr)
	}
}

// Without it a text would appear all at once at its end, or could not be stopped.
func TestSampleStreams(t *testing.T) {
	out := t.TempDir()
	_, stderr, code := train(t, nil, tiny(text(t), out, "--steps", "2", "--batch", "2")...)
	require.Zero(t, code, stderr)
	cmd := exec.Command(binary, "sample", "--checkpoint", out, "--prompt", "-", "-n", "1000000000")
	cmd.Stdin = strings.NewReader("3 times\n")
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill() }()
	first := make([]byte, 200)
	_, err = io.ReadFull(stdout, first)
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(string(first), "3 times"))
	require.NoError(t, cmd.Process.Signal(os.Interrupt))
	_, err = io.Copy(io.Discard, stdout)
	require.NoError(t, err)
	require.Error(t, cmd.Wait())
	require.Equal(t, 130, cmd.ProcessState.ExitCode())
}

// Without it a model from the hub could not be sampled without training it first.
func TestSampleOfHuggingFaceDirectory(t *testing.T) {
	out := t.TempDir()
	data := filepath.Join(t.TempDir(), "text")
	require.NoError(t, os.WriteFile(data, []byte(strings.Repeat("It was the best of times, it was the worst of times. ", 60)), 0o600))
	_, stderr, code := train(t, nil, "--data", data, "--out", out, "--tokenizer", "gpt2", "--layers", "1", "--heads", "1",
		"--d-model", "8", "--block", "8", "--steps", "1", "--batch", "2", "--sample", "0", "--threads", "1")
	require.Zero(t, code, stderr)
	dir := t.TempDir()
	for _, name := range []string{"config.json", checkpoint.ModelFile} {
		raw, err := os.ReadFile(latest(t, out).Path(name))
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), raw, 0o600))
	}
	a, stderr, code := train(t, nil, "sample", "--checkpoint", dir, "--prompt", "It was", "-n", "20")
	require.Zero(t, code, stderr)
	b, stderr, code := train(t, nil, "sample", "--checkpoint", out, "--prompt", "It was", "-n", "20")
	require.Zero(t, code, stderr)
	require.Equal(t, b, a)
}
