package ddp

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/optim"
	"github.com/tandem-go/tandem/overlap"
)

// setup makes a fresh model and wraps it.
func setup(ctx context.Context, c comm.Communicator, o *Options) (*model, *DDP, error) {
	m := buildModel(batch, 0)
	d, err := New(ctx, c, m.loss, m.params, o)
	return m, d, err
}

// errDone ends a rank's part of a test early.
var errDone = errors.New("this rank is done")

// Without it a rank that dies would leave the others waiting: each gets an error
// that names the cause, soon, and no later call goes on.
func TestAbortedRankEndsAll(t *testing.T) {
	for name, die := range map[string]func(d *DDP, c comm.Communicator){
		"abort": func(d *DDP, _ comm.Communicator) { d.comm.Abort(errDone) },
		"close": func(d *DDP, _ comm.Communicator) { _ = d.Close() },
		"world": func(_ *DDP, c comm.Communicator) { _ = c.Close() },
	} {
		for i, o := range []Options{{}, {Optimizer: optim.SGD{}}, {Optimizer: optim.SGD{}, MaxNorm: 1}} {
			t.Run(name, func(t *testing.T) {
				started := time.Now()
				errs := group{ranks: 3, ring: i == 1, opts: o, slow: 50 * time.Microsecond}.run(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
					m, d, err := setup(ctx, c, o)
					if err != nil {
						return err
					}
					defer d.Close()
					for s := range 1000 {
						if rank == 1 && s == 3 {
							die(d, c)
							return errDone
						}
						if err := errors.Join(m.feed(s, rank*batch), d.Step(ctx)); err != nil {
							require.Equal(t, err, errors.Join(nil, d.Step(ctx)), "a later Step must refuse with the same error")
							require.Error(t, d.Sync(ctx))
							require.Error(t, d.NoSync(func() error { return nil }))
							return err
						}
					}
					return nil
				})
				require.Less(t, time.Since(started), 5*time.Second)
				for rank, err := range errs {
					require.Error(t, err, "rank %d", rank)
					if rank != 1 {
						var op *comm.OpError
						require.ErrorAs(t, err, &op)
						require.Equal(t, 1, op.Culprit)
						require.ErrorContains(t, err, "ddp: step 3 on rank ")
					}
				}
			})
		}
	}
}

// Without it a caller that gives up would hang, and so would the other ranks.
func TestCancelledContextEndsAll(t *testing.T) {
	cause := errors.New("the user pressed a key")
	over := make(chan struct{})
	errs := group{ranks: 2}.run(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m, d, err := setup(ctx, c, o)
		if err != nil {
			return err
		}
		defer d.Close()
		if rank == 1 {
			<-over // never takes part
			return nil
		}
		defer close(over)
		ctx, cancel := context.WithCancelCause(ctx)
		time.AfterFunc(20*time.Millisecond, func() { cancel(cause) })
		err = errors.Join(m.feed(0, 0), d.Step(ctx))
		require.ErrorIs(t, err, cause)
		return errDone
	})
	require.ErrorIs(t, errs[0], errDone)
}

// Without it a Step without a deadline could wait for ever for a lost rank.
func TestDefaultTimeout(t *testing.T) {
	release := make(chan struct{})
	errs := group{ranks: 2, opts: Options{Timeout: 200 * time.Millisecond}}.run(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m, d, err := setup(ctx, c, o)
		if err != nil {
			return err
		}
		defer d.Close()
		if rank == 1 {
			<-release
			return d.Step(ctx)
		}
		defer close(release)
		return errors.Join(m.feed(0, 0), d.Step(context.Background()))
	})
	require.ErrorIs(t, errs[0], context.DeadlineExceeded)
	require.ErrorContains(t, errs[0], "not done after 200ms")
	require.Error(t, errs[1])
}

// Without it ranks that call different things would hang, or pair unlike
// collectives: all of them are told who differs and how.
func TestContradictionsAreErrorsEverywhere(t *testing.T) {
	for want, deviate := range map[string]func(m *model, d *DDP, step func() error) error{
		"rank 0 has run 1 micro-steps, rank 2 has run 2 micro-steps": func(m *model, d *DDP, step func() error) error {
			return d.NoSync(step)
		},
		"rank 0 uses schedule 0, rank 2 uses schedule 1": func(m *model, d *DDP, step func() error) error {
			d.SetSchedule(overlap.NoOverlap)
			return nil
		},
		"rank 0 has learning rate 0.01, rank 2 has learning rate 0.5": func(m *model, d *DDP, step func() error) error {
			d.SetLR(0.5)
			return nil
		},
	} {
		errs := group{ranks: 3, opts: Options{Optimizer: optim.SGD{LR: 0.01}}}.run(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
			m, d, err := setup(ctx, c, o)
			if err != nil {
				return err
			}
			defer d.Close()
			step := func() error { return errors.Join(m.feed(0, rank*batch), d.Step(ctx)) }
			if err := step(); err != nil {
				return err
			}
			if rank == 2 {
				if err := deviate(m, d, step); err != nil {
					return err
				}
			}
			return step()
		})
		for rank, err := range errs {
			require.ErrorContains(t, err, want, "rank %d", rank)
		}
	}
}

// Without it ranks with different graphs would average unlike gradients.
func TestNewComparesRanks(t *testing.T) {
	oddModel := func(name string, columns int) *model {
		g := gorgonia.NewGraph()
		x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(2, 3), gorgonia.WithName("x"))
		w := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(3, columns), gorgonia.WithName(name), gorgonia.WithInit(gorgonia.Ones()))
		b := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(2, columns), gorgonia.WithName("b"), gorgonia.WithInit(gorgonia.Ones()))
		loss := gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(gorgonia.Must(gorgonia.Add(gorgonia.Must(gorgonia.Mul(x, w)), b))))))
		return &model{x: x, loss: loss, params: gorgonia.Nodes{w, b}}
	}
	for want, c := range map[string]struct {
		model *model
		opts  Options
	}{
		`layout of rank 1 differs from that of rank 0: parameter 0 is "v" float32[3 4], not "w" float32[3 4]`: {model: oddModel("v", 4)},
		`layout of rank 1 differs from that of rank 0: parameter 0 is "w" float32[3 5], not "w" float32[3 4]`: {model: oddModel("w", 5)},
		"options of rank 1 differs from that of rank 0":                                                       {model: oddModel("w", 4), opts: Options{Norm: true}},
		"no parameter to train":    {model: &model{loss: oddModel("w", 4).loss}},
		"MaxNorm needs Optimizer":  {model: oddModel("w", 4), opts: Options{MaxNorm: 1}},
		"MaxNorm is NaN":           {model: oddModel("w", 4), opts: Options{MaxNorm: math.NaN()}},
		"Schedule needs Optimizer": {model: oddModel("w", 4), opts: Options{Schedule: optim.Constant(1)}},
	} {
		errs := group{ranks: 3}.run(t, func(ctx context.Context, rank int, world comm.Communicator, o *Options) error {
			m := oddModel("w", 4)
			if rank == 1 {
				m = c.model
				c.opts.Device = o.Device
				o = &c.opts
			}
			d, err := New(ctx, world, m.loss, m.params, o)
			require.Nil(t, d)
			return err
		})
		for rank, err := range errs {
			require.Error(t, err, "rank %d", rank)
		}
		require.ErrorContains(t, errs[1], want)
		if !strings.Contains(errs[0].Error(), want) { // the group may have been told of the refusal first
			require.ErrorContains(t, errs[0], "rank")
		}
	}
}

// Without it a run would go on with NaN, or one rank would stop alone and hang
// the others: all say at which step, on which rank and in which gradient first.
func TestNonFinite(t *testing.T) {
	for name, o := range map[string]Options{
		"external":   {},
		"with norm":  {Norm: true},
		"clipped":    {Optimizer: optim.SGD{}, MaxNorm: 1},
		"per bucket": {Optimizer: optim.SGD{}},
	} {
		t.Run(name, func(t *testing.T) {
			params := make([][][]float32, 2)
			errs := group{ranks: 2, opts: o}.run(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
				m, d, err := setup(ctx, c, o)
				if err != nil {
					return err
				}
				defer d.Close()
				for s := range 4 {
					if err := m.feed(s, rank*batch); err != nil {
						return err
					}
					if rank == 1 && s == 2 {
						m.y.Value().Data().([]float32)[1] = float32(math.Inf(1))
					}
					if s == 2 {
						if err := d.Sync(ctx); err != nil {
							return err
						}
						params[rank] = snapshot(d.ValueGrads())
					}
					if err := d.Step(ctx); err != nil {
						require.Equal(t, err, d.Step(ctx))
						if name != "per bucket" {
							require.Equal(t, params[rank], snapshot(d.ValueGrads()), "parameters changed")
						}
						return err
					}
				}
				return nil
			})
			for rank, err := range errs {
				var nf *NonFiniteError
				require.ErrorAs(t, err, &nf, "rank %d", rank)
				require.Equal(t, 2, nf.Step)
				require.Equal(t, 1, nf.Rank)
				require.Equal(t, "s", nf.Param, "the scalar's gradient is final first")
				require.False(t, finite(nf.Loss))
				require.ErrorContains(t, err, `step 3: not a finite number (loss +Inf) on rank 1, in the gradient of "s" first`)
				require.Equal(t, nf.Clipped, !strings.Contains(err.Error(), "clipping"), "advice that was followed")
				require.Equal(t, 1, nf.Culprit())
			}
			require.Equal(t, errs[0].Error(), errs[1].Error())
		})
	}
}

// Without it a NaN that only gradients have would pass where the norm is known,
// and a NaN of an earlier micro-step would be reported as somebody else's.
func TestNonFiniteGradientAndMicroStep(t *testing.T) {
	t.Run("gradient", func(t *testing.T) {
		errs := group{ranks: 3, opts: Options{Norm: true}}.run(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
			g := gorgonia.NewGraph()
			x := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(3), gorgonia.WithName("x"))
			a := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(3), gorgonia.WithName("a"), gorgonia.WithInit(gorgonia.Ones()))
			b := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(3), gorgonia.WithName("b"), gorgonia.WithInit(gorgonia.Ones()))
			root := gorgonia.Must(gorgonia.Sqrt(gorgonia.Must(gorgonia.HadamardProd(x, a)))) // 0 at 0, with an infinite slope
			loss := gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Add(root, gorgonia.Must(gorgonia.Square(b))))))
			d, err := New(ctx, c, loss, gorgonia.Nodes{b, a}, o)
			if err != nil {
				return err
			}
			defer d.Close()
			in := []float32{1, 2, 3}
			if rank == 2 {
				in[1] = 0
			}
			return errors.Join(gorgonia.Let(x, tensor.New(tensor.WithBacking(in))), d.Step(ctx))
		})
		for _, err := range errs {
			require.ErrorContains(t, err, `on rank 2, in the gradient of "a" first`)
		}
	})
	t.Run("micro-step", func(t *testing.T) {
		errs := group{ranks: 2}.run(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
			m, d, err := setup(ctx, c, o)
			if err != nil {
				return err
			}
			defer d.Close()
			if err := m.feed(0, rank*batch); err != nil {
				return err
			}
			if rank == 1 {
				m.x.Value().Data().([]float32)[0] = float32(math.NaN())
			}
			if err := d.NoSync(func() error { return d.Step(ctx) }); err != nil {
				return err
			}
			return errors.Join(m.feed(1, rank*batch), d.Step(ctx))
		})
		for _, err := range errs {
			require.ErrorContains(t, err, `loss NaN) on rank 1, in the gradient of "s" first`)
		}
	})
}

// Without it a missing input or a bad value on one rank would hang the others.
func TestFailingRunEndsAll(t *testing.T) {
	errs := group{ranks: 2}.run(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m, d, err := setup(ctx, c, o)
		if err != nil {
			return err
		}
		defer d.Close()
		if rank == 0 {
			if err := m.feed(0, 0); err != nil {
				return err
			}
		}
		return d.Step(ctx)
	})
	require.ErrorContains(t, errs[1], `"x"`)
	require.Error(t, errs[0])
}
