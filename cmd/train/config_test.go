package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Without it the order of sources could be another than is documented: command
// line, environment, file, preset.
func TestOrderOfSources(t *testing.T) {
	file := filepath.Join(t.TempDir(), "run.toml")
	require.NoError(t, os.WriteFile(file, []byte("steps = 11\nbatch = 12\nlayers = 3\nbucket-cap-mb = [1, 2.5]\nlr = 1e-4\n"), 0o600))
	stdout, stderr, code := train(t, []string{"TANDEM_TRAIN_STEPS=21", "TANDEM_TRAIN_BATCH=22", "TANDEM_TRAIN_CONFIG=" + file, "TANDEM_TRAIN_OUT="},
		"--data", "text", "--steps", "31", "--print-config")
	require.Zero(t, code, stderr)
	got := map[string]string{}
	for line := range strings.Lines(stdout) {
		line, origin, ok := strings.Cut(strings.TrimSpace(line), " # ")
		require.True(t, ok, line)
		name, value, ok := strings.Cut(strings.TrimPrefix(line, "# "), " =")
		require.True(t, ok, line)
		got[name] = strings.TrimSpace(value) + " from " + origin
	}
	for name, want := range map[string]string{
		"steps": "31 from flag", "batch": "22 from environment TANDEM_TRAIN_BATCH", "layers": "3 from file " + file,
		"bucket-cap-mb": `"1,2.5" from file ` + file, "lr": "0.0001 from file " + file, "min-lr": "1e-05 from default",
		"heads": "4 from preset mini", "eval-every": "250 from default", "nproc": " from default", "out": " from default",
		"data": `"text" from flag`,
	} {
		require.Equal(t, want, got[name], name)
	}
}

// Without it what --print-config prints might not be what --config reads.
func TestPrintedConfigReadsBack(t *testing.T) {
	first, stderr, code := train(t, nil, "--data", `odd "name"\`, "--preset", "small", "--steps", "7", "--bucket-cap-mb", "1,4", "--clip", "0", "--print-config")
	require.Zero(t, code, stderr)
	file := filepath.Join(t.TempDir(), "run.toml")
	require.NoError(t, os.WriteFile(file, []byte(first), 0o600))
	second, stderr, code := train(t, nil, "--config", file, "--print-config")
	require.Zero(t, code, stderr)
	values := func(s string) (all []string) {
		for line := range strings.Lines(s) {
			v, _, _ := strings.Cut(line, " # ")
			all = append(all, strings.TrimSpace(v))
		}
		return all
	}
	require.Equal(t, values(first), values(second))
}

// Without it a mistyped key would silently be nobody's.
func TestUnknownAndBadKeys(t *testing.T) {
	dir := t.TempDir()
	file := func(s string) string {
		p := filepath.Join(dir, "c.toml")
		require.NoError(t, os.WriteFile(p, []byte(s), 0o600))
		return p
	}
	for s, want := range map[string]string{
		"stepz = 3":           "no flag --stepz",
		"steps = 'x'":         `"x"`,
		"[steps]\nx = 1":      "steps",
		"steps":               "line",
		"print-config = true": "no flag --print-config",
		"config = 'x'":        "no flag --config",
		"steps = 1\nsteps=2":  "steps",
		"steps = 2024-01-01":  "a flag's value",
		"heads = 5":           "divisible",
	} {
		_, stderr, code := train(t, nil, "--config", file(s), "--data", "x")
		require.NotZero(t, code, s)
		require.Contains(t, stderr, want, s)
		require.Equal(t, 1, strings.Count(strings.TrimSpace(stderr), "\n")+1, "one line: %s", stderr)
	}
	for v, want := range map[string]string{"TANDEM_TRAIN_STEPZ=3": "no flag --stepz", "TANDEM_TRAIN_STEPS=x": "TANDEM_TRAIN_STEPS", "TANDEM_TRAIN_HELP=1": "no flag --help"} {
		_, stderr, code := train(t, []string{v}, "--data", "x")
		require.NotZero(t, code)
		require.Contains(t, stderr, want)
	}
	_, stderr, code := train(t, nil, "--config", filepath.Join(dir, "none"))
	require.NotZero(t, code)
	require.Contains(t, stderr, "--config")
}

// Without it ranks could train with other values than the process that started
// them has shown, or a quiet run not be quiet.
func TestConfigReachesTheRanksQuietly(t *testing.T) {
	out := t.TempDir()
	file := filepath.Join(t.TempDir(), "run.toml")
	require.NoError(t, os.WriteFile(file, []byte("steps = 3\nquiet = true\nnproc = 2\nlayers = 1\nheads = 1\nd-model = 8\nblock = 8\n"), 0o600))
	stdout, stderr, code := train(t, []string{"TANDEM_TRAIN_BATCH=2", "TANDEM_TRAIN_THREADS=1"}, "--config", file, "--data", text(t), "--out", out)
	require.Zero(t, code, stderr)
	require.Empty(t, stdout)
	require.Empty(t, stderr)
	require.Len(t, metrics(t, out), 3)
	_, stderr, code = train(t, nil, "--quiet", "--json", "--data", "x")
	require.NotZero(t, code)
	require.Contains(t, stderr, "--quiet")
}

// Without it a shell would complete nothing, or names that no longer exist.
func TestCompletion(t *testing.T) {
	for args, want := range map[string]string{
		"--preset ": "mini\nsmall\ngpt2\n", "--backend ": "auto\nring\nnccl\n", "--tokenizer ": "char\ngpt2\n", "--resume ": "auto\n", "bench step --preset ": "mini\n",
	} {
		i := strings.LastIndex(args, " ")
		stdout, _, code := train(t, nil, append(append([]string{"__complete"}, strings.Fields(args[:i])...), args[i+1:])...)
		require.Zero(t, code)
		require.True(t, strings.HasPrefix(stdout, want), "%s: %q", args, stdout)
	}
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		stdout, stderr, code := train(t, nil, "completion", shell)
		require.Zero(t, code, stderr)
		require.Contains(t, stdout, "train")
	}
}

// Without it nobody could see why a process takes itself for another rank; and a
// secret could end in a bug report.
func TestEnv(t *testing.T) {
	see := func(environ ...string) (string, error) {
		var b bytes.Buffer
		err := printEnv(&b, environ)
		return b.String(), err
	}
	out, err := see("HOME=/root", "TANDEM_THREADS=3")
	require.NoError(t, err)
	require.Contains(t, out, "none of a job")
	require.Contains(t, out, "3 a rank (TANDEM_THREADS)")
	require.NotContains(t, out, "HOME")

	torch := []string{"RANK=3", "WORLD_SIZE=4", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2", "GROUP_RANK=1", "MASTER_ADDR=h", "MASTER_PORT=29500"}
	out, err = see(append(torch, "TANDEM_SECRET=hunter2", "TANDEM_JOB_ID=j")...)
	require.NoError(t, err)
	for _, want := range []string{"3 of 4; 1 of 2 on this machine, machine 1", "source     torch", "tcp://h:29500, served by rank 0", "WORLD_SIZE=4", "(7 bytes, not shown)", "job        j"} {
		require.Contains(t, out, want)
	}
	require.NotContains(t, out, "hunter2")
	require.NotContains(t, out, "problem")
	out, err = see(torch...)
	require.NoError(t, err)
	require.Contains(t, out, "set TANDEM_SECRET")

	out, err = see("RANK=1", "TANDEM_THREADS=none")
	require.ErrorContains(t, err, "WORLD_SIZE")
	require.Contains(t, out, "variable   RANK=1", "what there is is shown all the same")
	require.Contains(t, out, `problem    TANDEM_THREADS="none"`)
	_, stderr, code := train(t, []string{"RANK=1"}, "env")
	require.NotZero(t, code)
	require.Contains(t, stderr, "WORLD_SIZE")
}
