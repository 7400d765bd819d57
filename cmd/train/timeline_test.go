package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/trace"
)

// Without it `train data prepare` could write what --data doesn't take, or
// training on it and on the text differ.
func TestPreparedDataTrainsAlike(t *testing.T) {
	path := text(t)
	out := filepath.Join(t.TempDir(), "tokens")
	stdout, stderr, code := train(t, nil, "data", "prepare", path, "--tokenizer", "char", "--out", out)
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, "tokens to train on")
	args := []string{"--steps", "2", "--nproc", "1", "--layers", "1", "--sample", "0", "--json", "--out"}
	run := func(dataPath string) (losses []float64) {
		dir := filepath.Join(t.TempDir(), "out")
		_, stderr, code := train(t, nil, append(args, dir, "--data", dataPath)...)
		require.Zero(t, code, stderr)
		for _, m := range metrics(t, dir) {
			losses = append(losses, m.Loss)
		}
		require.Len(t, losses, 2)
		return losses
	}
	require.Equal(t, run(path), run(filepath.Join(out, "train.bin")))
	_, stderr, code = train(t, nil, append(args, t.TempDir(), "--data", out, "--tokenizer", "gpt2")...)
	require.NotZero(t, code)
	require.Contains(t, stderr, "tokenizer char made these tokens")
}

// Without it the ranks of one machine would each encode the text, or a timeline
// lack ranks, steps or micro-steps.
func TestTimelineOfARun(t *testing.T) {
	dir := t.TempDir()
	file, svg := filepath.Join(dir, "t.json"), filepath.Join(dir, "t.svg")
	_, stderr, code := train(t, nil, "--data", text(t), "--tokenizer", "gpt2", "--steps", "3", "--nproc", "2", "--threads", "1",
		"--layers", "1", "--d-model", "32", "--batch", "2", "--grad-accum", "2", "--sample", "0", "--out", dir, "--timeline", file)
	require.Zero(t, code, stderr)
	require.FileExists(t, filepath.Join(dir, "tokens", "train.bin"))
	tl, err := trace.Read(file)
	require.NoError(t, err)
	require.Len(t, tl.Ranks, 2)
	require.Positive(t, tl.Ranks[1].Clock.Error)
	for _, r := range tl.Ranks {
		count := map[string]int{}
		for _, s := range r.Slices {
			count[s.Name]++
		}
		n := 3 * len(tl.Buckets)
		require.Equal(t, map[string]int{trace.Forward: 6, trace.Backward: 6, "allreduce": n, "update": n}, count)
	}
	stdout, stderr, code := train(t, nil, "timeline", file, "--svg", svg)
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, "3 steps of 2 ranks")
	require.Contains(t, stdout, "What to change")
	raw, err := os.ReadFile(svg)
	require.NoError(t, err)
	require.Contains(t, string(raw), "rank 1")
	_, stderr, code = train(t, nil, "timeline", svg)
	require.NotZero(t, code)
	require.Contains(t, stderr, "not a timeline that tandem wrote")
}
