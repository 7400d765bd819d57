package ddp

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/ddp/hook"
	"github.com/tandem-go/tandem/models/gpt2mini"
	"github.com/tandem-go/tandem/optim"
)

// layouts are caps that a test goes through.
var layouts = []bucket.Caps{bucket.One(), bucket.Each(), {}, {First: 300, Cap: []int{100, 200}, Last: 64}}

// Without it another layout in mid-run would mix up parameters or moments, lose
// gradients, or train on with the old buckets: the bits are those of a run that
// never changes.
func TestRelayoutChangesNoBit(t *testing.T) {
	for name, g := range map[string]group{
		"external": {ranks: 3}, "momentum": {ranks: 2, opts: Options{Optimizer: optim.SGD{LR: 0.1, Momentum: 0.9}}},
		"AdamW, clipped": {ranks: 4, opts: Options{Optimizer: optim.AdamW{}, MaxNorm: 0.1, CheckParams: 1}},
		"weighted":       {ranks: 2, opts: Options{Optimizer: optim.AdamW{}, Weighted: true}},
		"TCP":            {ranks: 2, ring: true, opts: Options{Optimizer: optim.AdamW{}, Caps: bucket.Each()}},
	} {
		t.Run(name, func(t *testing.T) {
			apply := vanilla
			if g.opts.Optimizer != nil {
				apply = nil
			}
			want := g.train(t, 10, apply)
			got := g.train(t, 10, func(d *DDP) func() error {
				solve := func() error { return nil }
				if apply != nil {
					solve = apply(d)
				}
				step := 0
				values := d.ValueGrads()
				return func() error {
					if err := solve(); err != nil {
						return err
					}
					caps := layouts[step%len(layouts)]
					step++
					if err := d.Sync(context.Background()); err != nil {
						return err
					}
					grads := gradients(d)
					if err := d.Relayout(context.Background(), caps); err != nil {
						return err
					}
					want, err := bucket.Assign(d.Layout().Params, d.order, caps)
					require.NoError(t, err)
					require.Equal(t, want.Hash(), d.Layout().Hash())
					require.Len(t, want.Buckets, d.Stats().Buckets)
					require.Equal(t, grads, gradients(d))
					require.Same(t, &values[0], &d.ValueGrads()[0])
					return nil
				}
			})
			require.Equal(t, want, got)
		})
	}
}

// Without it graphs that lack parameters, and tied embeddings, would go on
// writing to where gradients were.
func TestRelayoutOfBranchesAndSplits(t *testing.T) {
	run := func(relayout bool) (all [2][][]float32) {
		o := Options{Optimizer: optim.AdamW{}, CheckParams: 1}
		group{ranks: 2, opts: o}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
			tied, err := gpt2mini.New(gpt2mini.Config{Vocab: 300, Block: 4, Seq: 4, Layers: 1, Heads: 2, DModel: 16, Batch: 1})
			if err = errors.Join(err, tied.Init(uint64(rank))); err != nil {
				return err
			}
			whole := *o
			d, err := New(ctx, c, tied.Loss, tied.Params, &whole)
			if err != nil {
				return err
			}
			defer d.Close()
			m, e, err := wrapConditional(ctx, c, o, true)
			if err != nil {
				return err
			}
			defer e.Close()
			for s := range 8 {
				x := []int{s, rank, 7, 9}
				if err := errors.Join(tied.SetBatch(x, x), d.Step(ctx), m.feed((s+rank)%2, s, rank), e.StepGraph(ctx, (s+rank)%2)); err != nil {
					return err
				}
				if relayout {
					if err := errors.Join(d.Relayout(ctx, layouts[s%4]), e.Relayout(ctx, layouts[s%4])); err != nil {
						return err
					}
				}
			}
			err = errors.Join(d.Sync(ctx), e.Sync(ctx))
			if rank == 1 {
				all = [2][][]float32{snapshot(d.ValueGrads()), snapshot(e.ValueGrads())}
			}
			return err
		})
		return all
	}
	require.Equal(t, run(false), run(true))
}

// Without it a value that was bound to a parameter before a change of layout
// would be lost, and ranks that ask for different ones would hang.
func TestRelayoutTakesNewValuesAndRefuses(t *testing.T) {
	group{ranks: 2}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m, d, err := setup(ctx, c, o)
		if err != nil {
			return err
		}
		defer d.Close()
		fresh := tensor.New(tensor.WithShape(hidden, outputs), tensor.WithBacking(make([]float32, hidden*outputs)))
		if err := errors.Join(gorgonia.Let(m.params[2], fresh), d.Relayout(ctx, bucket.One())); err != nil {
			return err
		}
		require.Equal(t, make([]float32, hidden*outputs), floats(m.params[2].Value()))
		err = d.NoSync(func() error { return errors.Join(m.feed(0, 0), d.Step(ctx)) })
		require.NoError(t, err)
		require.ErrorContains(t, d.Relayout(ctx, bucket.One()), "within an accumulation")
		return nil
	})
	group{ranks: 1, opts: Options{Hook: hook.BF16{}}}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		_, d, err := setup(ctx, c, o)
		if err != nil {
			return err
		}
		require.ErrorContains(t, d.Relayout(ctx, bucket.One()), "Hook")
		return d.Close()
	})
	errs := group{ranks: 2}.run(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		_, d, err := setup(ctx, c, o)
		if err != nil {
			return err
		}
		defer d.Close()
		return d.Relayout(ctx, layouts[rank])
	})
	for _, err := range errs {
		require.ErrorContains(t, err, "layout of rank 1 differs from that of rank 0")
	}
}
