package simd

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"pgregory.net/rapid"
)

// eachISA runs f for the kernels of every instruction set: those that this
// machine has, and AVX-512 by interpretation.
func eachISA(t *testing.T, f func(t *testing.T, k *Kernels)) {
	t.Helper()
	for name, k := range interpretedKernels(t) {
		if k.isa == AVX512 {
			t.Run(name, func(t *testing.T) { f(t, k) })
		}
	}
	for _, isa := range Supported() {
		k, err := For(isa)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(isa.String(), func(t *testing.T) { f(t, k) })
	}
}

// failer is a test of package testing or of rapid.
type failer interface {
	Helper()
	Fatalf(format string, args ...any)
}

// number is what kernels work on.
type number interface {
	float32 | float64 | uint16 | uint8 | int32 | int64
}

// guard is a slice between two zones that a kernel must not touch.
type guard[T number] struct {
	s   []T // the slice itself, poisoned at first
	all []byte
	lo  int // bytes before s
}

const guardBytes, poison = 256, 0xa5

// guarded makes a slice of n elements that begins off bytes behind a multiple
// of 64. It is filled with poison, as are 256 bytes before and behind it.
func guarded[T number](n, off int) guard[T] {
	var t T
	size := n * int(unsafe.Sizeof(t))
	all := make([]byte, size+2*guardBytes+128)
	for i := range all {
		all[i] = poison
	}
	lo := guardBytes + 64 - int(uintptr(unsafe.Pointer(&all[0]))%64) + off
	s := all[lo : lo+size+1]
	return guard[T]{s: unsafe.Slice((*T)(unsafe.Pointer(&s[0])), n), all: all, lo: lo}
}

// guardedCopy is guarded, filled with src.
func guardedCopy[T number](src []T, off int) guard[T] {
	g := guarded[T](len(src), off)
	copy(g.s, src)
	return g
}

// check fails if something wrote outside the slice.
func (g guard[T]) check(t failer, what string) {
	t.Helper()
	var e T
	hi := g.lo + len(g.s)*int(unsafe.Sizeof(e))
	for i, b := range g.all {
		if (i < g.lo || i >= hi) && b != poison {
			t.Fatalf("%s wrote %d bytes before or %d bytes behind its %d elements", what, g.lo-i, i-hi, len(g.s))
		}
	}
}

// ulps is the distance of got from want in units in the last place of float32
// at want. Both NaN, or both the same infinity, is 0.
func ulps(got float32, want float64) float64 {
	switch w := float32(want); {
	case math.IsNaN(want) || got != got:
		if math.IsNaN(want) && got != got {
			return 0
		}
		return math.Inf(1)
	case math.IsInf(float64(w), 0) || math.IsInf(float64(got), 0):
		if w == got {
			return 0
		}
		return math.Inf(1)
	}
	_, exp := math.Frexp(want)
	return math.Abs(float64(got)-want) / math.Ldexp(1, max(exp-24, -149))
}

// sweep calls f with batches of arguments that cover all float32 bit patterns
// at a prime stride.
func sweep(stride uint64, f func(xs []float32)) {
	batch := make([]float32, 0, 1<<12)
	for b := uint64(0); b < 1<<32; b += stride {
		batch = append(batch, math.Float32frombits(uint32(b)))
		if len(batch) == cap(batch) {
			f(batch)
			batch = batch[:0]
		}
	}
	f(batch)
}

// wild draws float32 values of every sort: ordinary, huge, tiny, denormal,
// zeros, infinities and NaNs with payloads.
func wild(rng *rand.Rand, n int) []float32 {
	s := make([]float32, n)
	for i := range s {
		switch rng.IntN(8) {
		case 0:
			s[i] = math.Float32frombits(rng.Uint32()) // any bits
		case 1:
			s[i] = math.Float32frombits(rng.Uint32() & 0x807fffff) // denormals
		case 2:
			specials := []uint32{0, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001,
				0xffc12345, 0x7f7fffff, 0xff7fffff, 1, 0x00800000, 0x3f800000}
			s[i] = math.Float32frombits(specials[rng.IntN(len(specials))])
		default:
			s[i] = float32(rng.NormFloat64())
		}
	}
	return s
}

// normal draws n values of a normal distribution.
func normal(rng *rand.Rand, n int, mean, dev float64) []float32 {
	s := make([]float32, n)
	for i := range s {
		s[i] = float32(mean + dev*rng.NormFloat64())
	}
	return s
}

func seeded(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 1)) }

// drawRand draws a random source for the contents of slices; rapid draws their
// shapes.
func drawRand(r *rapid.T) *rand.Rand { return seeded(rapid.Uint64().Draw(r, "seed")) }

// offsets of a float32 slice from a multiple of 64 bytes.
var drawOff = rapid.Map(rapid.IntRange(0, 15), func(i int) int { return 4 * i })

// requireBits fails where got and want differ in a bit.
func requireBits[T number](t failer, what string, got, want []T) {
	t.Helper()
	for i := range want {
		if bitsOf(got[i]) != bitsOf(want[i]) {
			t.Fatalf("%s: element %d of %d is %v (%#x), want %v (%#x)", what, i, len(want),
				got[i], bitsOf(got[i]), want[i], bitsOf(want[i]))
		}
	}
}

func bitsOf[T number](x T) uint64 {
	switch v := any(x).(type) {
	case float32:
		return uint64(math.Float32bits(v))
	case float64:
		return math.Float64bits(v)
	case uint16:
		return uint64(v)
	case uint8:
		return uint64(v)
	case int32:
		return uint64(uint32(v))
	case int64:
		return uint64(v)
	}
	panic(fmt.Sprintf("bitsOf: %T", x))
}
