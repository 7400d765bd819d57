package trainer

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/checkpoint"
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/comm/inmem"
	"github.com/tandem-go/tandem/cpu"
)

// small is the configuration of a run that takes no time.
func small(t *testing.T, out string) Config {
	t.Helper()
	path := filepath.Join(t.TempDir(), "text")
	require.NoError(t, os.WriteFile(path, []byte(strings.Repeat("a rose is a rose. ", 100)), 0o600))
	return Config{Data: path, Out: out, Layers: 1, Heads: 2, DModel: 8, Block: 8, Batch: 2, Steps: 30, EvalEvery: 1000, CheckpointEvery: 10}
}

// ranks runs f as each rank of a world in this process and returns their errors.
func ranks(t *testing.T, n int, f func(ctx context.Context, g *tandem.Group) error) []error {
	t.Helper()
	shared, err := cpu.New(&cpu.Options{Threads: 1})
	require.NoError(t, err)
	world, err := inmem.New(shared, n, &inmem.Options{Timeout: 20 * time.Second})
	require.NoError(t, err)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for rank := range n {
		wg.Go(func() {
			dev, err := cpu.New(&cpu.Options{Threads: 1})
			if err != nil {
				errs[rank] = err
				return
			}
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			g := &tandem.Group{Rank: rank, LocalRank: rank, WorldSize: n, LocalWorldSize: n, Backend: "inmem", Threads: 1, Device: dev, Comm: world[rank]}
			errs[rank] = f(ctx, g)
			errs[rank] = errors.Join(errs[rank], world[rank].Close(), dev.Close())
		})
	}
	wg.Wait()
	require.NoError(t, shared.Close())
	return errs
}

// Without it a full disk would go unnoticed until somebody needs the checkpoint;
// or the rank that noticed would leave the others waiting.
func TestWriterErrorEndsTheRun(t *testing.T) {
	defer goleak.VerifyNone(t)
	out := t.TempDir()
	// A file where the directory of step 10 would be.
	require.NoError(t, os.MkdirAll(filepath.Join(out, checkpointDir), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(out, checkpointDir, "step-00000010"), nil, 0o600))
	var seen int
	errs := ranks(t, 2, func(ctx context.Context, g *tandem.Group) error {
		c := small(t, out)
		c.Steps = 100000
		_, err := Run(ctx, g, c, Observer{Step: func(m *Metrics) { seen = m.Step }})
		return err
	})
	require.ErrorContains(t, errs[0], "writing the checkpoint of step 10")
	require.ErrorContains(t, errs[1], "writing the checkpoint of step 10")
	require.GreaterOrEqual(t, seen, 10)
	require.Less(t, seen, 100000)
}

// Without it parameters that an update has made infinite would be kept as a
// checkpoint, and the good ones before them be pruned.
func TestNoCheckpointOfGarbage(t *testing.T) {
	out := t.TempDir()
	errs := ranks(t, 1, func(ctx context.Context, g *tandem.Group) error {
		c := small(t, out)
		c.Steps, c.LR, c.MinLR, c.Clip, c.CheckpointEvery = 50, 1e38, 1e38, 0, 1
		_, err := Run(ctx, g, c, Observer{})
		return err
	})
	require.Error(t, errs[0])
	cs, err := checkpoint.List(filepath.Join(out, checkpointDir))
	require.NoError(t, err)
	for _, c := range cs {
		f, err := checkpoint.Open(c.Path(checkpoint.ModelFile))
		require.NoError(t, err)
		for _, n := range f.Names() {
			tensor, _ := f.Tensor(n)
			raw := make([]byte, 4*elems(tensor.Shape))
			require.NoError(t, f.Read(n, raw))
			require.True(t, allFinite(raw), "%s of step %d", n, c.Step)
		}
		require.NoError(t, f.Close())
	}
}

// Without it values that no training can go on from could pass for numbers.
func TestAllFinite(t *testing.T) {
	bytesOf := func(v ...float32) (b []byte) {
		for _, x := range v {
			u := math.Float32bits(x)
			b = append(b, byte(u), byte(u>>8), byte(u>>16), byte(u>>24))
		}
		return b
	}
	require.True(t, allFinite(bytesOf(0, 1, -math.MaxFloat32, math.SmallestNonzeroFloat32)))
	for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		require.False(t, allFinite(bytesOf(1, float32(bad), 2)))
	}
	require.True(t, allFinite(nil))
}

// Without it a slow disk would hold training up: a checkpoint that is due while
// the last is being written must wait for a later step, and not be forgotten.
func TestOneCheckpointAtATime(t *testing.T) {
	c := &checkpointer{every: 5}
	require.False(t, c.due(&Metrics{Step: 4}, false))
	c.writing = make(chan error, 1)
	require.True(t, c.due(&Metrics{Step: 5}, false))
	idle, err := c.idle()
	require.False(t, idle)
	require.NoError(t, err)
	c.writing <- nil
	idle, err = c.idle()
	require.True(t, idle)
	require.NoError(t, err)
	require.True(t, c.due(&Metrics{Step: 6}, false), "still owed")

	v := 1.5
	c = &checkpointer{every: 1000, best: &Best{3, 1.6}}
	require.True(t, c.due(&Metrics{Step: 7, ValLoss: &v}, false), "the best so far")
	c = &checkpointer{every: 1000, best: &Best{3, 1.5}}
	require.False(t, c.due(&Metrics{Step: 7, ValLoss: &v}, false))
	require.True(t, c.due(&Metrics{Step: 8}, true), "the last")
}

// Without it ranks would run into a timeout while rank 0 writes, or leave before
// it has; and its failure would be nobody else's.
func TestFinishWaitsForRankZero(t *testing.T) {
	defer goleak.VerifyNone(t)
	boom := errors.New("no space left")
	for _, want := range []error{nil, boom} {
		var mu sync.Mutex
		worked := false
		errs := ranks(t, 3, func(ctx context.Context, g *tandem.Group) error {
			r := &run{g: g}
			err := r.finish(ctx, func(context.Context) error {
				time.Sleep(20 * time.Millisecond)
				mu.Lock()
				defer mu.Unlock()
				worked = true
				return want
			})
			mu.Lock()
			defer mu.Unlock()
			if !worked {
				return errors.New("left too early")
			}
			return err
		})
		for rank, err := range errs {
			if want == nil {
				require.NoError(t, err)
				continue
			}
			require.ErrorContains(t, err, boom.Error(), "rank %d", rank)
			if rank > 0 {
				require.ErrorIs(t, err, comm.ErrAborted)
			}
		}
	}
}

// Without it metrics of steps that are trained again would be there twice.
func TestKeepMetrics(t *testing.T) {
	path := filepath.Join(t.TempDir(), "metrics.jsonl")
	require.NoError(t, keepMetrics(path, 3), "there is nothing to drop")
	lines := "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"step\":4}\n"
	for _, c := range []struct {
		have string
		step int
		want int
	}{{lines, 3, 33}, {lines, 0, 0}, {lines, 9, 44}, {lines[:40], 9, 33}, {"{\"step\":1}\nnonsense\n{\"step\":2}\n", 9, 11}, {"", 9, 0}} {
		require.NoError(t, os.WriteFile(path, []byte(c.have), 0o600))
		require.NoError(t, keepMetrics(path, c.step))
		got, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, c.have[:c.want], string(got))
	}
}
