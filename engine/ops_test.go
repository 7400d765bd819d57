package engine

import (
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// builder makes a tensor or scalar of the problem's parameters.
type builder = func(p *problem) (*G.Node, error)

func unary(f func(*G.Node) (*G.Node, error)) builder {
	return func(p *problem) (*G.Node, error) { return f(p.positive("x", 3, 4)) }
}

// ops are stock ops one by one, those whose gradients gorgonia gets right.
var ops = map[string]builder{
	"abs": unary(G.Abs), "sin": unary(G.Sin), "cos": unary(G.Cos), "log1p": unary(G.Log1p), "expm1": unary(G.Expm1), "softplus": unary(G.Softplus),
	"rectify": unary(G.Rectify), "inverse": unary(G.Inverse), "cube": unary(G.Cube),
	"abs neg":      func(p *problem) (*G.Node, error) { return G.Abs(p.param("x", 3, 4)) },
	"leaky":        func(p *problem) (*G.Node, error) { return G.LeakyRelu(p.param("x", 3, 4), 0.1) },
	"pow":          func(p *problem) (*G.Node, error) { return G.Pow(p.positive("x", 3, 4), p.constant(3)) },
	"pow2":         func(p *problem) (*G.Node, error) { return G.Pow(p.positive("x", 3, 4), p.positive("y", 3, 4)) },
	"div scalar":   func(p *problem) (*G.Node, error) { return G.HadamardDiv(p.param("x", 3, 4), p.positive("s")) },
	"scalar div":   func(p *problem) (*G.Node, error) { return G.HadamardDiv(p.positive("s"), p.positive("x", 3, 4)) },
	"scalar sub":   func(p *problem) (*G.Node, error) { return G.Sub(p.positive("s"), p.positive("x", 3, 4)) },
	"sub scalar":   func(p *problem) (*G.Node, error) { return G.Sub(p.positive("x", 3, 4), p.positive("s")) },
	"max":          func(p *problem) (*G.Node, error) { return G.Max(p.param("x", 3, 4), 1) },
	"max0":         func(p *problem) (*G.Node, error) { return G.Max(p.param("x", 3, 4), 0) },
	"maxall":       func(p *problem) (*G.Node, error) { return G.Max(p.param("x", 3, 4)) },
	"sum1":         func(p *problem) (*G.Node, error) { return G.Sum(p.param("x", 3, 4), 1) },
	"sum3 02":      func(p *problem) (*G.Node, error) { return G.Sum(p.param("x", 3, 4, 2), 0, 2) },
	"sum3 1":       func(p *problem) (*G.Node, error) { return G.Sum(p.param("x", 3, 4, 2), 1) },
	"mean3 2":      func(p *problem) (*G.Node, error) { return G.Mean(p.param("x", 3, 4, 2), 2) },
	"norm":         func(p *problem) (*G.Node, error) { return G.Norm(p.param("x", 3, 4), 1, 2) },
	"concat0":      func(p *problem) (*G.Node, error) { return G.Concat(0, p.param("x", 3, 4), p.param("y", 2, 4)) },
	"concat 1wide": func(p *problem) (*G.Node, error) { return G.Concat(1, p.param("x", 3, 1), p.param("y", 3, 2)) },
	"concat same":  func(p *problem) (*G.Node, error) { x := p.param("x", 3, 2); return G.Concat(1, x, x) },
	"concat3": func(p *problem) (*G.Node, error) {
		return G.Concat(2, p.param("x", 3, 1, 2), p.param("y", 3, 1, 2))
	},
	"byidx1": func(p *problem) (*G.Node, error) {
		return G.ByIndices(p.param("x", 3, 4), p.ints("i", 0, 2, 2), 1)
	},
	"byidx3": func(p *problem) (*G.Node, error) {
		return G.ByIndices(p.param("x", 3, 4, 2), p.ints("i", 0, 2, 2), 0)
	},
	"slice row":  func(p *problem) (*G.Node, error) { return G.Slice(p.param("x", 3, 4), G.S(1)) },
	"slice elem": func(p *problem) (*G.Node, error) { return G.Slice(p.param("x", 3, 4), G.S(1), G.S(2)) },
	"slice vec":  func(p *problem) (*G.Node, error) { return G.Slice(p.param("x", 5), G.S(1, 3)) },
	"slice step": func(p *problem) (*G.Node, error) { return G.Slice(p.param("x", 6, 2), G.S(0, 6, 2)) },
	"slice 3":    func(p *problem) (*G.Node, error) { return G.Slice(p.param("x", 3, 4, 2), nil, G.S(1, 3)) },
	"slice col":  func(p *problem) (*G.Node, error) { return G.Slice(p.param("x", 3, 4), nil, G.S(1)) },
	"transpose3": func(p *problem) (*G.Node, error) { return G.Transpose(p.param("x", 3, 4, 2), 2, 0, 1) },
	"matvec T": func(p *problem) (*G.Node, error) {
		return G.Mul(must(G.Transpose(p.param("x", 3, 4), 1, 0)), p.param("v", 3))
	},
	"vecdot": func(p *problem) (*G.Node, error) { return G.Mul(p.param("x", 3), p.param("v", 3)) },
	"bmm TF": func(p *problem) (*G.Node, error) {
		return G.BatchedMatMul(p.param("x", 2, 3, 4), p.param("v", 2, 3, 5), true, false)
	},
	"bmm TT": func(p *problem) (*G.Node, error) {
		return G.BatchedMatMul(p.param("x", 2, 3, 4), p.param("v", 2, 5, 3), true, true)
	},
	"bmm FT": func(p *problem) (*G.Node, error) {
		return G.BatchedMatMul(p.param("x", 2, 3, 4), p.param("v", 2, 5, 4), false, true)
	},
	"bmm4": func(p *problem) (*G.Node, error) {
		return G.BatchedMatMul(p.param("x", 2, 2, 3, 4), p.param("v", 2, 2, 4, 5))
	},
	"tensordot2": func(p *problem) (*G.Node, error) {
		return G.Tensordot([]int{1, 2}, []int{0, 1}, p.param("a", 3, 4, 2), p.param("b", 4, 2, 5))
	},
	"tensordot T": func(p *problem) (*G.Node, error) {
		return G.Tensordot([]int{0}, []int{1}, p.param("a", 3, 4), p.param("b", 5, 3))
	},
	"softmax axis0":      func(p *problem) (*G.Node, error) { return G.SoftMax(p.param("x", 3, 4), 0) },
	"softmax vec":        func(p *problem) (*G.Node, error) { return G.SoftMax(p.param("x", 4)) },
	"logsoftmax default": func(p *problem) (*G.Node, error) { return G.LogSoftMax(p.param("x", 3, 4)) },
	"logsoftmax 0":       func(p *problem) (*G.Node, error) { return G.LogSoftMax(p.param("x", 3, 4), 0) },
	"logsoftmax 3":       func(p *problem) (*G.Node, error) { return G.LogSoftMax(p.param("x", 2, 3, 4), 2) },
	"sparsemax":          func(p *problem) (*G.Node, error) { return G.Sparsemax(p.param("x", 3, 4)) },
	"conv": func(p *problem) (*G.Node, error) {
		return G.Conv2d(p.param("x", 1, 2, 5, 5), p.param("w", 3, 2, 3, 3), tensor.Shape{3, 3}, []int{1, 1}, []int{1, 1}, []int{1, 1})
	},
	"maxpool": func(p *problem) (*G.Node, error) {
		return G.MaxPool2D(p.param("x", 1, 2, 4, 4), tensor.Shape{2, 2}, []int{0, 0}, []int{2, 2})
	},
	"upsample": func(p *problem) (*G.Node, error) { return G.Upsample2D(p.param("x", 1, 2, 3, 3), 2) },
	"batchnorm": func(p *problem) (*G.Node, error) {
		y, _, _, _, err := G.BatchNorm(p.param("x", 2, 2, 3, 3), p.positive("g", 1, 2, 1, 1), p.param("b", 1, 2, 1, 1), 0.9, 1e-5)
		return y, err
	},
	"broadcastdiv": func(p *problem) (*G.Node, error) {
		return G.BroadcastHadamardDiv(p.param("x", 3, 4), p.positive("b", 1, 4), nil, []byte{0})
	},
	"broadcastpow": func(p *problem) (*G.Node, error) {
		return G.BroadcastPow(p.positive("x", 3, 4), p.positive("b", 1, 4), nil, []byte{0})
	},
	"broadcast both": func(p *problem) (*G.Node, error) {
		return G.BroadcastAdd(p.param("x", 3, 1), p.param("b", 1, 4), []byte{1}, []byte{0})
	},
	"broadcast3": func(p *problem) (*G.Node, error) {
		return G.BroadcastAdd(p.param("x", 2, 3, 4), p.param("b", 1, 1, 4), nil, []byte{0, 1})
	},
	"broadcast vec": func(p *problem) (*G.Node, error) {
		return G.BroadcastAdd(p.param("x", 3, 4), p.param("b", 4), nil, []byte{0})
	},
	"gt mask": func(p *problem) (*G.Node, error) {
		x := p.param("x", 3, 4)
		return G.HadamardProd(x, must(G.Gt(x, p.constant(0), true)))
	},
	"sigmoid ce": func(p *problem) (*G.Node, error) {
		// gorgonia removes a node here, see mend.
		return G.BinaryXent(must(G.Sigmoid(p.param("x", 3, 4))), p.input("y", 3, 4))
	},
	"mul scalar both": func(p *problem) (*G.Node, error) { return G.Mul(p.param("s"), p.param("x", 3)) },
	"row x mat":       func(p *problem) (*G.Node, error) { return G.Mul(p.param("s", 1, 3), p.param("x", 3, 2)) },
	"mul vec mat":     func(p *problem) (*G.Node, error) { return G.Mul(p.param("s", 3), p.param("x", 3, 2)) },
	"dims1":           func(p *problem) (*G.Node, error) { return G.Add(p.param("s", 1, 1), p.param("x", 1, 1)) },
	"repeat used": func(p *problem) (*G.Node, error) {
		x := p.param("x", 3, 4)
		return G.BroadcastSub(x, must(G.Reshape(must(G.Max(x, 1)), tensor.Shape{3, 1})), nil, []byte{1})
	},
	"ravel": func(p *problem) (*G.Node, error) { return G.Ravel(p.param("x", 3, 4)) },
}

// everyGraph gives f each graph and each op under a loss of its own.
func everyGraph(f func(name string, build func(p *problem))) {
	for name, build := range graphs {
		f(name, build)
	}
	for name, build := range ops {
		f("op "+name, func(p *problem) { p.loss = p.sumSquares(must(build(p))) })
	}
}
