package nn

import (
	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem/device"
)

// Linear is x·w + bias for x (N, in), w (in, out) and bias (out), which may be
// nil. The result is (N, out).
func Linear(x, w, bias *gorgonia.Node) (*gorgonia.Node, error) {
	c := &checker{layer: "linear"}
	xs, ws := c.floats("x", x, 2), c.floats("w", w, 2)
	c.must(xs.Shape[1] == ws.Shape[0], "x has shape %v and w %v: the columns of x must be the rows of w", xs.Shape, ws.Shape)
	if bias != nil {
		b := c.floats("bias", bias, 1)
		c.must(b.Shape[0] == ws.Shape[1], "bias has shape %v and w %v: the bias needs an element for each column of w", b.Shape, ws.Shape)
	}
	if c.err != nil {
		return nil, c.err
	}
	if bias == nil {
		return differentiableMatMul(false, x, w)
	}
	return differentiableMatMul(false, x, w, bias)
}

// MatMulNT is x·wᵀ for x (N, D) and w (V, D), as for a head that shares its
// weights with the token embedding. The result is (N, V).
func MatMulNT(x, w *gorgonia.Node) (*gorgonia.Node, error) {
	c := &checker{layer: "matmul-nt"}
	xs, ws := c.floats("x", x, 2), c.floats("w", w, 2)
	c.must(xs.Shape[1] == ws.Shape[1], "x has shape %v and w %v: they must have as many columns", xs.Shape, ws.Shape)
	if c.err != nil {
		return nil, c.err
	}
	return differentiableMatMul(true, x, w)
}

// differentiableMatMul is A·op(B) + bias for in = A, B and perhaps bias.
func differentiableMatMul(transB bool, in ...*gorgonia.Node) (*gorgonia.Node, error) {
	o := matMulOp(false, transB, in...)
	o.diff = []bool{true, true, true}[:len(in)]
	o.grad = func(in gorgonia.Nodes, _, dy *gorgonia.Node) (gorgonia.Nodes, error) {
		g, a, b := gradientsOf(len(in)), in[0], in[1]
		if len(in) == 3 {
			g.add(2, colSumOp(dy), dy)
		}
		if transB {
			g.add(1, matMulOp(true, false, dy, a), dy, a)
		} else {
			g.add(1, matMulOp(true, false, a, dy), a, dy)
		}
		g.add(0, matMulOp(false, !transB, dy, b), dy, b)
		return g.done()
	}
	return apply(o, in...)
}

// matMulOp is op(A)·op(B) + bias for in = A, B and perhaps bias.
func matMulOp(transA, transB bool, in ...*gorgonia.Node) *op {
	a, b := in[0].Shape(), in[1].Shape()
	rows, cols := a[0], b[1]
	if transA {
		rows = a[1]
	}
	if transB {
		cols = b[0]
	}
	o := &op{ref: reference{matMul[float32], matMul[float64]}}
	o.desc = device.Op{
		Kind: device.MatMul,
		Attr: device.Attr{TransA: transA, TransB: transB, Bias: len(in) == 3},
		Out:  []device.Tensor{{Shape: []int{rows, cols}, Type: tensorOf(in[0]).Type}},
	}
	return o
}

func matMul[F float](a args[F]) error {
	at, shape := a.desc.Attr, a.desc.In
	rows, cols := a.desc.Out[0].Shape[0], a.desc.Out[0].Shape[1]
	inner, rsA, csA := shape[0].Shape[1], shape[0].Shape[1], 1
	if at.TransA {
		inner, rsA, csA = shape[0].Shape[0], 1, shape[0].Shape[1]
	}
	rsB, csB := shape[1].Shape[1], 1
	if at.TransB {
		rsB, csB = 1, shape[1].Shape[1]
	}
	sum := make([]float64, cols)
	for r := range rows {
		clear(sum)
		for k := range inner {
			x, b := float64(a.f[0][r*rsA+k*csA]), a.f[1][k*rsB:]
			for j := range sum {
				sum[j] += x * float64(b[j*csB])
			}
		}
		for j, s := range sum {
			if at.Bias {
				s += float64(a.f[2][j])
			}
			a.out[r*cols+j] = F(s)
		}
	}
	return nil
}

// colSumOp sums the rows of x (N, D): the gradient of a bias.
func colSumOp(x *gorgonia.Node) *op {
	t := tensorOf(x)
	o := &op{ref: reference{colSum[float32], colSum[float64]}}
	o.desc = device.Op{Kind: device.ColSum, Out: []device.Tensor{{Shape: t.Shape[1:], Type: t.Type}}}
	return o
}

func colSum[F float](a args[F]) error {
	sum := make([]float64, len(a.out))
	for i, x := range a.f[0] {
		sum[i%len(sum)] += float64(x)
	}
	round(a.out, sum)
	return nil
}

// round stores float64 sums.
func round[F float](dst []F, sum []float64) {
	for i, s := range sum {
		dst[i] = F(s)
	}
}
