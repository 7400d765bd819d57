package ddp

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/optim"
)

// withBuffers is mean((x·w − mean)²) with the buffers mean and, an integer, count.
func withBuffers(rank int) (m *model, buffers gorgonia.Nodes) {
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(2, 3), gorgonia.WithName("x"))
	w := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(3, 4), gorgonia.WithName("w"), gorgonia.WithInit(gorgonia.Ones()))
	mean := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(2, 4), gorgonia.WithName("mean"))
	count := gorgonia.NewVector(g, tensor.Int, gorgonia.WithShape(2), gorgonia.WithName("count"),
		gorgonia.WithValue(tensor.New(tensor.WithBacking([]int{rank, 7}))))
	letBuffer(mean, float32(rank+1))
	d := gorgonia.Must(gorgonia.Sub(gorgonia.Must(gorgonia.Mul(x, w)), mean))
	loss := gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(d))))
	return &model{x: x, loss: loss, params: gorgonia.Nodes{w}}, gorgonia.Nodes{mean, count}
}

// letBuffer binds a new value of eight elements v.
func letBuffer(n *gorgonia.Node, v float32) {
	all := make([]float32, 8)
	for i := range all {
		all[i] = v
	}
	_ = gorgonia.Let(n, tensor.New(tensor.WithShape(2, 4), tensor.WithBacking(all)))
}

func (m *model) feedOnes() error {
	return gorgonia.Let(m.x, tensor.New(tensor.WithShape(2, 3), tensor.WithBacking([]float32{1, 1, 1, 1, 1, 1})))
}

// Without it ranks would normalise by statistics of their own, at the start or
// later, or a rank without data would spoil those of the others.
func TestBuffersAgree(t *testing.T) {
	for _, mode := range []BufferMode{BroadcastBuffers, AverageBuffers} {
		for _, ring := range []bool{false, true} {
			for ranks := 1; ranks <= 4; ranks++ {
				group{ranks: ranks, ring: ring, opts: Options{BufferMode: mode, Optimizer: optim.SGD{}}}.must(t,
					func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
						m, buffers := withBuffers(rank)
						o.Buffers = buffers
						if mode == AverageBuffers {
							o.Buffers = buffers[:1]
						}
						d, err := New(ctx, c, m.loss, m.params, o)
						if err != nil {
							return err
						}
						defer d.Close()
						value := func() float32 { return floats(buffers[0].Value())[7] }
						require.InDelta(t, 1, value(), 0, "that of rank 0 at first")
						if mode == BroadcastBuffers {
							require.Equal(t, []int{0, 7}, buffers[1].Value().Data())
						}
						step := 0
						err = d.Join(ctx, func() (bool, error) {
							step++
							if step > 2+rank {
								return false, nil
							}
							letBuffer(buffers[0], float32(10*step+rank))
							return true, m.feedOnes()
						})
						if err != nil {
							return err
						}
						// The last step had data on the last rank alone.
						require.InDelta(t, 10*(1+ranks)+ranks-1, value(), 0)
						letBuffer(buffers[0], float32(rank))
						if err := errors.Join(m.feedOnes(), d.Step(ctx)); err != nil {
							return err
						}
						want := 0.0
						if mode == AverageBuffers {
							want = float64(ranks-1) / 2
						}
						require.InDelta(t, want, value(), 1e-6)
						loss := floats(m.loss.Value())[0]
						require.Positive(t, loss)
						return nil
					})
			}
		}
	}
}

// Without it ranks with other buffers would hang or mix them up.
func TestUnlikeBuffersAreRefused(t *testing.T) {
	for want, change := range map[string]func(o *Options, rank int){
		"list of buffers of rank 1 differs from that of rank 0": func(o *Options, rank int) { o.Buffers = o.Buffers[:2-rank] },
		`buffer "count" is int64; only floating-point`:          func(o *Options, _ int) { o.BufferMode = AverageBuffers },
		"BufferMode 2": func(o *Options, _ int) { o.BufferMode = 2 },
	} {
		errs := group{ranks: 2}.run(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
			m, buffers := withBuffers(rank)
			o.Buffers = buffers
			change(o, rank)
			_, err := New(ctx, c, m.loss, m.params, o)
			return err
		})
		for rank, err := range errs {
			require.ErrorContains(t, err, want, "rank %d", rank)
		}
	}
}

// Without it a second DDP would take the parameters away from the first, which
// would go on averaging what nobody reads.
func TestDoubleWrappingIsRefused(t *testing.T) {
	group{ranks: 2}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m, d, err := setup(ctx, c, o)
		if err != nil {
			return err
		}
		defer d.Close()
		_, err = New(ctx, d.comm, m.loss, m.params, o)
		require.ErrorContains(t, err, `parameter "w0" belongs to another DDP that is still open`)
		return nil
	})
	// Once the first is closed, another may have the model.
	models := []*model{buildModel(batch, 0), buildModel(batch, 1)}
	for range 2 {
		group{ranks: 2}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
			m := models[rank]
			d, err := New(ctx, c, m.loss, m.params, o)
			if err != nil {
				return err
			}
			return errors.Join(m.feed(0, rank*batch), d.Step(ctx), c.Barrier(ctx), d.Close())
		})
	}
}
