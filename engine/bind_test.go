package engine

import (
	"testing"

	"github.com/stretchr/testify/require"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/device"
)

func float32s(b device.Buffer) []float32 {
	mem, _ := b.HostBytes()
	return cast[float32](mem)
}

func vector(x ...float32) *tensor.Dense {
	return tensor.New(tensor.WithShape(len(x)), tensor.WithBacking(x))
}

// dot is loss = x·w: its gradients are x and, if w2 is there, w2's.
func dot(p *problem) (x, w *G.Node) {
	x = G.NewVector(p.g, tensor.Float32, G.WithShape(3), G.WithName("x"))
	w = G.NewVector(p.g, tensor.Float32, G.WithShape(3), G.WithName("w"), G.WithValue(vector(1, 2, 3)))
	p.params = G.Nodes{w}
	p.loss = must(G.Mul(x, w))
	return x, w
}

func (r *rig) loss() float32 {
	r.t.Helper()
	await(r.t, r.s)
	return float32s(r.LossBuffer())[0]
}

// Without it a caller that fills its batch again while the step is under way
// would train on a mixture.
func TestInputsMayChangeOnceRunReturned(t *testing.T) {
	d := newDevice(t)
	p := newProblem(tensor.Float32)
	x, _ := dot(p)
	r := compile(t, d, p, nil)
	gate := make(chan struct{})
	require.NoError(t, r.s.HostFunc(func() error { <-gate; return nil }))
	batch := []float32{1, 1, 1}
	require.NoError(t, G.Let(x, vector(batch...)))
	require.NoError(t, G.Let(x, tensor.New(tensor.WithShape(3), tensor.WithBacking(batch))))
	var sums []float32
	keepLoss := func() error { sums = append(sums, float32s(r.LossBuffer())[0]); return nil }
	require.NoError(t, r.Run(r.s, nil))
	require.NoError(t, r.s.HostFunc(keepLoss))
	copy(batch, []float32{10, 10, 10})
	require.NoError(t, r.Run(r.s, nil))
	require.NoError(t, r.s.HostFunc(keepLoss))
	copy(batch, []float32{-1, -1, -1})
	close(gate)
	require.NoError(t, r.Run(r.s, nil))
	require.NoError(t, r.s.HostFunc(keepLoss))
	copy(batch, []float32{5, 5, 5})
	await(t, r.s)
	require.Equal(t, []float32{6, 60, -6}, sums)
}

// Without it stale or half-bound inputs would be computed with.
func TestInputsThatDontFit(t *testing.T) {
	d := newDevice(t)
	p := newProblem(tensor.Float32)
	x, w := dot(p)
	r := compile(t, d, p, nil)
	require.ErrorContains(t, r.Run(r.s, nil), `input "x" has no value`)
	G.WithValue(vector(1, 2))(x)
	require.ErrorContains(t, r.Run(r.s, nil), `input "x" has shape [2], not [3]`)
	require.NoError(t, G.UnsafeLet(x, vector(1, 2, 3)))
	require.NoError(t, r.Run(r.s, nil))
	require.Equal(t, float32(14), r.loss())
	// A transposed or sliced tensor is read in its own order.
	m := tensor.New(tensor.WithShape(3, 2), tensor.WithBacking([]float32{1, 9, 2, 9, 3, 9}))
	col, err := m.Slice(nil, G.S(0))
	require.NoError(t, err)
	require.NoError(t, G.Let(x, col))
	require.NoError(t, r.Run(r.s, nil))
	require.Equal(t, float32(14), r.loss())
	_ = w
}

// Without it parameters of the built-in optimizer's arena would not be those of
// the nodes, or a checkpoint that a caller lets be ignored.
func TestParametersLiveWhereTheyAreBound(t *testing.T) {
	d := newDevice(t)
	p := newProblem(tensor.Float32)
	x, w := dot(p)
	require.NoError(t, G.Let(x, vector(1, 1, 1)))
	r := compile(t, d, p, nil)
	require.NoError(t, r.Run(r.s, nil))
	require.Equal(t, float32(6), r.loss())
	// Unbound, the node's value is read at each run.
	require.NoError(t, G.Let(w, vector(1, 1, 1)))
	require.NoError(t, r.Run(r.s, nil))
	require.Equal(t, float32(3), r.loss())

	params, _ := bindBuffers(t, d, r.Plan)
	require.Equal(t, []float32{1, 1, 1}, float32s(params[0]))
	float32s(params[0])[2] = 5
	require.Equal(t, []float32{1, 1, 5}, w.Value().Data())
	require.NoError(t, r.Run(r.s, nil))
	require.Equal(t, float32(7), r.loss())

	var read []int
	r.BindHooks(Hooks{Read: func(i int) error { read = append(read, i); return nil }})
	for k := range 3 {
		require.NoError(t, G.Let(w, vector(float32(k), 2, 3)))
		require.NoError(t, r.Run(r.s, nil))
		require.Equal(t, float32(5+k), r.loss())
		require.Equal(t, []float32{float32(k), 2, 3}, float32s(params[0]))
		float32s(params[0])[0] = 100
		require.Equal(t, []float32{100, 2, 3}, w.Value().Data(), "the node must be bound to the buffer again")
	}
	require.Equal(t, []int{0, 0, 0}, read, "a refreshed parameter is announced once a run")
	// Another header over the same memory is no new value.
	v, err := View(params[0], []int{3}, r.Params()[0].Type)
	require.NoError(t, err)
	require.NoError(t, G.Let(w, v))
	require.NoError(t, r.Run(r.s, nil))
	require.Equal(t, float32(105), r.loss())
}

// Without it solvers and hooks that read param.Grad() would see another
// gradient than the bucket's.
func TestGradientsAreWrittenToTheirPlaces(t *testing.T) {
	d := newDevice(t)
	everyGraph(func(name string, build func(p *problem)) {
		p := newProblem(tensor.Float32)
		build(p)
		r := compile(t, d, p, nil)
		_, want := r.run()
		bindBuffers(t, d, r.Plan)
		_, got := r.run()
		require.Equal(t, want, got, name)
		for i, q := range r.Params() {
			if q.OwnGrad {
				g, err := p.params[i].Grad()
				require.NoError(t, err)
				require.Equal(t, got[i], floats(t, g), "%s: %s", name, q.Name)
			}
			if q.Shape == nil {
				require.False(t, q.Direct, "%s: %s", name, q.Name)
			}
		}
	})
}

// Without it shared, constant and read-on gradients could be written in place,
// where a reduction would change them under their other reader.
func TestGradientsThatNeedACopy(t *testing.T) {
	for name, direct := range map[string][]bool{
		"mlp":                      {true, true, true},
		"shared gradient":          {false, false},
		"gradient with readers":    {true, false},
		"constant gradient":        {true, true},
		"constant scalar gradient": {false, true},
		"gradient is a parameter":  {false, false},
		"scalars":                  {false, true},
		"reshaped gradient":        {true},
	} {
		p := newProblem(tensor.Float32)
		graphs[name](p)
		r := compile(t, newDevice(t), p, nil)
		for i, q := range r.Params() {
			require.Equal(t, direct[i], q.Direct, "%s: %s\n%s", name, q.Name, r.Explain())
		}
		if name == "shared gradient" {
			require.False(t, r.Params()[0].OwnGrad)
		}
	}
}

// Without it micro-steps would overwrite each other's gradients, or a kernel
// that can't add would.
func TestAccumulate(t *testing.T) {
	d := newDevice(t)
	for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		everyGraph(func(name string, build func(p *problem)) {
			p := newProblem(dt)
			build(p)
			r := compile(t, d, p, &Options{Poison: true})
			bindBuffers(t, d, r.Plan)
			_, once := r.run()
			r.Accumulate(true)
			r.run()
			_, thrice := r.run()
			want := make([][]float64, len(once))
			for i, g := range once {
				for _, x := range g {
					want[i] = append(want[i], 3*x)
				}
			}
			requireClose(t, p, thrice, want, 1e-6)
			r.Accumulate(false)
			_, again := r.run()
			require.Equal(t, once, again, name)
		})
	}
}

// Without it evaluation would need a second set of parameters, or training's
// parameters be overwritten by the evaluation graph's initial values.
func TestForwardOnlySharesParameters(t *testing.T) {
	d := newDevice(t)
	train, eval := newProblem(tensor.Float32), newProblem(tensor.Float32)
	x1, _ := dot(train)
	x2, w2 := dot(eval)
	r := compile(t, d, train, nil)
	params, _ := bindBuffers(t, d, r.Plan)
	float32s(params[0])[0] = 7
	e := compile(t, d, eval, &Options{ForwardOnly: true})
	require.Empty(t, e.Order())
	require.NoError(t, e.BindParams(params))
	require.NoError(t, G.Let(x1, vector(1, 0, 0)))
	require.NoError(t, G.Let(x2, vector(2, 0, 0)))
	require.NoError(t, e.Run(e.s, nil))
	require.Equal(t, float32(14), e.loss())
	require.Equal(t, []float32{7, 2, 3}, w2.Value().Data())
	require.NoError(t, r.Run(r.s, nil))
	require.Equal(t, float32(7), r.loss())
	require.Error(t, e.BindGrads(params))
}

// Without it a wrong buffer would be noticed as memory corruption.
func TestBuffersThatDontFit(t *testing.T) {
	d := newDevice(t)
	p := newProblem(tensor.Float32)
	_, w := dot(p)
	r := compile(t, d, p, nil)
	small, err := d.Alloc(8)
	require.NoError(t, err)
	require.ErrorContains(t, r.BindParams([]device.Buffer{small}), `parameter "w" must have 12 bytes`)
	require.ErrorContains(t, r.BindGrads(nil), "0 buffers for 1 parameters")
	odd, err := d.Alloc(64)
	require.NoError(t, err)
	require.ErrorContains(t, r.BindGrads([]device.Buffer{odd.Slice(2, 12)}), "not aligned")
	require.ErrorContains(t, r.BindOutputs(), "before a run")
	G.WithValue(vector(1, 2))(w)
	fits, err := d.Alloc(12)
	require.NoError(t, err)
	require.ErrorContains(t, r.BindParams([]device.Buffer{fits}), `"w" has shape [2], not [3]`)
}

// Without it the loss and what gorgonia.Read points at would be stale, or change
// under the reader's hands with the next run.
func TestOutputs(t *testing.T) {
	d := newDevice(t)
	p := newProblem(tensor.Float32)
	w := p.param("w", 2, 3)
	x := p.input("x", 4, 2)
	h := must(G.Tanh(must(G.Mul(x, w))))
	other := must(G.Exp(h))
	p.loss = must(G.Mean(must(G.Square(h))))
	_, err := G.Grad(p.loss, w)
	require.NoError(t, err)
	var readX, readW, readGrad, readConst G.Value
	G.Read(x, &readX)
	G.Read(w, &readW)
	G.Read(w.Deriv(), &readGrad)
	G.Read(p.loss.Deriv(), &readConst)
	r := compile(t, d, p, &Options{Outputs: G.Nodes{other, p.loss}, Poison: true})
	bindBuffers(t, d, r.Plan)
	loss, grads := r.run()
	require.NoError(t, r.BindOutputs())
	require.Equal(t, loss, floats(t, p.loss.Value())[0])
	require.Equal(t, floats(t, x.Value()), floats(t, readX))
	require.Equal(t, floats(t, w.Value()), floats(t, readW))
	require.Equal(t, grads[0], floats(t, readGrad))
	require.Equal(t, []float64{1}, floats(t, readConst))
	require.Nil(t, h.Value(), "an intermediate must not be bound")
	before := floats(t, other.Value())
	for i, v := range before {
		require.Greater(t, v, 0.3, "element %d", i)
	}
	require.NoError(t, G.Let(x, tensor.New(tensor.WithShape(4, 2), tensor.WithBacking(make([]float32, 8)))))
	r.run()
	require.Equal(t, before, floats(t, other.Value()), "outputs are copies")
	require.NoError(t, r.BindOutputs())
	require.Equal(t, []float64{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, floats(t, other.Value()))
}
