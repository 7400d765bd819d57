package simd

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/tandem-go/tandem/device"
	"pgregory.net/rapid"
)

func hyperOf(rng *rand.Rand) []float32 {
	h := make([]float32, device.HyperLen)
	step := 1 + rng.IntN(1000)
	h[device.HyperLR] = float32(math.Pow(10, -4*rng.Float64()))
	h[device.HyperBeta1] = float32(0.8 + 0.19*rng.Float64())
	h[device.HyperBeta2] = float32(0.9 + 0.099*rng.Float64())
	h[device.HyperEps] = 1e-8
	h[device.HyperDecay] = float32(0.2 * rng.Float64())
	h[device.HyperBias1] = float32(1 - math.Pow(float64(h[device.HyperBeta1]), float64(step)))
	h[device.HyperBias2] = float32(1 - math.Pow(float64(h[device.HyperBeta2]), float64(step)))
	h[device.HyperScale] = float32(rng.Float64())
	return h
}

// Without it AdamW could differ from its definition: one step on each
// instruction set is compared with float64.
func TestAdamWValues(t *testing.T) {
	eachISA(t, func(t *testing.T, k *Kernels) {
		rapid.Check(t, func(r *rapid.T) {
			rng := drawRand(r)
			n, decay := rapid.IntRange(0, 120).Draw(r, "n"), rapid.Bool().Draw(r, "decay")
			h := hyperOf(rng)
			f := func(i int) float64 { return float64(h[i]) }
			p, g, m, v := normal(rng, n, 0, 1), normal(rng, n, 0, 1), normal(rng, n, 0, 1), normal(rng, n, 0, 1)
			for i := range v {
				v[i] = v[i]*v[i] + 1e-4
			}
			gp, gg, gm, gv := guardedCopy(p, drawOff.Draw(r, "p")), guardedCopy(g, drawOff.Draw(r, "g")), guardedCopy(m, 0), guardedCopy(v, 8)
			k.AdamW(gp.s, gg.s, gm.s, gv.s, h, decay)
			for _, x := range []guard[float32]{gp, gg, gm, gv} {
				x.check(t, "adamw")
			}
			for i := range n {
				s := float64(g[i]) * f(device.HyperScale)
				m1 := f(device.HyperBeta1)*float64(m[i]) + (1-f(device.HyperBeta1))*s
				v1 := f(device.HyperBeta2)*float64(v[i]) + (1-f(device.HyperBeta2))*s*s
				w := float64(p[i])
				if decay {
					w *= 1 - f(device.HyperLR)*f(device.HyperDecay)
				}
				w -= f(device.HyperLR) * m1 / f(device.HyperBias1) / (math.Sqrt(v1/f(device.HyperBias2)) + f(device.HyperEps))
				for j, pair := range [][2]float64{{float64(gm.s[i]), m1}, {float64(gv.s[i]), v1}, {float64(gp.s[i]), w}} {
					if !(math.Abs(pair[0]-pair[1]) <= 2e-6*max(1, math.Abs(pair[1]))) {
						r.Fatalf("%s of element %d of %d is %g, want %g", []string{"m", "v", "param"}[j], i, n, pair[0], pair[1])
					}
				}
			}
		})
	})
}

// Without it SGD could ignore momentum, decay or the gradient's scale.
func TestSGDValues(t *testing.T) {
	eachISA(t, func(t *testing.T, k *Kernels) {
		h := make([]float32, device.HyperLen)
		h[device.HyperLR], h[device.HyperBeta1], h[device.HyperScale], h[device.HyperDecay] = 0.5, 0.25, 2, 0.125
		p, g, m := []float32{8, 8}, []float32{3, 3}, []float32{4, 4}
		k.SGD(p, g, m, h, true)
		requireBits(t, "momentum", m, []float32{8, 8}) // 0.25·4 + (2·3 + 0.125·8)
		requireBits(t, "param", p, []float32{4, 4})
		k.SGD(p, g, m, h, false)
		requireBits(t, "momentum without decay", m, []float32{8, 8}) // 0.25·8 + 2·3
		requireBits(t, "param without decay", p, []float32{0, 0})
	})
}

// Without it ranks on different machines would drift apart: updates must give
// the same bits on every instruction set, on all lengths, whatever the values,
// and however the work is split.
func TestUpdateBits(t *testing.T) {
	ref := portable(t)
	eachISA(t, func(t *testing.T, k *Kernels) {
		rng := seeded(3)
		for round := range 400 {
			n, h, decay := round%101, hyperOf(rng), rng.IntN(2) == 0
			draw := func() []float32 {
				if round%2 == 0 {
					return wild(rng, n)
				}
				return normal(rng, n, 0, 1)
			}
			p, g, m, v := draw(), draw(), draw(), draw()
			want := [][]float32{clone(p), clone(m), clone(v)}
			ref.AdamW(want[0], g, want[1], want[2], h, decay)
			cut := rng.IntN(n + 1)
			got := []guard[float32]{guardedCopy(p, 4*rng.IntN(16)), guardedCopy(m, 0), guardedCopy(v, 4)}
			k.AdamW(got[0].s[:cut], g[:cut], got[1].s[:cut], got[2].s[:cut], h, decay)
			k.AdamW(got[0].s[cut:], g[cut:], got[1].s[cut:], got[2].s[cut:], h, decay)
			for i, name := range []string{"adamw param", "adamw m", "adamw v"} {
				requireBits(t, name, got[i].s, want[i])
				got[i].check(t, name)
			}
			want = [][]float32{clone(p), clone(m)}
			ref.SGD(want[0], g, want[1], h, decay)
			k.SGD(p[:cut], g[:cut], m[:cut], h, decay)
			k.SGD(p[cut:], g[cut:], m[cut:], h, decay)
			requireBits(t, "sgd param", p, want[0])
			requireBits(t, "sgd momentum", m, want[1])
			ref.Scale(want[0], g, h[0])
			k.Scale(p, g, h[0])
			requireBits(t, "scale", p, want[0])
		}
	})
}

func clone(s []float32) []float32 { return append([]float32(nil), s...) }

// Without it the norm could depend on the machine or on the number of threads:
// same bits on every instruction set, and for chunks summed one by one.
func TestSumSquares(t *testing.T) {
	ref := portable(t)
	eachISA(t, func(t *testing.T, k *Kernels) {
		rng := seeded(5)
		for _, n := range append(upTo(130), SumSquaresChunk-1, SumSquaresChunk, SumSquaresChunk+1, 3*SumSquaresChunk+77) {
			for _, x := range [][]float32{normal(rng, n, 0, 1), wild(rng, n)} {
				g := guardedCopy(x, 4*rng.IntN(16))
				got, want := k.SumSquares(g.s), ref.SumSquares(x)
				requireBits(t, "sum of squares", []float64{got}, []float64{want})
				parts := make([]float64, (n+SumSquaresChunk-1)/SumSquaresChunk)
				k.SumSquaresChunks(parts, g.s)
				var sum float64
				for _, p := range parts {
					sum += p
				}
				requireBits(t, "sum of chunks", []float64{canonical64(sum)}, []float64{want})
			}
			var exact float64
			x := normal(rng, n, 0, 1)
			for _, v := range x {
				exact += float64(v) * float64(v)
			}
			if got := k.SumSquares(x); math.Abs(got-exact) > 1e-12*exact {
				t.Fatalf("sum of squares of %d is %g, want %g", n, got, exact)
			}
		}
	})
}

func upTo(n int) []int {
	s := make([]int, n)
	for i := range s {
		s[i] = i
	}
	return s
}
