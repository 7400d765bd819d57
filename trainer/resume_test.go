package trainer

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/checkpoint"
	"github.com/tandem-go/tandem/comm"
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

// over is a communicator that says how its bytes travel.
type over struct {
	comm.Communicator
	transport string
}

func (o over) Transport() string { return o.transport }

// Without it a run that goes on over another transport would silently lose the
// promise of the same bits, or be warned of where nothing changes: two ranks add
// in one order only, and a checkpoint may not say.
func TestOtherTransportIsNoted(t *testing.T) {
	for _, c := range []struct {
		n         int
		then, now string
		noted     bool
	}{{3, "shm", "tcp", true}, {3, "tcp", "tcp", false}, {3, "", "tcp", false}, {2, "shm", "tcp", false}} {
		conf := small(t, t.TempDir())
		conf.Steps, conf.CheckpointEvery = 1, 1
		var notes []string
		train := func(transport string) {
			for _, err := range ranks(t, c.n, func(ctx context.Context, g *tandem.Group) error {
				g.Comm = over{g.Comm, transport}
				o := Observer{}
				if g.Rank == 0 {
					o.Started = func(i *Info) { notes = i.Notes }
				}
				_, err := Run(ctx, g, conf, o)
				return err
			}) {
				require.NoError(t, err)
			}
		}
		train(c.then)
		conf.Resume = ResumeAuto
		train(c.now)
		if c.noted {
			require.Len(t, notes, 1)
			require.Contains(t, notes[0], "over shm then and tcp now")
		} else {
			require.Empty(t, notes)
		}
	}
}
