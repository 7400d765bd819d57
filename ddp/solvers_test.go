package ddp

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/engine"
)

// awkward has what gorgonia's own bookkeeping gets wrong: a and b share one
// gradient node, which later operations read too; c's gradient is a constant; s
// is a scalar; w is ordinary.
func awkward(seed float32) *model {
	g := gorgonia.NewGraph()
	matrix := func(name string, from float32) *gorgonia.Node {
		v := []float32{from, from + 0.25, -from, 0.5, 1 - from, 0.125}
		return gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(2, 3), gorgonia.WithName(name),
			gorgonia.WithValue(tensor.New(tensor.WithShape(2, 3), tensor.WithBacking(v))))
	}
	a, b, c, w := matrix("a", seed), matrix("b", seed/2), matrix("c", seed/3), matrix("w", seed+1)
	s := gorgonia.NewScalar(g, tensor.Float32, gorgonia.WithName("s"), gorgonia.WithValue(seed))
	x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(2, 3), gorgonia.WithName("x"))
	h := gorgonia.Must(gorgonia.Add(gorgonia.Must(gorgonia.Add(a, b)), gorgonia.Must(gorgonia.HadamardProd(w, x))))
	cost := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(gorgonia.Must(gorgonia.Square(h)), s))))
	loss := gorgonia.Must(gorgonia.Add(cost, gorgonia.Must(gorgonia.Sum(c))))
	return &model{x: x, loss: loss, params: gorgonia.Nodes{a, b, c, w, s}}
}

// plain is a parameter and a gradient in memory of their own.
type plain struct{ value, grad gorgonia.Value }

func (p plain) Value() gorgonia.Value         { return p.value }
func (p plain) Grad() (gorgonia.Value, error) { return p.grad, nil }

func clone(v gorgonia.Value) gorgonia.Value {
	c, err := gorgonia.CloneValue(v)
	if err != nil {
		panic(err)
	}
	return c
}

// solvers are gorgonia's that take any ValueGrad.
func solvers() map[string]func() gorgonia.Solver {
	return map[string]func() gorgonia.Solver{
		"Vanilla":  func() gorgonia.Solver { return gorgonia.NewVanillaSolver(gorgonia.WithLearnRate(0.01)) },
		"Momentum": func() gorgonia.Solver { return gorgonia.NewMomentum(gorgonia.WithLearnRate(0.01)) },
		"Adam":     func() gorgonia.Solver { return gorgonia.NewAdamSolver(gorgonia.WithLearnRate(0.01)) },
		"RMSProp":  func() gorgonia.Solver { return gorgonia.NewRMSPropSolver(gorgonia.WithLearnRate(0.01)) },
		"AdaGrad":  func() gorgonia.Solver { return gorgonia.NewAdaGradSolver(gorgonia.WithLearnRate(0.01)) },
		"clipping": func() gorgonia.Solver {
			return gorgonia.NewAdamSolver(gorgonia.WithLearnRate(0.01), gorgonia.WithClip(0.5), gorgonia.WithL2Reg(0.01))
		},
	}
}

// Without it a solver that squares and zeroes gradients in place would change
// another parameter's, or one that no later step sees: two ranks with gorgonia's
// solvers must do what one process does with copies of the averages.
func TestStockSolvers(t *testing.T) {
	const ranks, steps = 2, 4
	inputs := func(step, rank int) []float32 {
		return []float32{float32(step), 1, float32(rank) - 0.5, 2, 0.5, float32(rank)}
	}
	for name, make := range solvers() {
		t.Run(name, func(t *testing.T) {
			want := reference(t, make(), ranks, steps, inputs)
			group{ranks: ranks}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
				m := awkward(0.75)
				d, err := New(ctx, c, m.loss, m.params, o)
				if err != nil {
					return err
				}
				defer d.Close()
				solver := make()
				for s := range steps {
					in := tensor.New(tensor.WithShape(2, 3), tensor.WithBacking(inputs(s, rank)))
					if err := errors.Join(gorgonia.Let(m.x, in), d.Step(ctx), solver.Step(d.ValueGrads())); err != nil {
						return err
					}
					requireNear(t, want[s], snapshot(d.ValueGrads()), 1e-5, "step %d", s)
					for i, g := range gradients(d) {
						for _, v := range g {
							require.Zero(t, v, "the solver zeroed the gradient of parameter %d, yet it is there", i)
						}
					}
				}
				return nil
			})
		})
	}
}

// reference applies a solver, in one process and to copies, to gradients that a
// plan of its own computes for every rank's input.
func reference(t *testing.T, solver gorgonia.Solver, ranks, steps int, inputs func(step, rank int) []float32) [][][]float32 {
	var after [][][]float32
	var own []gorgonia.ValueGrad
	for i, p := range awkward(0.75).params {
		own = append(own, plain{clone(p.Value()), clone(p.Value())})
		require.Equal(t, p.Value().Shape(), own[i].Value().Shape())
	}
	for s := range steps {
		sums := make([][]float32, len(own))
		for r := range ranks {
			m := awkward(0.75)
			for i, p := range m.params {
				require.NoError(t, gorgonia.UnsafeLet(p, clone(own[i].Value())))
			}
			require.NoError(t, gorgonia.Let(m.x, tensor.New(tensor.WithShape(2, 3), tensor.WithBacking(inputs(s, r)))))
			for i, g := range gradientsOf(t, m) {
				if sums[i] == nil {
					sums[i] = make([]float32, len(g))
				}
				for j := range g {
					sums[i][j] += g[j] / float32(ranks)
				}
			}
		}
		for i, v := range own {
			g, _ := v.Grad()
			fill(g, sums[i])
		}
		require.NoError(t, solver.Step(own))
		after = append(after, snapshot(own))
	}
	return after
}

// gradientsOf is every parameter's gradient, by a plan that runs gorgonia's ops.
func gradientsOf(t *testing.T, m *model) [][]float32 {
	dev := newDevice(t)
	p, err := engine.Compile(dev, m.loss, m.params, &engine.Options{Reference: true})
	require.NoError(t, err)
	var bufs []deviceBuffer
	for _, q := range p.Params() {
		b, err := dev.Alloc(q.Bytes())
		require.NoError(t, err)
		bufs = append(bufs, b)
	}
	require.NoError(t, p.BindGrads(bufs))
	s, err := dev.NewStream(0)
	require.NoError(t, err)
	require.NoError(t, p.Run(s, nil))
	require.NoError(t, s.Sync(context.Background()))
	var all [][]float32
	for i, q := range p.Params() {
		v, err := engine.View(bufs[i], q.Shape, q.Type)
		require.NoError(t, err)
		all = append(all, floats(v))
	}
	return all
}

func fill(v gorgonia.Value, x []float32) {
	switch v := v.(type) {
	case *gorgonia.F32:
		*v = gorgonia.F32(x[0])
	case *tensor.Dense:
		copy(v.Float32s(), x)
	default:
		panic(fmt.Sprintf("a value of %T", v))
	}
}

// The package says that gorgonia's AdamW cannot be used. When this fails, a new
// gorgonia has mended it, and the documentation is to follow.
func TestGorgoniaAdamWIsOfNoUse(t *testing.T) {
	group{ranks: 1}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m := buildModel(batch, 0)
		d, err := New(ctx, c, m.loss, m.params, o)
		if err != nil {
			return err
		}
		defer d.Close()
		if err := errors.Join(m.feed(0, 0), d.Step(ctx)); err != nil {
			return err
		}
		require.Panics(t, func() { _ = gorgonia.NewAdamW().Step(d.ValueGrads()) })
		before := snapshot(d.ValueGrads())
		w0 := []gorgonia.ValueGrad{m.params[0]}
		g, err := m.params[0].Grad()
		require.NoError(t, err)
		require.Equal(t, gradients(d)[0], floats(g), "param.Grad() is the average too")
		require.NoError(t, gorgonia.NewAdamW(gorgonia.WithLearnRate(0.5)).Step(w0))
		require.Equal(t, before, snapshot(d.ValueGrads()), "it drops the weights that it computes")
		return nil
	})
}

// Without it loops written against gorgonia.VM could not be reused, or outputs
// would show an earlier step.
func TestVMAndOutputs(t *testing.T) {
	group{ranks: 2}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m := awkward(0.5)
		var read gorgonia.Value
		gorgonia.Read(m.loss, &read)
		o.Outputs = gorgonia.Nodes{m.x}
		d, err := New(ctx, c, m.loss, m.params, o)
		if err != nil {
			return err
		}
		defer d.Close()
		vm := d.VM()
		for s := range 3 {
			in := tensor.New(tensor.WithShape(2, 3), tensor.WithBacking([]float32{float32(s), 1, 2, 3, 4, float32(rank)}))
			if err := errors.Join(gorgonia.Let(m.x, in), vm.RunAll()); err != nil {
				return err
			}
			require.InDelta(t, d.Loss(), float64(floats(read)[0]), 0)
			require.InDelta(t, d.Loss(), float64(floats(m.loss.Value())[0]), 0)
			vm.Reset()
		}
		require.NoError(t, vm.Close())
		require.Equal(t, 3, d.Steps())
		return nil
	})
}
