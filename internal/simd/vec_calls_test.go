package simd

import (
	"maps"
	"testing"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// vecCalls is one call of every vector kernel, on vectors of n elements or a few
// rows of them.
func vecCalls(k *Kernels, n int) map[string]func() {
	const rows = 4
	rng := seeded(uint64(n))
	x, y, z, w := normal(rng, rows*n, 0, 1), normal(rng, rows*n, 0, 1), make([]float32, rows*n), make([]float32, rows*n)
	gamma, beta, mean, rstd := normal(rng, n, 1, 0.1), normal(rng, n, 0, 1), normal(rng, rows, 0, 1), normal(rng, rows, 1, 0.1)
	h, half, parts := hyperOf(rng), make([]uint16, n), make([]float64, 1)
	calls := map[string]func(){
		"add-scalar":  func() { k.AddScalar(z[:n], x, 2) },
		"scale":       func() { k.Scale(z[:n], x, 2) },
		"axpy":        func() { k.Axpy(z[:n], x, 2) },
		"layer norm":  func() { k.LayerNorm(z, x, gamma, beta, mean, rstd, rows, n, 1e-5) },
		"grad input":  func() { k.LayerNormGradInput(z, x, gamma, y, mean, rstd, rows, n) },
		"grad params": func() { k.LayerNormGradParams(gamma, beta, x, y, mean, rstd, rows, n) },
		"col-sum":     func() { k.ColSum(beta, x, rows, n) },
		"max":         func() { k.Max(x[:n]) },
		"exp-sum":     func() { k.ExpSum(z[:n], x, 1) },
		"entropy":     func() { k.CrossEntropyRow(x[:n]) },
		"adamw":       func() { k.AdamW(z[:n], x, w, w, h, true) },
		"sgd":         func() { k.SGD(z[:n], x, w, h, true) },
		"squares":     func() { k.SumSquaresChunks(parts, x[:n]) },
		"norm":        func() { k.SumSquares(x[:n]) },
		"f16":         func() { k.F32ToF16(half, x); k.F16ToF32(z[:n], half) },
		"bf16":        func() { k.F32ToBF16(half, x); k.BF16ToF32(z[:n], half) },
		"dropout":     func() { k.Dropout(z[:n], x, device.DropoutKey(1, 2, 3, 4), 5, 0.5) },
	}
	if n > 0 {
		calls["entropy grad"] = func() { k.CrossEntropyGradRow(z[:n], x, 3, 1, n-1) }
	}
	for name, f := range map[string]unaryFunc{"exp": k.Exp, "log": k.Log, "tanh": k.Tanh, "sigmoid": k.Sigmoid, "sqrt": k.Sqrt,
		"square": k.Square, "cube": k.Cube, "neg": k.Neg, "inverse": k.Inverse, "relu": k.ReLU, "gelu": k.GELU} {
		calls[name] = func() { f(z[:n], x) }
	}
	for name, f := range map[string]binaryFunc{"add": k.Add, "sub": k.Sub, "mul": k.Mul, "div": k.Div, "gelu grad": k.GELUGrad} {
		calls[name] = func() { f(z[:n], x, y) }
	}
	maps.Copy(calls, reduceCalls(k, n))
	return calls
}

func reduceCalls(k *Kernels, n int) map[string]func() {
	calls := map[string]func(){}
	for _, ty := range dtype.All() {
		a, b := make([]byte, n*ty.Size()), make([]byte, n*ty.Size())
		for op := range ReduceOp(reduceOps) {
			calls[reduceNames[op]+" "+ty.String()] = func() { k.Reduce(op, ty, a, a, b) }
		}
		calls["average "+ty.String()] = func() { k.ScaleBytes(ty, a, a, 3) }
	}
	return calls
}

// Without it a kernel could allocate on every call: a steady training step must
// make no garbage.
func TestKernelsAllocateNothing(t *testing.T) {
	for _, isa := range Supported() {
		k, err := For(isa)
		if err != nil {
			t.Fatal(err)
		}
		for name, f := range vecCalls(k, 99) {
			if got := testing.AllocsPerRun(10, f); got != 0 {
				t.Errorf("%v: %s allocates %v times a call", isa, name, got)
			}
		}
	}
}
