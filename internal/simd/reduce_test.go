package simd

import (
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/tandem-go/tandem/dtype"
)

func portable(t testing.TB) *Kernels {
	t.Helper()
	k, err := For(Portable)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// wildBytes draws n elements of a type: random bits, and for floats their
// special values, among ordinary ones.
func wildBytes(rng *rand.Rand, ty dtype.Type, n int) []byte {
	b := make([]byte, n*ty.Size())
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	fs := wild(rng, n)
	for i, f := range fs {
		switch ty {
		case dtype.Float32:
			view[float32](b)[i] = f
		case dtype.Float64:
			if rng.IntN(4) > 0 {
				view[float64](b)[i] = float64(f)
			}
		case dtype.Float16:
			view[uint16](b)[i] = f16FromF32(f)
		case dtype.BFloat16:
			view[uint16](b)[i] = bf16FromF32(f)
		}
	}
	return b
}

var reduceNames = [...]string{ReduceSum: "sum", ReduceMin: "min", ReduceMax: "max", ReduceProd: "prod"}

// Without it ranks on different machines could end a collective with different
// bits: every instruction set must agree with the portable kernels, on all
// lengths, at odd addresses, in place, for values of every sort.
func TestReduceBits(t *testing.T) {
	ref := portable(t)
	eachISA(t, func(t *testing.T, k *Kernels) {
		for _, ty := range dtype.All() {
			for op := range ReduceOp(reduceOps) {
				what := reduceNames[op] + " " + ty.String()
				rng := seeded(uint64(op)*16 + uint64(ty))
				for n := range 150 {
					a, b := wildBytes(rng, ty, n), wildBytes(rng, ty, n)
					want := make([]byte, len(a))
					ref.Reduce(op, ty, want, a, b)
					dst := guarded[byte](len(a), rng.IntN(64))
					ga, gb := guardedCopy(a, rng.IntN(64)), guardedCopy(b, rng.IntN(64))
					switch rng.IntN(3) {
					case 0:
						k.Reduce(op, ty, dst.s, ga.s, gb.s)
						requireBits(t, what, dst.s, want)
						requireBits(t, what+" source", ga.s, a)
					case 1:
						k.Reduce(op, ty, ga.s, ga.s, gb.s)
						requireBits(t, what, ga.s, want)
					case 2:
						k.Reduce(op, ty, gb.s, ga.s, gb.s)
						requireBits(t, what, gb.s, want)
					}
					for _, g := range []guard[byte]{dst, ga, gb} {
						g.check(t, what)
					}
				}
			}
		}
	})
}

func combine(op ReduceOp, a, b float64) float64 {
	switch op {
	case ReduceMin:
		return min(a, b)
	case ReduceMax:
		return max(a, b)
	case ReduceProd:
		return a * b
	}
	return a + b
}

// exact is a op b in unlimited precision, or NaN or an infinity.
func exact(op ReduceOp, a, b float64) (*big.Float, float64) {
	r := combine(op, a, b)
	if math.IsNaN(r) || math.IsInf(a, 0) || math.IsInf(b, 0) {
		return nil, r
	}
	z := new(big.Float).SetPrec(2200)
	x, y := new(big.Float).SetFloat64(a), new(big.Float).SetFloat64(b)
	switch op {
	case ReduceSum:
		return z.Add(x, y), r
	case ReduceProd:
		return z.Mul(x, y), r
	}
	return nil, r
}

// Without it the portable reduction, which all others are compared with, could
// be wrong in all of them: its values are checked against exact arithmetic,
// rounded once.
func TestReduceValues(t *testing.T) {
	k := portable(t)
	rng := seeded(7)
	const n = 4000
	for op := range ReduceOp(reduceOps) {
		a, b, dst := wild(rng, n), wild(rng, n), make([]float32, n)
		k.Reduce(op, dtype.Float32, bytesOf(dst), bytesOf(a), bytesOf(b))
		for i := range dst {
			z, r := exact(op, float64(a[i]), float64(b[i]))
			want := float32(r)
			if z != nil {
				want, _ = z.Float32()
			}
			if want == dst[i] || want != want && math.Float32bits(dst[i]) == canonicalNaN {
				continue
			}
			t.Fatalf("%s(%g, %g) = %g, want %g", reduceNames[op], a[i], b[i], dst[i], want)
		}
		h, g, out := make([]uint16, n), make([]uint16, n), make([]uint16, n)
		for i := range h {
			h[i], g[i] = uint16(rng.Uint32()), uint16(rng.Uint32())
		}
		k.Reduce(op, dtype.Float16, bytesOf(out), bytesOf(h), bytesOf(g))
		for i := range out {
			x, y := f32FromF16(h[i]), f32FromF16(g[i])
			_, r := exact(op, float64(x), float64(y)) // exact in float64
			if want := f16Want(r); f32FromF16(out[i]) != want && !(want != want && out[i] == 0x7e00) {
				t.Fatalf("float16 %s(%g, %g) = %g, want %g", reduceNames[op], x, y, f32FromF16(out[i]), want)
			}
		}
	}
}

// f16Want rounds x to the nearest multiple of float16's spacing there.
func f16Want(x float64) float32 {
	if math.IsNaN(x) || math.IsInf(x, 0) || x == 0 {
		return float32(x)
	}
	_, exp := math.Frexp(x)
	unit := math.Ldexp(1, max(exp-11, -24))
	y := math.RoundToEven(x/unit) * unit
	if math.Abs(y) > 65504 {
		y = math.Inf(int(math.Copysign(1, y)))
	}
	return float32(y)
}

// Without it integer reductions could saturate, or compare as the wrong type.
func TestReduceIntegers(t *testing.T) {
	k := portable(t)
	a, b := []int32{math.MaxInt32, -5, 7, -1}, []int32{1, 3, -7, -1}
	for op, want := range [][]int32{
		ReduceSum: {math.MinInt32, -2, 0, -2}, ReduceMin: {1, -5, -7, -1},
		ReduceMax: {math.MaxInt32, 3, 7, -1}, ReduceProd: {math.MaxInt32, -15, -49, 1},
	} {
		got := make([]int32, 4)
		k.Reduce(ReduceOp(op), dtype.Int32, bytesOf(got), bytesOf(a), bytesOf(b))
		requireBits(t, reduceNames[op], got, want)
	}
	u := []byte{200, 255, 0}
	k.Reduce(ReduceMax, dtype.Uint8, u, u, []byte{100, 1, 3})
	requireBits(t, "max uint8", u, []byte{200, 255, 3})
	l := []int64{-1 << 63, 1 << 40}
	k.Reduce(ReduceMin, dtype.Int64, bytesOf(l), bytesOf(l), bytesOf([]int64{0, 1 << 41}))
	requireBits(t, "min int64", l, []int64{-1 << 63, 1 << 40})
}

func bytesOf[T number](s []T) []byte {
	var e T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(e)))
}

// Without it an average could differ between machines, be computed with a
// rounded inverse, or round integers the wrong way.
func TestScaleBytes(t *testing.T) {
	ref := portable(t)
	eachISA(t, func(t *testing.T, k *Kernels) {
		for _, ty := range dtype.All() {
			rng := seeded(uint64(ty))
			for n := range 100 {
				src := wildBytes(rng, ty, n)
				divisor := 1 + rng.IntN(300)
				want := make([]byte, len(src))
				ref.ScaleBytes(ty, want, src, divisor)
				dst := guardedCopy(src, rng.IntN(64))
				k.ScaleBytes(ty, dst.s, dst.s, divisor)
				dst.check(t, ty.String())
				requireBits(t, ty.String(), dst.s, want)
			}
		}
	})
	f := []float32{10, -1, 3e38}
	ref.ScaleBytes(dtype.Float32, bytesOf(f), bytesOf(f), 3)
	requireBits(t, "float32", f, []float32{float32(10) / 3, float32(-1) / 3, float32(3e38) / 3})
	i := []int32{-7, 7}
	ref.ScaleBytes(dtype.Int32, bytesOf(i), bytesOf(i), 2)
	requireBits(t, "int32", i, []int32{-3, 3})
	u := []byte{255, 3}
	ref.ScaleBytes(dtype.Uint8, u, u, 256)
	requireBits(t, "uint8", u, []byte{0, 0})
}
