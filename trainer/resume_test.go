package trainer

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/checkpoint"
)

// trainTo runs n ranks of a configuration to their end.
func trainTo(t *testing.T, n int, c Config) {
	t.Helper()
	for _, err := range ranks(t, n, func(ctx context.Context, g *tandem.Group) error {
		_, err := Run(ctx, g, c, Observer{})
		return err
	}) {
		require.NoError(t, err)
	}
}

// Without it a run that is continued would differ from one that was not stopped:
// in parameters, moments, batches, dropout, learning rate or metrics.
func TestContinuedRunIsTheSame(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"plain":      func(*Config) {},
		"micro-step": func(c *Config) { c.GradAccum, c.Dropout, c.Clip = 2, 0.2, 0.1 },
	} {
		t.Run(name, func(t *testing.T) {
			whole := small(t, t.TempDir())
			whole.Warmup, whole.LR, whole.MinLR = 8, 1e-2, 1e-3
			change(&whole)
			parts := whole
			parts.Out, parts.Keep = t.TempDir(), 99
			trainTo(t, 2, whole)
			trainTo(t, 2, parts)
			// As if the first life had been killed after its second checkpoint.
			require.NoError(t, os.RemoveAll(filepath.Join(parts.Out, checkpointDir, "step-00000030")))
			parts.Resume = ResumeAuto
			trainTo(t, 2, parts)
			for _, file := range []string{checkpoint.ModelFile, checkpoint.OptimizerFile} {
				requireSameFile(t, filepath.Join(whole.Out, checkpointDir, "step-00000030", file), filepath.Join(parts.Out, checkpointDir, "step-00000030", file))
			}
			raw, err := os.ReadFile(filepath.Join(parts.Out, "metrics.jsonl"))
			require.NoError(t, err)
			require.NoError(t, keepMetrics(filepath.Join(parts.Out, "metrics.jsonl"), 30))
			again, err := os.ReadFile(filepath.Join(parts.Out, "metrics.jsonl"))
			require.NoError(t, err)
			require.Equal(t, raw, again, "whole lines in order")
		})
	}
}

func requireSameFile(t *testing.T, a, b string) {
	t.Helper()
	x, err := os.ReadFile(a)
	require.NoError(t, err)
	y, err := os.ReadFile(b)
	require.NoError(t, err)
	require.Equal(t, x, y, "%s", filepath.Base(a))
}

// Without it state that later steps change could get into a checkpoint while it
// is being written: what is on disk must be the values of its step, whichever of
// them the disk had time for.
func TestCheckpointIsOfItsStep(t *testing.T) {
	long := small(t, t.TempDir())
	long.Keep, long.CheckpointEvery = 99, 3
	long.LR, long.MinLR = 1e-3, 1e-3 // level, whatever the number of steps
	trainTo(t, 1, long)
	cs, err := checkpoint.List(filepath.Join(long.Out, checkpointDir))
	require.NoError(t, err)
	require.Greater(t, len(cs), 1)
	for _, c := range cs[:2] {
		short := long
		short.Out, short.Steps, short.CheckpointEvery = t.TempDir(), c.Step, 1000
		trainTo(t, 1, short)
		last, err := checkpoint.Find(short.Out)
		require.NoError(t, err)
		require.Equal(t, c.Step, last.Step)
		for _, file := range []string{checkpoint.ModelFile, checkpoint.OptimizerFile} {
			requireSameFile(t, last.Path(file), c.Path(file))
		}
	}
}

// Without it a run that is started once more than needed would report a loss of 0.
func TestNothingLeftToTrain(t *testing.T) {
	c := small(t, t.TempDir())
	c.Keep = 99
	trainTo(t, 1, c)
	cs, err := checkpoint.List(filepath.Join(c.Out, checkpointDir))
	require.NoError(t, err)
	early := cs[0]
	var s State
	require.NoError(t, early.State(&s))
	require.Nil(t, s.ValLoss)
	c.Resume, c.Out, c.Steps = early.Dir, t.TempDir(), early.Step
	for _, err := range ranks(t, 2, func(ctx context.Context, g *tandem.Group) error {
		res, err := Run(ctx, g, c, Observer{})
		if err == nil {
			require.Equal(t, early.Step, res.Steps)
			require.Positive(t, res.ValLoss)
		}
		return err
	}) {
		require.NoError(t, err)
	}
}
