package engine

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// sumSquares makes a scalar of x in which every element has its own weight.
func (p *problem) sumSquares(x *G.Node) *G.Node {
	if x.IsScalar() {
		return must(G.Square(x))
	}
	return must(G.Mean(must(G.Square(must(G.Add(x, p.input(fmt.Sprint("offset of node ", x.ID()), x.Shape()...)))))))
}

// graphs are built from stock ops only.
var graphs = map[string]func(p *problem){
	"mlp": func(p *problem) {
		x := p.input("x", 5, 4)
		h := must(G.Tanh(must(G.BroadcastAdd(must(G.Mul(x, p.param("w1", 4, 6))), p.param("b1", 1, 6), nil, []byte{0}))))
		h = must(G.Sigmoid(must(G.Mul(h, p.param("w2", 6, 3)))))
		p.loss = p.sumSquares(h)
	},
	// TapeMachine overwrites a with its own gradient here.
	"reshape chain": func(p *problem) {
		a := must(G.Reshape(p.param("a", 2, 6), tensor.Shape{3, 4}))
		p.loss = must(G.Sum(must(G.Square(must(G.Add(a, p.param("b", 3, 4)))))))
	},
	"reshape of reshape": func(p *problem) {
		a := must(G.Reshape(must(G.Reshape(p.param("a", 2, 6), tensor.Shape{12})), tensor.Shape{4, 3}))
		b := must(G.Square(a))
		c := must(G.Reshape(b, tensor.Shape{3, 4}))
		p.loss = must(G.Add(p.sumSquares(must(G.Reshape(must(G.Tanh(c)), tensor.Shape{12}))), must(G.Sum(b))))
	},
	"softmax": func(p *problem) {
		s := must(G.SoftMax(must(G.Mul(p.input("x", 3, 4), p.param("w", 4, 5)))))
		p.loss = must(G.Neg(must(G.Mean(must(G.Log(s))))))
	},
	"log softmax": func(p *problem) {
		s := must(G.LogSoftMax(must(G.Mul(p.input("x", 3, 4), p.param("w", 4, 5))), 1))
		p.loss = must(G.Neg(must(G.Mean(must(G.HadamardProd(s, p.input("y", 3, 5)))))))
	},
	"broadcast": func(p *problem) {
		x := p.param("x", 4, 3)
		y := must(G.BroadcastSub(x, p.param("b", 1, 3), nil, []byte{0}))
		y = must(G.BroadcastHadamardProd(y, p.param("c", 4, 1), nil, []byte{1}))
		p.loss = p.sumSquares(y)
	},
	"by indices": func(p *problem) {
		e := must(G.ByIndices(p.param("wte", 6, 3), p.ints("tokens", 1, 4, 1, 5), 0))
		p.loss = p.sumSquares(must(G.Mul(e, p.param("w", 3, 2))))
	},
	"slices": func(p *problem) {
		x := p.param("x", 4, 9)
		q, k := must(G.Slice(x, nil, G.S(0, 3))), must(G.Slice(x, nil, G.S(3, 6)))
		v := must(G.Slice(x, G.S(1, 3)))
		p.loss = must(G.Add(must(G.Sum(must(G.HadamardProd(q, must(G.Square(k)))))), p.sumSquares(v)))
	},
	"concat": func(p *problem) {
		c := must(G.Concat(1, p.param("a", 3, 2), p.param("b", 3, 4)))
		p.loss = p.sumSquares(must(G.Tanh(c)))
	},
	"transposes": func(p *problem) {
		a, b := p.param("a", 4, 3), p.param("b", 4, 5)
		c := must(G.Mul(must(G.Transpose(a, 1, 0)), b))
		d := must(G.Mul(c, must(G.Transpose(p.param("d", 2, 5), 1, 0))))
		p.loss = must(G.Add(p.sumSquares(d), must(G.Sum(must(G.Square(must(G.Transpose(c, 1, 0))))))))
	},
	"batched": func(p *problem) {
		q, k := p.param("q", 2, 3, 4), p.param("k", 2, 5, 4)
		s := must(G.BatchedMatMul(q, k, false, true))
		s = must(G.BatchedMatMul(s, must(G.Transpose(p.param("v", 2, 3, 5), 0, 2, 1))))
		p.loss = p.sumSquares(s)
	},
	"vectors": func(p *problem) {
		w, x := p.param("w", 4, 3), p.param("x", 3)
		y := must(G.Mul(w, x))
		p.loss = must(G.Add(must(G.Mul(y, p.param("v", 4))), p.sumSquares(must(G.Tanh(y)))))
	},
	"tensordot and sums": func(p *problem) {
		a := must(G.Tensordot([]int{1}, []int{0}, p.param("a", 3, 4), p.param("b", 4, 2)))
		p.loss = must(G.Add(p.sumSquares(must(G.Sum(a, 0))), p.sumSquares(must(G.Mean(a, 1)))))
	},
	"unary": func(p *problem) {
		x := p.positive("x", 3, 4)
		y := must(G.Add(must(G.Exp(must(G.Neg(x)))), must(G.Log(x))))
		y = must(G.Add(y, must(G.HadamardProd(must(G.Sqrt(x)), must(G.Cube(x))))))
		p.loss = p.sumSquares(must(G.Add(y, must(G.HadamardDiv(must(G.Sigmoid(x)), must(G.Inverse(x)))))))
	},
	"scalars": func(p *problem) {
		s := p.param("s")
		y := must(G.HadamardProd(p.param("x", 2, 3), s))
		p.loss = must(G.Add(p.sumSquares(must(G.Tanh(y))), must(G.Square(s))))
	},
	"scalars only": func(p *problem) {
		a, b := p.param("a"), p.param("b")
		p.loss = must(G.Add(must(G.Square(must(G.Mul(a, b)))), a))
	},
	// Add gives both operands one gradient node.
	"shared gradient": func(p *problem) {
		p.loss = p.sumSquares(must(G.Add(p.param("a", 3, 2), p.param("b", 3, 2))))
	},
	// The gradient of p is the node that the gradients of what made h read on.
	"gradient with readers": func(p *problem) {
		h := must(G.Tanh(must(G.Mul(p.input("x", 3, 4), p.param("w", 4, 2)))))
		p.loss = p.sumSquares(must(G.Add(h, p.param("p", 3, 2))))
	},
	"constant gradient": func(p *problem) {
		p.loss = must(G.Add(must(G.Sum(p.param("a", 3, 2))), p.sumSquares(p.param("b", 2, 2))))
	},
	"constant scalar gradient": func(p *problem) {
		p.loss = must(G.Add(p.param("a"), p.sumSquares(p.param("b", 2, 2))))
	},
	"gradient is a parameter": func(p *problem) {
		a, b := p.param("a"), p.param("b")
		p.loss = must(G.Mul(a, b))
	},
	"reshaped gradient": func(p *problem) {
		w := must(G.Reshape(p.param("w", 12), tensor.Shape{4, 3}))
		p.loss = p.sumSquares(must(G.Mul(p.input("x", 2, 4), w)))
	},
	"used twice": func(p *problem) {
		w := p.param("w", 3, 3)
		p.loss = p.sumSquares(must(G.Mul(must(G.Tanh(must(G.Mul(p.input("x", 2, 3), w)))), w)))
	},
}

// Without it a stock op, a fallback's copy of a view or scalar, or a reshape
// that shares memory could give wrong gradients.
func TestGradientsAgreeWithDifferences(t *testing.T) {
	d := newDevice(t)
	everyGraph(func(name string, build func(p *problem)) {
		t.Run(name, func(t *testing.T) {
			p := newProblem(tensor.Float64)
			build(p)
			r := compile(t, d, p, &Options{Reference: true})
			_, got := r.run()
			requireClose(t, p, got, differences(t, r, p), 1e-7)
		})
	})
}

// Without it a float32 kernel, a folded transpose, a view or memory in use
// twice could give other gradients than the ops' own Do.
func TestKernelsAgreeWithReference(t *testing.T) {
	d := newDevice(t)
	everyGraph(func(name string, build func(p *problem)) {
		t.Run(name, func(t *testing.T) {
			p64, p32 := newProblem(tensor.Float64), newProblem(tensor.Float32)
			build(p64)
			build(p32)
			loss, want := compile(t, d, p64, &Options{Reference: true, Poison: true}).run()
			r := compile(t, d, p32, &Options{Poison: true})
			got, grads := r.run()
			require.InDelta(t, loss, got, 1e-5*max(1, loss))
			requireClose(t, p32, grads, want, 2e-6)

			plain := compile(t, d, p32, nil)
			again, grads2 := plain.run()
			require.Equal(t, got, again, "poisoned and plain runs differ")
			require.Equal(t, grads, grads2, "poisoned and plain runs differ")
		})
	})
}
