package engine

import (
	"errors"
	"fmt"
	"hash"
	"hash/fnv"
	"math"
	"runtime"
	"strings"
	"testing"

	"github.com/chewxy/hm"
	"github.com/stretchr/testify/require"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// custom is an op of a user: of any number of operands, its result like the first.
type custom struct {
	name string
	do   func(in ...G.Value) (G.Value, error)
}

func (c *custom) Arity() int { return -1 }
func (c *custom) Type() hm.Type {
	a := hm.TypeVariable('a')
	return hm.NewFnType(a, a)
}
func (c *custom) InferShape(s ...G.DimSizer) (tensor.Shape, error) {
	return s[0].(tensor.Shape).Clone(), nil
}
func (c *custom) Do(in ...G.Value) (G.Value, error) { return c.do(in...) }
func (c *custom) ReturnsPtr() bool                  { return true }
func (c *custom) CallsExtern() bool                 { return false }
func (c *custom) OverwritesInput() int              { return -1 }
func (c *custom) WriteHash(h hash.Hash)             { fmt.Fprint(h, c.name) }
func (c *custom) String() string                    { return c.name }
func (c *custom) Hashcode() uint32 {
	h := fnv.New32a()
	c.WriteHash(h)
	return h.Sum32()
}

// described is a custom op that a device may have a kernel for.
type described struct {
	custom
	op device.Op
}

func (d *described) DeviceOp() device.Op { return d.op }

// Without it a panic in an op would kill the process, and a wrong result be
// copied into memory of another size.
func TestFailuresOfDoNameNodeOpAndShapes(t *testing.T) {
	d := newDevice(t)
	for name, c := range map[string]struct {
		do   func(in ...G.Value) (G.Value, error)
		want string
	}{
		"panic":          {func(...G.Value) (G.Value, error) { panic("out of luck") }, "panic: out of luck"},
		"index":          {func(in ...G.Value) (G.Value, error) { return in[1], nil }, "panic: runtime error"},
		"error":          {func(...G.Value) (G.Value, error) { return nil, errors.New("no luck") }, "no luck"},
		"nothing":        {func(...G.Value) (G.Value, error) { return nil, nil }, "returned nothing"},
		"another shape":  {func(...G.Value) (G.Value, error) { return vector(1, 2), nil }, "its Do returned shape [2], not [3]"},
		"another type":   {func(...G.Value) (G.Value, error) { return G.NewF64(1), nil }, "its Do returned elements of float64"},
		"a scalar":       {func(...G.Value) (G.Value, error) { return G.NewF32(1), nil }, "its Do returned a scalar"},
		"other operands": {func(in ...G.Value) (G.Value, error) { cast32(in[0])[1] = 9; return in[0], nil }, "changed an operand"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newProblem(tensor.Float32)
			p.loss = must(G.ApplyOp(&custom{"luck", c.do}, p.param("w", 3)))
			r := compile(t, d, p, &Options{ForwardOnly: true, Poison: true})
			err := r.Run(r.s, nil)
			for err == nil {
				err = r.s.Sync(t.Context())
			}
			require.ErrorContains(t, err, c.want)
			require.ErrorContains(t, err, `node 1 "luck(%0)": luck of [float32(3)] → float32[3]`)
			// A fresh stream starts afresh.
			r.s = newStream(t, d)
			require.NoError(t, r.Run(r.s, nil))
		})
	}
}

func cast32(v G.Value) []float32 { return v.(*tensor.Dense).Float32s() }

// Without it the results of ops that return views, transposed tensors or their
// operand would be copied in the wrong order, or not at all.
func TestResultsInEveryLayout(t *testing.T) {
	d := newDevice(t)
	rows := func(x ...float32) *tensor.Dense {
		return tensor.New(tensor.WithShape(2, 3), tensor.WithBacking(x))
	}
	for name, c := range map[string]struct {
		do   func(in ...G.Value) (G.Value, error)
		want []float32
	}{
		"operand": {func(in ...G.Value) (G.Value, error) { return in[0], nil }, []float32{1, 2, 3, 4, 5, 6}},
		"view": {func(in ...G.Value) (G.Value, error) {
			big := tensor.New(tensor.WithShape(3, 5), tensor.WithBacking(tensor.Range(tensor.Float32, 0, 15)))
			return big.Slice(G.S(1, 3), G.S(1, 4))
		}, []float32{6, 7, 8, 11, 12, 13}},
		"transposed": {func(in ...G.Value) (G.Value, error) {
			x := tensor.New(tensor.WithShape(3, 2), tensor.WithBacking([]float32{1, 2, 3, 4, 5, 6}))
			return x, x.T()
		}, []float32{1, 3, 5, 2, 4, 6}},
		"column major": {func(in ...G.Value) (G.Value, error) {
			return tensor.New(tensor.WithShape(2, 3), tensor.AsFortran([]float32{1, 2, 3, 4, 5, 6})), nil
		}, []float32{1, 2, 3, 4, 5, 6}},
		"other shape": {func(in ...G.Value) (G.Value, error) {
			x := rows(1, 2, 3, 4, 5, 6)
			return x, x.Reshape(6)
		}, []float32{1, 2, 3, 4, 5, 6}},
	} {
		p := newProblem(tensor.Float32)
		w := G.NewMatrix(p.g, p.dt, G.WithShape(2, 3), G.WithName("w"), G.WithValue(rows(1, 2, 3, 4, 5, 6)))
		p.params = G.Nodes{w}
		p.loss = must(G.ApplyOp(&custom{"layout", c.do}, w))
		r := compile(t, d, p, &Options{ForwardOnly: true})
		require.NoError(t, r.Run(r.s, nil))
		await(t, r.s)
		require.Equal(t, c.want, float32s(r.LossBuffer()), name)
	}
}

// Without it a forward op on the host would leave the statistics empty that its
// gradient's kernel reads.
func TestStatesStayWithOneWayOfRunning(t *testing.T) {
	d := newDevice(t)
	mat := device.Tensor{Shape: []int{2, 3}, Type: dtype.Float32}
	row := device.Tensor{Shape: []int{3}, Type: dtype.Float32}
	col := device.Tensor{Shape: []int{2}, Type: dtype.Float32}
	for name, eps := range map[string]float32{"kernels": 1e-5, "unsupported": 0} {
		mean, rstd := &device.State{Name: "mean", Tensor: col}, &device.State{Name: "rstd", Tensor: col}
		p := newProblem(tensor.Float32)
		x, gamma, beta := p.param("x", 2, 3), p.param("gamma", 3), p.param("beta", 3)
		id := func(in ...G.Value) (G.Value, error) { return in[0], nil }
		forward := &described{custom{"norm", id}, device.Op{Kind: device.LayerNorm, Attr: device.Attr{Eps: 1e-5},
			In: []device.Tensor{mat, row, row}, State: []*device.State{mean, rstd}, Out: []device.Tensor{mat}}}
		if eps == 0 {
			forward.op.Kind = "unheard of"
		}
		backward := &described{custom{"norm grad", id}, device.Op{Kind: device.LayerNormGradInput,
			In: []device.Tensor{mat, row, mat}, State: []*device.State{mean, rstd}, Out: []device.Tensor{mat}}}
		y := G.NewUniqueNode(G.WithType(x.Type()), G.WithOp(forward), G.WithChildren(G.Nodes{x, gamma, beta}), G.In(p.g), G.WithShape(2, 3))
		p.loss = G.NewUniqueNode(G.WithType(x.Type()), G.WithOp(backward), G.WithChildren(G.Nodes{x, gamma, y}), G.In(p.g), G.WithShape(2, 3))
		r := compile(t, d, p, &Options{ForwardOnly: true, Poison: true})
		for _, st := range r.steps {
			require.Equal(t, eps != 0, st.v.kernel != nil, "%s: %s", name, r.Explain())
		}
		require.NoError(t, r.Run(r.s, nil))
		await(t, r.s)
		for _, v := range float32s(r.LossBuffer()) {
			require.False(t, v != v, "%s: NaN", name)
		}
	}
}

// Without it an op that describes another shape than its node's would read or
// write past its memory.
func TestDescriptionsMustFit(t *testing.T) {
	d := newDevice(t)
	small := device.Tensor{Shape: []int{2}, Type: dtype.Float32}
	fits := device.Tensor{Shape: []int{3}, Type: dtype.Float32}
	for want, op := range map[string]device.Op{
		"describes input 0 as": {Kind: device.GELU, In: []device.Tensor{small}, Out: []device.Tensor{fits}},
		"describes its output": {Kind: device.GELU, In: []device.Tensor{fits}, Out: []device.Tensor{small}},
		"2 inputs":             {Kind: device.GELU, In: []device.Tensor{fits, fits}, Out: []device.Tensor{fits}},
	} {
		p := newProblem(tensor.Float32)
		p.loss = must(G.ApplyOp(&described{custom{"gelu", nil}, op}, p.param("w", 3)))
		_, err := Compile(d, p.loss, p.params, &Options{ForwardOnly: true})
		require.ErrorContains(t, err, want)
	}
}

// far is a device whose memory the host can't address.
type far struct{ device.Device }

type farBuffer struct{ device.Buffer }

func (f far) Alloc(n int) (device.Buffer, error) {
	b, err := f.Device.Alloc(n)
	return farBuffer{b}, err
}
func (farBuffer) HostBytes() ([]byte, bool) { return nil, false }

// Without it an op that only the host can run would fail in mid-run on a GPU.
func TestOtherDevicesRefuseOpsWithoutKernel(t *testing.T) {
	p := newProblem(tensor.Float32)
	p.loss = must(G.Mean(must(G.Sin(p.param("w", 3, 3)))))
	_, err := Compile(far{newDevice(t)}, p.loss, p.params, nil)
	require.ErrorContains(t, err, `node 1 "sin(%0)"`)
	require.ErrorContains(t, err, "has no kernel for")
	_, err = Compile(far{newDevice(t)}, p.loss, p.params, &Options{Poison: true})
	require.ErrorContains(t, err, "Poison needs memory that the host can address")
}

// Without it a step would feed the garbage collector, and with it every pause.
func TestRunAllocatesNothing(t *testing.T) {
	d := newDevice(t)
	p := newProblem(tensor.Float32)
	h := must(G.Tanh(must(G.Mul(p.input("x", 8, 8), p.param("w1", 8, 8)))))
	p.loss = must(G.Mul(must(G.Mul(h, p.param("w2", 8))), p.param("w3", 8)))
	r := compile(t, d, p, nil)
	requireKernelsOnly(t, r.Plan)
	bindBuffers(t, d, r.Plan)
	ready := func(int) error { return nil }
	r.BindHooks(Hooks{Read: ready, Write: ready, LastRead: ready})
	step := func() {
		require.NoError(t, r.Run(r.s, ready))
		require.NoError(t, r.s.Sync(t.Context()))
		require.NoError(t, r.BindOutputs())
	}
	for range 10 {
		step()
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 100 {
		step()
	}
	runtime.ReadMemStats(&after)
	require.Less(t, after.Mallocs-before.Mallocs, uint64(50), "objects in 100 runs")
}

// Without it gorgonia.Grad's panics, such as that of a division of unlike
// shapes, would end the process.
func TestPanicsOfGradAreErrors(t *testing.T) {
	p := newProblem(tensor.Float32)
	w := p.param("w", 3)
	y := G.NewUniqueNode(G.WithType(w.Type()), G.WithOp(&panicky{custom{"panicky", nil}}), G.WithChildren(G.Nodes{w}), G.In(p.g), G.WithShape(3))
	p.loss = must(G.Sum(y))
	_, err := Compile(newDevice(t), p.loss, p.params, nil)
	require.ErrorContains(t, err, "gorgonia.Grad of node 2")
	require.ErrorContains(t, err, "panicked: no derivative")
}

type panicky struct{ custom }

func (p *panicky) DiffWRT(int) []bool { return []bool{true} }
func (p *panicky) SymDiff(G.Nodes, *G.Node, *G.Node) (G.Nodes, error) {
	panic("no derivative")
}

// Without it an evaluation would drop activations out.
func TestForwardOnlyIsNotTraining(t *testing.T) {
	d := newDevice(t)
	for _, forward := range []bool{true, false, true} {
		p := newProblem(tensor.Float32)
		w := p.param("w", 64)
		p.loss = must(G.Sum(must(G.Abs(must(G.Dropout(w, 0.5))))))
		want := 0.0
		for _, x := range floats(t, w.Value()) {
			want += math.Abs(x)
		}
		r := compile(t, d, p, &Options{ForwardOnly: forward})
		loss, _ := r.run()
		require.Equal(t, forward, math.Abs(loss-want) < 1e-3, "%v %v", loss, want)
	}
}

// Without it the description of a plan, which errors and tuning are read with,
// could leave steps out or name another place.
func TestExplainHasALineForEveryStep(t *testing.T) {
	p := newProblem(tensor.Float32)
	graphs["shared gradient"](p)
	r := compile(t, newDevice(t), p, nil)
	lines := strings.Split(strings.TrimSpace(r.Explain()), "\n")
	require.Len(t, lines, 1+r.Steps())
	require.Regexp(t, `^plan: \d+ steps, 1 inputs, 2 parameters`, lines[0])
	require.Regexp(t, `^   0 binary.add +node 2 "\+ false\(%0, %1\)" of float32\[3 2\], float32\[3 2\] → float32\[3 2\] at \d+\+24, 6 FLOP, 72 B <a <b >a >b$`, lines[1])
	require.Regexp(t, `copy +node \d+ .* at grad, 0 FLOP, 48 B !b$`, lines[len(lines)-1])
}
