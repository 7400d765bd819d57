package engine

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/device"
)

func newDevice(t testing.TB) device.Device {
	t.Helper()
	d, err := cpu.New(&cpu.Options{Threads: 1})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

func newStream(t testing.TB, d device.Device) device.Stream {
	t.Helper()
	s, err := d.NewStream(device.Normal)
	require.NoError(t, err)
	return s
}

func await(t testing.TB, s device.Stream) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	require.NoError(t, s.Sync(ctx))
}

// problem is a graph under test.
type problem struct {
	g      *gorgonia.ExprGraph
	dt     tensor.Dtype
	rng    *rand.Rand
	params gorgonia.Nodes
	loss   *gorgonia.Node
}

func newProblem(dt tensor.Dtype) *problem {
	return &problem{g: gorgonia.NewGraph(), dt: dt, rng: rand.New(rand.NewPCG(1, 2))}
}

// values draws from ±[0.3, 1.3), away from zeros of denominators and kinks.
func (p *problem) values(n int, positive bool) any {
	f := make([]float64, n)
	for i := range f {
		f[i] = float64(float32(0.3 + p.rng.Float64()))
		if !positive && p.rng.IntN(2) == 0 {
			f[i] = -f[i]
		}
	}
	if p.dt == tensor.Float64 {
		return f
	}
	r := make([]float32, n)
	for i := range r {
		r[i] = float32(f[i])
	}
	return r
}

func (p *problem) node(name string, positive bool, shape ...int) *gorgonia.Node {
	n := 1
	for _, d := range shape {
		n *= d
	}
	v := p.values(n, positive)
	if len(shape) == 0 {
		var s gorgonia.Value
		switch x := v.(type) {
		case []float64:
			s = gorgonia.NewF64(x[0])
		case []float32:
			s = gorgonia.NewF32(x[0])
		}
		return gorgonia.NewScalar(p.g, p.dt, gorgonia.WithName(name), gorgonia.WithValue(s))
	}
	return gorgonia.NewTensor(p.g, p.dt, len(shape), gorgonia.WithShape(shape...), gorgonia.WithName(name),
		gorgonia.WithValue(tensor.New(tensor.WithShape(shape...), tensor.WithBacking(v))))
}

func (p *problem) param(name string, shape ...int) *gorgonia.Node {
	n := p.node(name, false, shape...)
	p.params = append(p.params, n)
	return n
}

func (p *problem) positive(name string, shape ...int) *gorgonia.Node {
	n := p.node(name, true, shape...)
	p.params = append(p.params, n)
	return n
}

func (p *problem) input(name string, shape ...int) *gorgonia.Node {
	return p.node(name, false, shape...)
}

func (p *problem) ints(name string, vals ...int) *gorgonia.Node {
	return gorgonia.NewVector(p.g, tensor.Int, gorgonia.WithShape(len(vals)), gorgonia.WithName(name),
		gorgonia.WithValue(tensor.New(tensor.WithShape(len(vals)), tensor.WithBacking(vals))))
}

func (p *problem) constant(x float64) *gorgonia.Node {
	if p.dt == tensor.Float64 {
		return gorgonia.NewConstant(x)
	}
	return gorgonia.NewConstant(float32(x))
}

func must(n *gorgonia.Node, err error) *gorgonia.Node { return gorgonia.Must(n, err) }

// floats are the elements of memory or of a value, as float64.
func floats(t testing.TB, v gorgonia.Value) []float64 {
	t.Helper()
	b, err := memory(v)
	require.NoError(t, err)
	return floatsOf(b, v.Dtype())
}

func floatsOf(b []byte, dt tensor.Dtype) []float64 {
	if dt == tensor.Float64 {
		return append([]float64(nil), cast[float64](b)...)
	}
	var r []float64
	for _, x := range cast[float32](b) {
		r = append(r, float64(x))
	}
	return r
}

// rig is a plan with its stream.
type rig struct {
	*Plan
	t testing.TB
	s device.Stream
}

func compile(t testing.TB, d device.Device, p *problem, o *Options) *rig {
	t.Helper()
	plan, err := Compile(d, p.loss, p.params, o)
	require.NoError(t, err)
	return &rig{plan, t, newStream(t, d)}
}

// run runs once and returns the loss and the gradients.
func (r *rig) run() (float64, [][]float64) {
	r.t.Helper()
	require.NoError(r.t, r.Run(r.s, nil))
	await(r.t, r.s)
	return r.results()
}

func (r *rig) results() (float64, [][]float64) {
	var grads [][]float64
	for i := range r.gradBufs {
		b, _ := r.gradBufs[i].HostBytes()
		grads = append(grads, floatsOf(b, r.nodes[i].Dtype()))
	}
	b, _ := r.LossBuffer().HostBytes()
	return floatsOf(b, r.outputs[0].v.dt)[0], grads
}

// distance is DESIGN's metric, max|a−b| / max|b|.
func distance(a, b []float64) float64 {
	if len(a) != len(b) {
		return math.Inf(1)
	}
	d, m := 0.0, 0.0
	for i := range a {
		if math.IsNaN(a[i]) || math.IsNaN(b[i]) {
			return math.NaN()
		}
		d, m = math.Max(d, math.Abs(a[i]-b[i])), math.Max(m, math.Abs(b[i]))
	}
	if d == 0 {
		return 0
	}
	return d / m
}

// differences are the gradients of p's loss by central differences, run by r.
func differences(t testing.TB, r *rig, p *problem) [][]float64 {
	t.Helper()
	const h = 1e-5
	var all [][]float64
	for _, n := range p.params {
		mem, err := memory(n.Value())
		require.NoError(t, err)
		x := cast[float64](mem)
		g := make([]float64, len(x))
		for i, old := range x {
			x[i] = old + h
			up, _ := r.run()
			x[i] = old - h
			down, _ := r.run()
			x[i] = old
			g[i] = (up - down) / (2 * h)
		}
		all = append(all, g)
	}
	return all
}

func requireClose(t testing.TB, p *problem, got, want [][]float64, tol float64) {
	t.Helper()
	require.Len(t, got, len(want))
	for i := range want {
		if d := distance(got[i], want[i]); !(d <= tol) {
			t.Errorf("gradient of %s: distance %.2g\n got %v\nwant %v", p.params[i].Name(), d, head(got[i]), head(want[i]))
		}
	}
}

func head(x []float64) string {
	return fmt.Sprintf("%.6g", x[:min(len(x), 8)])
}
