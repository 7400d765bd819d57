package ddp

import (
	"context"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/optim"
)

// Without it ranks with fewer tokens would count as much as the others: ranks of
// 4 and 2 rows, weighted, must do what one process does with 6.
func TestWeightsEqualJoinedBatch(t *testing.T) {
	rows, from := []int{4, 2}, []int{0, 4}
	want := func() [][]float32 {
		m := buildModel(6, 0)
		require.NoError(t, m.feed(0, 0))
		return gradientsOf(t, m)
	}()
	group{ranks: 2, opts: Options{Weighted: true, Caps: bucket.Each()}, delay: time.Millisecond}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m := buildModel(rows[rank], 0)
		d, err := New(ctx, c, m.loss, m.params, o)
		if err != nil {
			return err
		}
		defer d.Close()
		for range 2 {
			if err := errors.Join(m.feed(0, from[rank]), d.SetWeight(float64(rows[rank])), d.Step(ctx)); err != nil {
				return err
			}
			requireNear(t, want, gradients(d), 1e-6)
		}
		require.Error(t, d.SetWeight(-1))
		require.Error(t, d.SetWeight(math.NaN()))
		return nil
	})
}

// Without it micro-steps of unequal weights, or of none, would be averaged as if
// they were equal.
func TestWeightedMicroSteps(t *testing.T) {
	weights := [][]float64{{3, 1, 2}, {0.5, 4, 4}} // by rank, by micro-step
	var want [][]float32
	var wantLoss, total float64
	for rank := range weights {
		for i, w := range weights[rank] {
			m := buildModel(batch, 0)
			require.NoError(t, m.feed(i, rank*batch))
			for j, g := range gradientsOf(t, m) {
				if len(want) <= j {
					want = append(want, make([]float32, len(g)))
				}
				for k := range g {
					want[j][k] += float32(w) * g[k] / 14.5
				}
			}
			total += w
		}
	}
	require.Equal(t, 14.5, total)
	losses := make([][]float64, 2)
	group{ranks: 2, opts: Options{Weighted: true}}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m, d, err := setup(ctx, c, o)
		if err != nil {
			return err
		}
		defer d.Close()
		step := func(i int) error {
			err := errors.Join(m.feed(i, rank*batch), d.SetWeight(weights[rank][i]), d.Step(ctx))
			losses[rank] = append(losses[rank], d.Loss())
			return err
		}
		if err := d.NoSync(func() error { return errors.Join(step(0), step(1)) }); err != nil {
			return err
		}
		if err := step(2); err != nil {
			return err
		}
		requireNear(t, want, gradients(d), 1e-6)
		if rank == 0 {
			wantLoss = d.Stats().Loss
		}
		return nil
	})
	sum := 0.0
	for rank := range weights {
		for i, w := range weights[rank] {
			sum += w * losses[rank][i]
		}
	}
	require.InDelta(t, sum/total, wantLoss, 1e-9)
}

// Without it a step in which no rank has anything to learn from would divide by
// zero.
func TestNoWeightAnywhere(t *testing.T) {
	group{ranks: 2, opts: Options{Weighted: true}}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m, d, err := setup(ctx, c, o)
		if err != nil {
			return err
		}
		defer d.Close()
		if err := errors.Join(m.feed(0, 0), d.SetWeight(0), d.Step(ctx)); err != nil {
			return err
		}
		for _, g := range gradients(d) {
			for _, v := range g {
				require.Zero(t, v)
			}
		}
		require.Zero(t, d.Stats().Loss)
		return nil
	})
}

// Without it ranks with fewer inputs would hang the others, dilute their
// averages, or end with other parameters.
func TestJoin(t *testing.T) {
	have := []int{5, 2, 0, 5} // steps that each rank has inputs for
	for name, o := range map[string]Options{
		"built-in": {Optimizer: optim.SGD{LR: 0.1}, Caps: bucket.Each()},
		"clipped":  {Optimizer: optim.SGD{LR: 0.1}, MaxNorm: 1e9},
		"external": {},
	} {
		t.Run(name, func(t *testing.T) {
			all := make([][][]float32, len(have))
			group{ranks: len(have), opts: o, delay: time.Millisecond}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
				m := buildModel(batch, uint64(rank))
				d, err := New(ctx, c, m.loss, m.params, o)
				if err != nil {
					return err
				}
				defer d.Close()
				apply, s := vanilla(d), 0
				err = d.Join(ctx, func() (bool, error) {
					if s > 0 && o.Optimizer == nil {
						if err := apply(); err != nil {
							return false, err
						}
					}
					if s == have[rank] {
						return false, nil
					}
					s++
					return true, m.feed(s-1, rank*batch)
				})
				if err != nil {
					return err
				}
				require.Equal(t, 5, d.Steps())
				all[rank] = snapshot(d.ValueGrads())
				// The group goes on afterwards.
				return errors.Join(m.feed(9, rank*batch), d.Step(ctx))
			})
			want := joinReference(t, have)
			for rank, got := range all {
				require.Equal(t, all[0], got, "rank %d", rank)
			}
			requireNear(t, want, all[0], 2e-5)
		})
	}
}

// joinReference averages, in each step, over the ranks that have inputs.
func joinReference(t *testing.T, have []int) [][]float32 {
	m := buildModel(batch, 0)
	var own []gorgonia.ValueGrad
	for _, p := range m.params {
		own = append(own, plain{clone(p.Value()), clone(p.Value())})
	}
	solver := gorgonia.NewVanillaSolver(gorgonia.WithLearnRate(0.1))
	for s := range 5 {
		active := 0
		sums := make([][]float32, len(own))
		for rank := range have {
			if have[rank] <= s {
				continue
			}
			active++
			m := buildModel(batch, 0)
			for i, p := range m.params {
				require.NoError(t, gorgonia.UnsafeLet(p, clone(own[i].Value())))
			}
			require.NoError(t, m.feed(s, rank*batch))
			for i, g := range gradientsOf(t, m) {
				if sums[i] == nil {
					sums[i] = make([]float32, len(g))
				}
				for j := range g {
					sums[i][j] += g[j]
				}
			}
		}
		for i, v := range own {
			for j := range sums[i] {
				sums[i][j] /= float32(active)
			}
			g, _ := v.Grad()
			fill(g, sums[i])
		}
		require.NoError(t, solver.Step(own))
	}
	return snapshot(own)
}

// Without it an error while loading data on one rank would hang the others.
func TestJoinError(t *testing.T) {
	errs := group{ranks: 2}.run(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m, d, err := setup(ctx, c, o)
		if err != nil {
			return err
		}
		defer d.Close()
		s := 0
		return d.Join(ctx, func() (bool, error) {
			s++
			if rank == 1 && s == 2 {
				return false, errDone
			}
			return true, m.feed(s, rank*batch)
		})
	})
	require.ErrorIs(t, errs[1], errDone)
	require.Error(t, errs[0])
}
