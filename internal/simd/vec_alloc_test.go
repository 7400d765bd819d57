package simd

import (
	"testing"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// Without it a kernel could allocate on every call: a steady training step must
// make no garbage.
func TestKernelsAllocateNothing(t *testing.T) {
	const n, rows, d = 96, 4, 24
	rng := seeded(1)
	x, y, z, w := normal(rng, n, 0, 1), normal(rng, n, 0, 1), make([]float32, n), make([]float32, n)
	h, half := hyperOf(rng), make([]uint16, n)
	parts := make([]float64, 1)
	a, b := make([]byte, 99*8), make([]byte, 99*8)
	eachISA(t, func(t *testing.T, k *Kernels) {
		calls := map[string]func(){
			"scale":       func() { k.Scale(z, x, 2) },
			"gelu-grad":   func() { k.GELUGrad(z, x, y) },
			"layer norm":  func() { k.LayerNorm(z, x, y[:d], y[d:2*d], w[:rows], w[rows:2*rows], rows, d, 1e-5) },
			"grad input":  func() { k.LayerNormGradInput(z, x, y[:d], y, w[:rows], w[rows:2*rows], rows, d) },
			"grad params": func() { k.LayerNormGradParams(z[:d], z[d:2*d], x, y, w[:rows], w[rows:2*rows], rows, d) },
			"col-sum":     func() { k.ColSum(z[:d], x, rows, d) },
			"max":         func() { k.Max(x) },
			"exp-sum":     func() { k.ExpSum(z, x, 1) },
			"entropy":     func() { k.CrossEntropyGradRow(z, x, k.CrossEntropyRow(x), 1, 3) },
			"adamw":       func() { k.AdamW(z, x, w, w, h, true) },
			"sgd":         func() { k.SGD(z, x, w, h, false) },
			"squares":     func() { k.SumSquaresChunks(parts, x); k.SumSquares(x) },
			"halves":      func() { k.F32ToF16(half, x); k.F16ToF32(z, half); k.F32ToBF16(half, x); k.BF16ToF32(z, half) },
			"dropout":     func() { k.Dropout(z, x, device.DropoutKey(1, 2, 3, 4), 5, 0.5) },
		}
		for _, ty := range dtype.All() {
			for op := range ReduceOp(reduceOps) {
				calls[reduceNames[op]+" "+ty.String()] = func() { k.Reduce(op, ty, a, a, b) }
			}
			calls["scale "+ty.String()] = func() { k.ScaleBytes(ty, a, a, 3) }
		}
		for name, f := range calls {
			if got := testing.AllocsPerRun(10, f); got != 0 {
				t.Errorf("%s allocates %v times a call", name, got)
			}
		}
	})
}
