package ddp

import (
	"context"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/optim"
	"github.com/tandem-go/tandem/overlap"
)

// Without the broadcast ranks would train different models for ever.
func TestInitialWeightsAreRankZeros(t *testing.T) {
	got := make([][][]float32, 3)
	group{ranks: 3}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m := buildModel(batch, uint64(rank))
		d, err := New(ctx, c, m.loss, m.params, o)
		if err != nil {
			return err
		}
		got[rank] = snapshot(d.ValueGrads())
		return d.Close()
	})
	var want [][]float32
	for _, p := range buildModel(batch, 0).params {
		want = append(want, floats(p.Value()))
	}
	for rank := range got {
		require.Equal(t, want, got[rank], "rank %d", rank)
	}
}

// joined is what one process makes of the batches of so many ranks.
func joined(t *testing.T, ranks, steps int, o Options) [][]float32 {
	var got [][]float32
	group{ranks: 1, opts: o}.must(t, func(ctx context.Context, _ int, c comm.Communicator, o *Options) error {
		m := buildModel(ranks*batch, 0)
		d, err := New(ctx, c, m.loss, m.params, o)
		if err != nil {
			return err
		}
		defer d.Close()
		after := func() error { return nil }
		if o.Optimizer == nil {
			after = vanilla(d)
		}
		for s := range steps {
			if err := errors.Join(m.feed(s, 0), d.Step(ctx), after()); err != nil {
				return err
			}
		}
		err = d.Sync(ctx)
		got = snapshot(d.ValueGrads())
		return err
	})
	return got
}

func requireNear(t *testing.T, want, got [][]float32, tolerance float64, msg ...any) {
	t.Helper()
	require.Len(t, got, len(want))
	for i := range want {
		require.InDeltaSlice(t, want[i], got[i], tolerance, msg...)
	}
}

// Without it the average could be a sum, or divided twice, or of a part of the
// ranks: P ranks with batches of B must do what one does with P·B.
func TestRanksEqualJoinedBatch(t *testing.T) {
	for name, o := range map[string]Options{
		"external":   {},
		"per bucket": {Optimizer: optim.SGD{LR: 0.1, Momentum: 0.5}, Caps: bucket.Each()},
		"clipped":    {Optimizer: optim.AdamW{LR: 0.01, WeightDecay: 0.1}, MaxNorm: 0.2},
		"schedule":   {Optimizer: optim.SGD{}, Schedule: optim.WarmupCosine{Max: 0.2, Min: 0.01, Warmup: 3, Steps: 8}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, ranks := range []int{2, 3, 4} {
				apply := vanilla
				if o.Optimizer != nil {
					apply = nil
				}
				all := group{ranks: ranks, opts: o, delay: time.Millisecond, seed: uint64(ranks)}.train(t, 8, apply)
				requireNear(t, joined(t, ranks, 8, o), all[0], 2e-5)
				for r := range all {
					require.Equal(t, all[0], all[r], "rank %d differs from rank 0", r)
				}
			}
		})
	}
}

// Without it a race in the order of compute, collectives and updates would show
// as a slightly worse loss. Kernels and collectives dawdle, so that whatever
// does not wait for what it must wait for comes too early; the reference starts
// every collective after the backward pass, and updates on the caller's thread.
func TestOverlapChangesNoBit(t *testing.T) {
	const steps = 4
	reference := func() [][]float32 {
		all := make([][][]float32, 2)
		group{ranks: 2}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
			m := buildModel(batch, uint64(rank))
			d, err := New(ctx, c, m.loss, m.params, o)
			if err != nil {
				return err
			}
			defer d.Close()
			d.SetSchedule(overlap.NoOverlap)
			apply := vanilla(d)
			for s := range steps {
				if err := errors.Join(m.feed(s, rank*batch), d.Step(ctx), apply()); err != nil {
					return err
				}
			}
			all[rank] = snapshot(d.ValueGrads())
			return nil
		})
		require.Equal(t, all[0], all[1])
		return all[0]
	}()
	sgd := optim.SGD{LR: 0.1}
	for name, g := range map[string]group{
		"external, slow kernels":       {slow: 200 * time.Microsecond, opts: Options{Caps: bucket.Each()}},
		"external, slow collectives":   {delay: 3 * time.Millisecond},
		"per bucket, slow kernels":     {slow: 200 * time.Microsecond, opts: Options{Optimizer: sgd, Caps: bucket.Each()}},
		"per bucket, slow collectives": {delay: 3 * time.Millisecond, opts: Options{Optimizer: sgd, Caps: bucket.Each()}},
		"whole, slow kernels":          {slow: 200 * time.Microsecond, opts: Options{Optimizer: sgd, MaxNorm: 1e9}},
		"whole, slow collectives":      {delay: 3 * time.Millisecond, opts: Options{Optimizer: sgd, MaxNorm: 1e9, Caps: bucket.Each()}},
		"over TCP":                     {ring: true, opts: Options{Optimizer: sgd, Caps: bucket.Each()}},
		"all in one":                   {slow: 100 * time.Microsecond, delay: time.Millisecond, opts: Options{Optimizer: sgd, Caps: bucket.One()}},
		"odd caps":                     {delay: time.Millisecond, opts: Options{Caps: bucket.Caps{First: 300, Cap: []int{100, 200}, Last: 64}}},
		"norm of an external step":     {delay: time.Millisecond, opts: Options{Norm: true}},
	} {
		t.Run(name, func(t *testing.T) {
			apply := vanilla
			if g.opts.Optimizer != nil {
				apply = nil
			}
			g.ranks = 2
			for seed := range uint64(2) {
				g.seed = seed
				for rank, got := range g.train(t, steps, apply) {
					require.Equal(t, reference, got, "rank %d", rank)
				}
			}
		})
	}
}

// Without it runs could not be repeated: same world, same bits, whatever the
// delays.
func TestRerunsAreBitIdentical(t *testing.T) {
	o := Options{Optimizer: optim.AdamW{LR: 0.01}, MaxNorm: 0.3}
	want := group{ranks: 3, opts: o}.train(t, 5, nil)
	for seed := range uint64(3) {
		require.Equal(t, want, group{ranks: 3, opts: o, seed: seed, delay: 2 * time.Millisecond}.train(t, 5, nil))
	}
}

// Without it gradients of micro-steps could be lost, counted twice, reduced one
// by one, or added to those of an earlier step.
func TestAccumulation(t *testing.T) {
	const ranks, micro, steps = 2, 3, 3
	for name, o := range map[string]Options{
		"external": {Caps: bucket.Each()},
		"built-in": {Optimizer: optim.SGD{LR: 0.1 / micro}, Caps: bucket.Each()},
		"clipped":  {Optimizer: optim.SGD{LR: 0.1 / micro}, MaxNorm: 1e9},
	} {
		t.Run(name, func(t *testing.T) {
			all := make([][][]float32, ranks)
			counted := make([]*counter, ranks)
			g := group{ranks: ranks, opts: o, delay: time.Millisecond}
			g.wrap = func(rank int, c comm.Communicator) comm.Communicator {
				counted[rank] = &counter{Communicator: c, calls: new(int)}
				return counted[rank]
			}
			g.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
				m := buildModel(batch, uint64(rank))
				d, err := New(ctx, c, m.loss, m.params, o)
				if err != nil {
					return err
				}
				defer d.Close()
				var apply func() error
				if o.Optimizer == nil {
					apply = vanilla3(d, micro)
				}
				for s := range steps {
					before := *counted[rank].calls
					// The joined batch of a step is micro·ranks·batch rows.
					err := d.NoSync(func() error {
						for i := range micro - 1 {
							if err := errors.Join(m.feed(s, (rank*micro+i)*batch), d.Step(ctx)); err != nil {
								return err
							}
						}
						return nil
					})
					if err != nil {
						return err
					}
					if *counted[rank].calls != before {
						return errors.New("NoSync launched a collective")
					}
					if err := errors.Join(m.feed(s, (rank*micro+micro-1)*batch), d.Step(ctx)); err != nil {
						return err
					}
					if apply != nil {
						if err := apply(); err != nil {
							return err
						}
					}
				}
				err = d.Sync(ctx)
				all[rank] = snapshot(d.ValueGrads())
				return err
			})
			require.Equal(t, all[0], all[1])
			requireNear(t, joined(t, ranks*micro, steps, Options{}), all[0], 2e-5)
		})
	}
}

// Without it an accumulation after a synchronised step would start from old
// gradients with an optimizer that, unlike gorgonia's, leaves them as they are.
func TestStepOverwritesOldGradients(t *testing.T) {
	group{ranks: 2}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m := buildModel(batch, 0)
		d, err := New(ctx, c, m.loss, m.params, o)
		if err != nil {
			return err
		}
		defer d.Close()
		step := func() error { return errors.Join(m.feed(1, rank*batch), d.Step(ctx)) }
		if err := step(); err != nil {
			return err
		}
		want := gradients(d)
		if err := step(); err != nil {
			return err
		}
		require.Equal(t, want, gradients(d))
		if err := d.NoSync(step); err != nil {
			return err
		}
		if err := step(); err != nil {
			return err
		}
		for i, g := range gradients(d) {
			for j := range g {
				require.InDelta(t, 2*want[i][j], g[j], 1e-5)
			}
		}
		return nil
	})
}

// Without it clipping could see a rank's own gradient instead of the average,
// and the reported norm be that of something else.
func TestNormIsThatOfTheAverage(t *testing.T) {
	norm := func(ranks, rows int, o Options) float64 {
		var n float64
		group{ranks: ranks, opts: o, delay: 2 * time.Millisecond}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
			m := buildModel(rows, 0)
			d, err := New(ctx, c, m.loss, m.params, o)
			if err != nil {
				return err
			}
			defer d.Close()
			err = errors.Join(m.feed(0, rank*rows), d.Step(ctx))
			if rank == 0 {
				n = d.Stats().Norm
			}
			return err
		})
		return n
	}
	want := norm(1, 4*batch, Options{Norm: true})
	require.InEpsilon(t, want, norm(4, batch, Options{Norm: true}), 1e-5)
	require.InEpsilon(t, want, norm(4, batch, Options{Optimizer: optim.SGD{}, MaxNorm: 0.1}), 1e-5)
	require.InEpsilon(t, want, norm(4, batch, Options{Optimizer: optim.SGD{}, Norm: true, Caps: bucket.Each()}), 1e-5)
}

// Without it «overlap» would be a word: with a bucket a gradient, all but the
// last start before the last gradient is final, and the stats say so.
func TestCollectivesStartDuringBackward(t *testing.T) {
	group{ranks: 2, slow: 3 * time.Millisecond, opts: Options{Caps: bucket.Each()}}.must(t,
		func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
			m := buildModel(batch, 0)
			d, err := New(ctx, c, m.loss, m.params, o)
			if err != nil {
				return err
			}
			defer d.Close()
			for s := range 3 {
				if err := errors.Join(m.feed(s, rank*batch), d.Step(ctx)); err != nil {
					return err
				}
				st := d.Stats()
				require.Equal(t, s+1, st.Step)
				require.Equal(t, s+1, st.Timed)
				require.Equal(t, 4, st.Buckets)
				require.GreaterOrEqual(t, st.Times.Early, 1, "the first collective starts before the last gradient")
				require.Positive(t, st.Forward)
				require.Positive(t, st.Backward)
				require.Positive(t, st.Times.Comm)
				require.LessOrEqual(t, st.Times.Exposed, st.Times.Comm)
				for k, b := range st.Times.Buckets {
					require.LessOrEqual(t, b.Ready, b.Start)
					require.LessOrEqual(t, b.Start, b.Done)
					require.True(t, k == 0 || st.Times.Buckets[k-1].Done <= b.Start)
				}
			}
			d.SetSchedule(overlap.NoOverlap)
			if err := errors.Join(m.feed(3, rank*batch), d.Step(ctx)); err != nil {
				return err
			}
			require.Zero(t, d.Stats().Times.Early)
			d.SetSchedule(overlap.NoComm)
			return errors.Join(m.feed(3, rank*batch), d.Step(ctx))
		})
}

// Without it metrics would show one rank's loss, or that of another step.
func TestMeanLoss(t *testing.T) {
	losses := make([]float64, 3)
	means := make([]float64, 3)
	group{ranks: 3}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m := buildModel(batch, 0)
		d, err := New(ctx, c, m.loss, m.params, o)
		if err != nil {
			return err
		}
		defer d.Close()
		err = errors.Join(m.feed(0, rank*batch), d.Step(ctx))
		losses[rank], means[rank] = d.Loss(), d.Stats().Loss
		require.InDelta(t, float64(floats(m.loss.Value())[0]), d.Loss(), 0)
		return err
	})
	require.InDelta(t, (losses[0]+losses[1]+losses[2])/3, means[0], 1e-12)
	require.Equal(t, []float64{means[0], means[0], means[0]}, means)
	require.NotEqual(t, losses[0], losses[1])
	require.False(t, math.IsNaN(means[0]))
}

// Without it a signal that reaches one rank would leave the others hanging.
func TestStopReachesAllInTheSameStep(t *testing.T) {
	group{ranks: 3, delay: time.Millisecond}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m := buildModel(batch, 0)
		d, err := New(ctx, c, m.loss, m.params, o)
		if err != nil {
			return err
		}
		defer d.Close()
		for s := 0; !d.Stopped(); s++ {
			if rank == 1 && s == 2 {
				d.RequestStop()
			}
			if err := errors.Join(m.feed(s, rank*batch), d.Step(ctx)); err != nil {
				return err
			}
		}
		require.Equal(t, 3, d.Steps())
		return nil
	})
}

// Without it metrics would mix the times of two steps: with a built-in optimizer
// Step returns before its updates have ended, and Sync waits for them.
func TestTimesAreOneStepBehindUntilSync(t *testing.T) {
	group{ranks: 2, opts: Options{Optimizer: optim.AdamW{}, MaxNorm: 1}}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m, d, err := setup(ctx, c, o)
		if err != nil {
			return err
		}
		defer d.Close()
		for s := range 3 {
			if err := errors.Join(m.feed(s, rank*batch), d.Step(ctx)); err != nil {
				return err
			}
			require.Equal(t, s+1, d.Stats().Step)
			require.Equal(t, s, d.Stats().Timed)
		}
		require.Equal(t, 3, d.Optimizer().Steps())
		if err := d.Sync(ctx); err != nil {
			return err
		}
		st := d.Stats()
		require.Equal(t, 3, st.Timed)
		require.Positive(t, st.Times.Update)
		for _, b := range st.Times.Buckets {
			require.Greater(t, b.Updated, b.Done)
		}
		require.NoError(t, d.Close())
		require.ErrorIs(t, d.Step(ctx), ErrClosed)
		return d.Close()
	})
}
