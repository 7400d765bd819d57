package simd

import (
	"math"
	"testing"

	"github.com/tandem-go/tandem/device"
	"pgregory.net/rapid"
)

// Without it a half-precision value could be rounded the wrong way: every
// float16 and bfloat16 survives the way there and back, and the values half way
// between two of them go to the even one, those beside to the nearer.
func TestHalvesAndTheirNeighbours(t *testing.T) {
	eachISA(t, func(t *testing.T, k *Kernels) {
		for _, c := range []struct {
			name   string
			narrow func([]uint16, []float32)
			widen  func([]float32, []uint16)
			inf    uint16
		}{{"float16", k.F32ToF16, k.F16ToF32, 0x7c00}, {"bfloat16", k.F32ToBF16, k.BF16ToF32, 0x7f80}} {
			all, wide, back := make([]uint16, 1<<16), make([]float32, 1<<16), make([]uint16, 1<<16)
			for i := range all {
				all[i] = uint16(i)
			}
			c.widen(wide, all)
			c.narrow(back, wide)
			for i, h := range back {
				in := all[i]
				nan := in&0x7fff > c.inf // keeps its sign, may become quiet
				if nan && (h&0x7fff <= c.inf || h>>15 != in>>15) || !nan && h != in {
					t.Fatalf("%s %#x (%g) came back as %#x", c.name, in, wide[i], h)
				}
			}
			for i := range int(c.inf) - 1 { // positive, finite, with a finite successor
				lo, hi := float64(wide[i]), float64(wide[i+1])
				mid := float32((lo + hi) / 2)
				in := []float32{mid, math.Nextafter32(mid, float32(lo)), math.Nextafter32(mid, float32(hi)), -mid}
				out := make([]uint16, len(in))
				c.narrow(out, in)
				even := uint16(i + i&1)
				for j, want := range []uint16{even, uint16(i), uint16(i + 1), even | 0x8000} {
					if float64(mid) != (lo+hi)/2 {
						break // bfloat16 denormals have no float32 half way
					}
					if out[j] != want {
						t.Fatalf("%s of %g is %#x, want %#x", c.name, in[j], out[j], want)
					}
				}
			}
		}
	})
}

// Without it float16 could overflow at the wrong value.
func TestF16Overflow(t *testing.T) {
	eachISA(t, func(t *testing.T, k *Kernels) {
		in := []float32{65504, 65519.996, 65520, 65536, 1e38, float32(math.Inf(-1)), 0x1p-25, 0x1.8p-25, -0x1p-26}
		out := make([]uint16, len(in))
		k.F32ToF16(out, in)
		requireBits(t, "float16", out, []uint16{0x7bff, 0x7bff, 0x7c00, 0x7c00, 0x7c00, 0xfc00, 0, 1, 0x8000})
	})
}

// Without it a conversion could differ between instruction sets, for NaNs with
// payloads say, or mistreat the end of a slice.
func TestConversionBits(t *testing.T) {
	ref := portable(t)
	eachISA(t, func(t *testing.T, k *Kernels) {
		rng := seeded(11)
		for round := range 600 {
			n := round % 101
			src := guardedCopy(wild(rng, n), 4*rng.IntN(16))
			half := guarded[uint16](n, 2*rng.IntN(32))
			for i := range half.s {
				half.s[i] = uint16(rng.Uint32())
			}
			wide := guarded[float32](n, 4*rng.IntN(16))
			w16, w32 := make([]uint16, n), make([]float32, n)
			ref.F16ToF32(w32, half.s)
			k.F16ToF32(wide.s, half.s)
			requireBits(t, "float16 to float32", wide.s, w32)
			ref.BF16ToF32(w32, half.s)
			k.BF16ToF32(wide.s, half.s)
			requireBits(t, "bfloat16 to float32", wide.s, w32)
			ref.F32ToF16(w16, src.s)
			k.F32ToF16(half.s, src.s)
			requireBits(t, "float32 to float16", half.s, w16)
			ref.F32ToBF16(w16, src.s)
			k.F32ToBF16(half.s, src.s)
			requireBits(t, "float32 to bfloat16", half.s, w16)
			src.check(t, "conversion")
			half.check(t, "conversion")
			wide.check(t, "conversion")
		}
	})
}

// Without it dropout could keep other elements than device.DropoutKeep says,
// depend on how a sample is cut, or scale wrongly.
func TestDropout(t *testing.T) {
	eachISA(t, func(t *testing.T, k *Kernels) {
		rapid.Check(t, func(r *rapid.T) {
			rng := drawRand(r)
			n, i0 := rapid.IntRange(0, 200).Draw(r, "n"), rapid.IntRange(0, 1<<20).Draw(r, "i0")
			p := rapid.SampledFrom([]float32{0, 0.1, 0.5, 0.999}).Draw(r, "p")
			step, sample := int64(rng.IntN(1000)), int64(rng.IntN(1000))
			x := guardedCopy(normal(rng, n, 0, 1), drawOff.Draw(r, "x"))
			y := guarded[float32](n, drawOff.Draw(r, "y"))
			k.Dropout(y.s, x.s, device.DropoutKey(42, step, 7, sample), i0, p)
			x.check(t, "dropout")
			y.check(t, "dropout")
			for j, v := range y.s {
				var want float32
				if device.DropoutKeep(42, step, 7, sample, i0+j, p) {
					want = x.s[j] / (1 - p)
				}
				if v != want {
					r.Fatalf("element %d of %d is %g, want %g", j, n, v, want)
				}
			}
		})
	})
}
