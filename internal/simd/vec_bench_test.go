package simd

import (
	"testing"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// benchISA runs a benchmark on each instruction set of this machine, by name.
// It reports GB/s of memory read and written, for bytes an iteration, and the
// elements an iteration per ns.
func benchISA(b *testing.B, elems, bytes int, f func(k *Kernels)) {
	b.Helper()
	for _, isa := range Supported() {
		k, err := For(isa)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(isa.String(), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				f(k)
			}
			ns := float64(b.Elapsed().Nanoseconds()) / float64(b.N)
			b.ReportMetric(float64(bytes)/ns, "GB/s")
			b.ReportMetric(float64(elems)/ns, "elem/ns")
		})
	}
}

// benchElems float32 of three slices fit into the second-level cache.
const benchElems = 1 << 14

func BenchmarkVector(b *testing.B) {
	rng := seeded(1)
	x, y := normal(rng, benchElems, 0, 1), normal(rng, benchElems, 0, 1)
	dst := make([]float32, benchElems)
	for _, c := range []struct {
		name    string
		streams int // slices read or written
		f       func(k *Kernels)
	}{
		{"add", 3, func(k *Kernels) { k.Add(dst, x, y) }},
		{"sub", 3, func(k *Kernels) { k.Sub(dst, x, y) }},
		{"mul", 3, func(k *Kernels) { k.Mul(dst, x, y) }},
		{"div", 3, func(k *Kernels) { k.Div(dst, x, y) }},
		{"add-scalar", 2, func(k *Kernels) { k.AddScalar(dst, x, 0.5) }},
		{"sqrt", 2, func(k *Kernels) { k.Sqrt(dst, x) }},
		{"square", 2, func(k *Kernels) { k.Square(dst, x) }},
		{"cube", 2, func(k *Kernels) { k.Cube(dst, x) }},
		{"neg", 2, func(k *Kernels) { k.Neg(dst, x) }},
		{"inverse", 2, func(k *Kernels) { k.Inverse(dst, x) }},
		{"relu", 2, func(k *Kernels) { k.ReLU(dst, x) }},
		{"scale", 2, func(k *Kernels) { k.Scale(dst, x, 0.5) }},
		{"axpy", 3, func(k *Kernels) { k.Axpy(dst, x, 0.5) }},
		{"exp", 2, func(k *Kernels) { k.Exp(dst, x) }},
		{"log", 2, func(k *Kernels) { k.Log(dst, x) }},
		{"tanh", 2, func(k *Kernels) { k.Tanh(dst, x) }},
		{"sigmoid", 2, func(k *Kernels) { k.Sigmoid(dst, x) }},
		{"gelu", 2, func(k *Kernels) { k.GELU(dst, x) }},
		{"gelu-grad", 3, func(k *Kernels) { k.GELUGrad(dst, x, y) }},
		{"max", 1, func(k *Kernels) { k.Max(x) }},
		{"exp-sum", 2, func(k *Kernels) { k.ExpSum(dst, x, 4) }},
		{"cross-entropy", 1, func(k *Kernels) { k.CrossEntropyRow(x) }},
		{"cross-entropy-grad", 2, func(k *Kernels) { k.CrossEntropyGradRow(dst, x, 10, 1, 7) }},
		{"sum-squares", 1, func(k *Kernels) { k.SumSquares(x) }},
		{"dropout", 2, func(k *Kernels) { k.Dropout(dst, x, 42, 0, 0.1) }},
	} {
		b.Run(c.name, func(b *testing.B) { benchISA(b, benchElems, 4*benchElems*c.streams, c.f) })
	}
}

func BenchmarkLayerNorm(b *testing.B) {
	const rows, d = 64, 384
	rng := seeded(1)
	x, dy, y := normal(rng, rows*d, 0, 1), normal(rng, rows*d, 0, 1), make([]float32, rows*d)
	gamma, beta := normal(rng, d, 1, 0.1), normal(rng, d, 0, 1)
	mean, rstd := make([]float32, rows), make([]float32, rows)
	for _, c := range []struct {
		name    string
		streams int
		f       func(k *Kernels)
	}{
		{"forward", 2, func(k *Kernels) { k.LayerNorm(y, x, gamma, beta, mean, rstd, rows, d, 1e-5) }},
		{"grad-input", 3, func(k *Kernels) { k.LayerNormGradInput(y, x, gamma, dy, mean, rstd, rows, d) }},
		{"grad-params", 2, func(k *Kernels) { k.LayerNormGradParams(gamma, beta, x, dy, mean, rstd, rows, d) }},
		{"col-sum", 1, func(k *Kernels) { k.ColSum(beta, x, rows, d) }},
	} {
		b.Run(c.name, func(b *testing.B) { benchISA(b, rows*d, 4*rows*d*c.streams, c.f) })
	}
}

func BenchmarkUpdate(b *testing.B) {
	for _, n := range []int{benchElems, 1 << 22} {
		name := map[bool]string{true: "cache", false: "memory"}[n == benchElems]
		rng := seeded(1)
		p, g, m, v := normal(rng, n, 0, 1), normal(rng, n, 0, 1e-3), make([]float32, n), make([]float32, n)
		h := hyperOf(rng)
		h[device.HyperLR] = 1e-6
		b.Run(name+"/adamw", func(b *testing.B) { benchISA(b, n, 28*n, func(k *Kernels) { k.AdamW(p, g, m, v, h, true) }) })
		b.Run(name+"/sgd", func(b *testing.B) { benchISA(b, n, 20*n, func(k *Kernels) { k.SGD(p, g, m, h, true) }) })
		b.Run(name+"/sum-squares", func(b *testing.B) { benchISA(b, n, 4*n, func(k *Kernels) { k.SumSquares(p) }) })
	}
}

func BenchmarkReduce(b *testing.B) {
	const n = 1 << 16 // bytes of each operand
	for _, ty := range dtype.All() {
		x, y, dst := make([]byte, n), make([]byte, n), make([]byte, n)
		for op := range ReduceOp(reduceOps) {
			b.Run(ty.String()+"/"+reduceNames[op], func(b *testing.B) {
				benchISA(b, n/ty.Size(), 3*n, func(k *Kernels) { k.Reduce(op, ty, dst, x, y) })
			})
		}
	}
}

func BenchmarkConvert(b *testing.B) {
	f := normal(seeded(1), benchElems, 0, 1)
	h := make([]uint16, benchElems)
	b.Run("f32-to-f16", func(b *testing.B) { benchISA(b, benchElems, 6*benchElems, func(k *Kernels) { k.F32ToF16(h, f) }) })
	b.Run("f16-to-f32", func(b *testing.B) { benchISA(b, benchElems, 6*benchElems, func(k *Kernels) { k.F16ToF32(f, h) }) })
	b.Run("f32-to-bf16", func(b *testing.B) { benchISA(b, benchElems, 6*benchElems, func(k *Kernels) { k.F32ToBF16(h, f) }) })
	b.Run("bf16-to-f32", func(b *testing.B) { benchISA(b, benchElems, 6*benchElems, func(k *Kernels) { k.BF16ToF32(f, h) }) })
}
