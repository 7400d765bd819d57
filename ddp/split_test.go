package ddp

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/ddp/hook"
	"github.com/tandem-go/tandem/models/gpt2mini"
	"github.com/tandem-go/tandem/optim"
	"github.com/tandem-go/tandem/overlap"
)

// tied trains a GPT-2 whose vocabulary is much larger than a batch, so that its
// embedding is worth splitting, and returns each rank's parameters.
func tied(t *testing.T, g group, schedule overlap.Schedule, micro int) (params [][][]float32, st Stats) {
	params = make([][][]float32, g.ranks)
	g.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m, err := gpt2mini.New(gpt2mini.Config{Vocab: 300, Block: 4, Seq: 4, Layers: 1, Heads: 2, DModel: 16, Batch: 3})
		if err = errors.Join(err, m.Init(uint64(rank))); err != nil {
			return err
		}
		d, err := New(ctx, c, m.Loss, m.Params, o)
		if err != nil {
			return err
		}
		defer d.Close()
		require.Equal(t, !o.WholeEmbeddings && g.ranks > 1, len(d.plan.Splits()) == 1)
		d.SetSchedule(schedule)
		x, y := make([]int, 12), make([]int, 12)
		step := func(s, i int) error {
			rng := rand.New(rand.NewPCG(uint64(s), uint64(rank*micro+i)))
			for j := range x {
				x[j], y[j] = rng.IntN(9), rng.IntN(300) // tokens that repeat
			}
			return errors.Join(m.SetBatch(x, y), d.Step(ctx))
		}
		for s := range 4 {
			for i := range micro - 1 {
				if err := d.NoSync(func() error { return step(s, i) }); err != nil {
					return err
				}
			}
			if err := step(s, micro-1); err != nil {
				return err
			}
			if o.Optimizer == nil {
				if err := vanilla(d)(); err != nil {
					return err
				}
			}
		}
		if err := d.Sync(ctx); err != nil {
			return err
		}
		params[rank] = snapshot(d.ValueGrads())
		if rank == 0 {
			st = d.Stats()
		}
		return nil
	})
	return params, st
}

// Without it a tied embedding could train on one part of its gradient, or on
// rows that came too late, too early, twice, or only from this rank.
func TestSplitEmbeddings(t *testing.T) {
	sgd := optim.SGD{LR: 0.1}
	for name, o := range map[string]Options{
		"external": {}, "per bucket": {Optimizer: sgd, Caps: bucket.Each()}, "clipped": {Optimizer: sgd, MaxNorm: 0.5},
		"one bucket": {Optimizer: sgd, Caps: bucket.One(), Norm: true}, "hook": {Optimizer: sgd, Hook: hook.AllReduce{}, CheckParams: 1},
	} {
		t.Run(name, func(t *testing.T) {
			for ranks := 1; ranks <= 4; ranks++ {
				for _, micro := range []int{1, 3} {
					o.WholeEmbeddings = true
					want, whole := tied(t, group{ranks: ranks, opts: o}, overlap.Normal, micro)
					o.WholeEmbeddings = false
					got, st := tied(t, group{ranks: ranks, opts: o, ring: ranks == 3}, overlap.Normal, micro)
					for rank := range got {
						require.Equal(t, got[0], got[rank], "rank %d of %d", rank, ranks)
						requireNear(t, want[0], got[rank], 2e-5)
					}
					if ranks > 1 {
						require.Greater(t, st.WireBytes, whole.WireBytes, "rows come on top")
						require.Less(t, st.WireBytes, whole.WireBytes*3/2)
					}
				}
			}
		})
	}
}

// Without it a race of the rows with buckets, updates or the next step would
// show as a slightly worse loss: whatever dawdles, the bits stay.
func TestSplitEmbeddingsChangeNoBit(t *testing.T) {
	o := Options{Optimizer: optim.SGD{LR: 0.1}, Caps: bucket.Each()}
	want, _ := tied(t, group{ranks: 2, opts: o}, overlap.NoOverlap, 1)
	for name, g := range map[string]group{
		"slow kernels":     {slow: 100 * time.Microsecond, opts: o},
		"slow collectives": {delay: 2 * time.Millisecond, opts: o},
		"clipped":          {delay: time.Millisecond, opts: Options{Optimizer: optim.SGD{LR: 0.1}, MaxNorm: 1e9}},
		"external":         {slow: 100 * time.Microsecond, delay: time.Millisecond},
		"TCP":              {ring: true, opts: o},
	} {
		t.Run(name, func(t *testing.T) {
			g.ranks = 2
			got, _ := tied(t, g, overlap.Normal, 1)
			require.Equal(t, want, got)
		})
	}
}

// Without it a rank without data would add old rows, and batches of different
// sizes would hang.
func TestSplitEmbeddingsOfUnevenRanks(t *testing.T) {
	build := func(rows int) (*gpt2mini.Model, error) {
		m, err := gpt2mini.New(gpt2mini.Config{Vocab: 300, Block: 4, Seq: 4, Layers: 1, Heads: 2, DModel: 16, Batch: rows})
		return m, errors.Join(err, m.Init(1))
	}
	train := func(whole, initial bool) (params [][]float32) {
		o := Options{Optimizer: optim.SGD{LR: 0.1}, WholeEmbeddings: whole, CheckParams: 1, Join: JoinOptions{DivideByInitial: initial}}
		group{ranks: 3, opts: o}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
			m, err := build(2)
			if err != nil {
				return err
			}
			d, err := New(ctx, c, m.Loss, m.Params, o)
			if err != nil {
				return err
			}
			defer d.Close()
			s := 0
			err = d.Join(ctx, func() (bool, error) {
				s++
				x := []int{s, 2, rank, 4, 5, 6, 7, 8}
				return s <= 1+2*rank, m.SetBatch(x, x)
			})
			if rank == 0 {
				params = snapshot(d.ValueGrads())
			}
			return err
		})
		return params
	}
	for _, initial := range []bool{false, true} {
		requireNear(t, train(true, initial), train(false, initial), 2e-5)
	}

	errs := group{ranks: 2}.run(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m, err := build(2 + rank)
		if err != nil {
			return err
		}
		_, err = New(ctx, c, m.Loss, m.Params, o)
		return err
	})
	for _, err := range errs {
		require.ErrorContains(t, err, "set WholeEmbeddings for batches that differ")
	}
}
