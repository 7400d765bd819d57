package nn

import (
	"math"

	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem/device"
)

// Constants of the tanh form of GELU: √(2/π) and the cubic term's factor.
const (
	geluScale = 0.7978845608028653558798921198687637
	geluCubic = 0.044715
)

// GELU is 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))) for each element of x of
// any shape, the form that GPT-2 uses. After Hendrycks and Gimpel,
// arXiv:1606.08415.
func GELU(x *gorgonia.Node) (*gorgonia.Node, error) {
	c := &checker{layer: "gelu"}
	xs := c.floats("x", x, -1)
	if c.err != nil {
		return nil, c.err
	}
	o := &op{ref: reference{gelu[float32], gelu[float64]}}
	o.desc = device.Op{Kind: device.GELU, Out: []device.Tensor{xs}}
	o.diff = []bool{true}
	o.grad = func(in gorgonia.Nodes, _, dy *gorgonia.Node) (gorgonia.Nodes, error) {
		g := gradientsOf(1)
		dx := &op{ref: reference{geluGrad[float32], geluGrad[float64]}}
		dx.desc = device.Op{Kind: device.GELUGrad, Out: []device.Tensor{xs}}
		g.add(0, dx, in[0], dy)
		return g.done()
	}
	return apply(o, x)
}

func gelu[F float](a args[F]) error {
	for i, f := range a.f[0] {
		x := float64(f)
		a.out[i] = F(0.5 * x * (1 + math.Tanh(geluScale*(x+geluCubic*x*x*x))))
	}
	return nil
}

func geluGrad[F float](a args[F]) error {
	for i, f := range a.f[0] {
		x := float64(f)
		t := math.Tanh(geluScale * (x + geluCubic*x*x*x))
		slope := 0.5*(1+t) + 0.5*x*(1-t*t)*geluScale*(1+3*geluCubic*x*x)
		a.out[i] = F(float64(a.f[1][i]) * slope)
	}
	return nil
}
