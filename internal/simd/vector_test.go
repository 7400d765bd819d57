package simd

import (
	"math"
	"testing"

	"pgregory.net/rapid"
)

// unaryCase is a function of one element, its reference in float64, and how
// far from it a kernel may be: tol ulps plus abs.
type unaryCase struct {
	name     string
	kernel   func(k *Kernels) unaryFunc
	want     func(x float64) float64
	tol, abs float64
}

func unaryCases() []unaryCase {
	return []unaryCase{
		{"exp", func(k *Kernels) unaryFunc { return k.Exp }, math.Exp, 1, 0},
		{"log", func(k *Kernels) unaryFunc { return k.Log }, math.Log, 1, 0},
		{"tanh", func(k *Kernels) unaryFunc { return k.Tanh }, math.Tanh, 3, 0},
		{"sigmoid", func(k *Kernels) unaryFunc { return k.Sigmoid }, func(x float64) float64 { return 1 / (1 + math.Exp(-x)) }, 3, 0},
		{"sqrt", func(k *Kernels) unaryFunc { return k.Sqrt }, math.Sqrt, 0.5, 0},
		{"square", func(k *Kernels) unaryFunc { return k.Square }, func(x float64) float64 { return x * x }, 0.5, 0},
		{"cube", func(k *Kernels) unaryFunc { return k.Cube }, cubeWant, 1.5, 0x1p-148},
		{"neg", func(k *Kernels) unaryFunc { return k.Neg }, func(x float64) float64 { return -x }, 0, 0},
		{"inverse", func(k *Kernels) unaryFunc { return k.Inverse }, func(x float64) float64 { return 1 / x }, 0.5, 0},
		{"relu", func(k *Kernels) unaryFunc { return k.ReLU }, func(x float64) float64 { return math.Max(x, 0) }, 0, 0},
		{"gelu", func(k *Kernels) unaryFunc { return k.GELU }, geluWant, 4, 1e-7},
	}
}

// cubeWant rounds the square to float32's range, where the kernels overflow or
// underflow.
func cubeWant(x float64) float64 {
	if q := float64(float32(x * x)); math.IsInf(q, 0) || q < 0x1p-126 {
		return q * x
	}
	return x * x * x
}

func geluWant(x float64) float64 {
	if math.IsInf(x, -1) {
		return math.NaN()
	}
	u := math.Sqrt(2/math.Pi) * (x + 0.044715*x*x*x)
	return x / (1 + math.Exp(-2*u))
}

func geluSlopeWant(x float64) float64 {
	x = max(-20, min(20, x))
	c := math.Sqrt(2 / math.Pi)
	s := 1 / (1 + math.Exp(-2*c*(x+0.044715*x*x*x)))
	return s + x*s*(1-s)*2*c*(1+3*0.044715*x*x)
}

// Without it a polynomial, a range reduction or the treatment of a special
// value could be off for some arguments: all sorts of float32 are tried, and
// the largest error is logged.
func TestUnaryOverAllFloats(t *testing.T) {
	eachISA(t, func(t *testing.T, k *Kernels) {
		for _, c := range unaryCases() {
			var worst, worstAt, worstAbs float64
			ys := make([]float32, 1<<12)
			stride := uint64(1499)
			if k.isa == AVX512 { // by interpretation, most likely
				stride = 40009
			}
			sweep(stride, func(xs []float32) {
				c.kernel(k)(ys[:len(xs)], xs)
				for i, x := range xs {
					want := c.want(float64(x))
					u := ulps(ys[i], want)
					if u > c.tol && !(math.Abs(float64(ys[i])-want) <= c.abs) {
						t.Fatalf("%s(%g = %#x) = %g, want %g: %.3g ulp", c.name, x, math.Float32bits(x), ys[i], want, u)
					}
					if u > worst && math.Abs(float64(ys[i])-want) > c.abs {
						worst, worstAt = u, float64(x)
					}
					if a := math.Abs(float64(ys[i]) - want); a > worstAbs && !math.IsInf(a, 0) && math.Abs(want) < 1 {
						worstAbs = a
					}
				}
			})
			t.Logf("%s: at most %.3f ulp, at %g; absolute error below 1: %.3g", c.name, worst, worstAt, worstAbs)
		}
	})
}

// Without it a special value could slip through the stride of the sweep.
func TestUnarySpecials(t *testing.T) {
	inf, nan := math.Inf(1), math.NaN()
	xs := []float64{0, math.Copysign(0, -1), inf, -inf, nan, 1, -1, 0x1p-149, -0x1p-149, 0x1p-126,
		math.MaxFloat32, -math.MaxFloat32, 88.72283, 88.72284, 88.8, 89, 89.5, -87.33654, -87.4, -103.9, -104, -104.1, -150, 1e10, -1e10}
	eachISA(t, func(t *testing.T, k *Kernels) {
		for _, c := range unaryCases() {
			for _, x := range xs {
				src, dst := []float32{float32(x)}, []float32{float32(nan)}
				c.kernel(k)(dst, src)
				want := c.want(float64(float32(x)))
				if u := ulps(dst[0], want); u > c.tol && !(math.Abs(float64(dst[0])-want) <= c.abs) {
					t.Errorf("%s(%g) = %g, want %g", c.name, x, dst[0], want)
				}
				if x == 0 && want == 0 && c.name != "relu" && math.Signbit(float64(dst[0])) != math.Signbit(want) {
					t.Errorf("%s(%g) = %g has the wrong sign", c.name, x, dst[0])
				}
			}
		}
	})
}

// Without it a kernel could mistreat the last elements of a slice, write
// outside it, need alignment, leave elements unwritten or fail in place.
func TestUnaryShapes(t *testing.T) {
	eachISA(t, func(t *testing.T, k *Kernels) {
		for _, c := range unaryCases() {
			rapid.Check(t, func(r *rapid.T) {
				rng := drawRand(r)
				n := rapid.IntRange(0, 200).Draw(r, "n")
				x := guardedCopy(normal(rng, n, 0, 3), drawOff.Draw(r, "x"))
				y := guarded[float32](n, drawOff.Draw(r, "y"))
				if rapid.Bool().Draw(r, "in place") {
					copy(y.s, x.s)
					c.kernel(k)(y.s, y.s)
				} else {
					c.kernel(k)(y.s, x.s)
				}
				x.check(t, c.name)
				y.check(t, c.name)
				for i, v := range x.s {
					want := c.want(float64(v))
					if u := ulps(y.s[i], want); u > c.tol && !(math.Abs(float64(y.s[i])-want) <= c.abs) {
						r.Fatalf("%s: element %d of %d: f(%g) = %g, want %g", c.name, i, n, v, y.s[i], want)
					}
				}
			})
		}
	})
}

// Without it Add could subtract, operands could be swapped, or tails be wrong.
func TestBinaryShapes(t *testing.T) {
	for _, c := range []struct {
		name   string
		kernel func(k *Kernels) binaryFunc
		want   func(a, b float64) float64
		tol    float64
		abs    float64
	}{
		{"add", func(k *Kernels) binaryFunc { return k.Add }, func(a, b float64) float64 { return a + b }, 0.5, 0},
		{"sub", func(k *Kernels) binaryFunc { return k.Sub }, func(a, b float64) float64 { return a - b }, 0.5, 0},
		{"mul", func(k *Kernels) binaryFunc { return k.Mul }, func(a, b float64) float64 { return a * b }, 0.5, 0},
		{"div", func(k *Kernels) binaryFunc { return k.Div }, func(a, b float64) float64 { return a / b }, 0.501, 0},
		{"gelu-grad", func(k *Kernels) binaryFunc { return k.GELUGrad }, func(x, dy float64) float64 { return dy * geluSlopeWant(x) }, 0, 2e-6},
	} {
		eachISA(t, func(t *testing.T, k *Kernels) {
			rapid.Check(t, func(r *rapid.T) {
				rng := drawRand(r)
				n := rapid.IntRange(0, 200).Draw(r, "n")
				as, bs := normal(rng, n, 0, 3), normal(rng, n, 0, 1)
				a, b := guardedCopy(as, drawOff.Draw(r, "a")), guardedCopy(bs, drawOff.Draw(r, "b"))
				dst := guarded[float32](n, drawOff.Draw(r, "dst"))
				switch rapid.IntRange(0, 2).Draw(r, "in place") {
				case 0:
					c.kernel(k)(dst.s, a.s, b.s)
				case 1:
					c.kernel(k)(a.s, a.s, b.s)
					copy(dst.s, a.s)
				case 2:
					c.kernel(k)(b.s, a.s, b.s)
					copy(dst.s, b.s)
				}
				for _, g := range []guard[float32]{a, b, dst} {
					g.check(t, c.name)
				}
				for i, v := range dst.s {
					want := c.want(float64(as[i]), float64(bs[i]))
					if !(ulps(v, want) <= c.tol || math.Abs(float64(v)-want) <= c.abs*max(1, math.Abs(float64(bs[i])))) {
						r.Fatalf("%s: element %d of %d: f(%g, %g) = %g, want %g", c.name, i, n, as[i], bs[i], v, want)
					}
				}
			})
		})
	}
}

// Without it an instruction set could treat NaNs, infinities or denormals in its
// own way.
func TestBinarySpecials(t *testing.T) {
	ref := portable(t)
	eachISA(t, func(t *testing.T, k *Kernels) {
		rng := seeded(9)
		for n := range 100 {
			a, b, got, want := wild(rng, n), wild(rng, n), make([]float32, n), make([]float32, n)
			for i, f := range [][2]binaryFunc{{k.Add, ref.Add}, {k.Sub, ref.Sub}, {k.Mul, ref.Mul}, {k.Div, ref.Div}} {
				f[0](got, a, b)
				f[1](want, a, b)
				for j := range want {
					if got[j] != want[j] && (got[j] == got[j] || want[j] == want[j]) {
						t.Fatalf("operation %d on %g and %g gives %g, portable %g", i, a[j], b[j], got[j], want[j])
					}
				}
			}
		}
	})
}

// Without it a scalar could be applied to whole vectors only, or Axpy overwrite.
func TestScalarShapes(t *testing.T) {
	for _, c := range []struct {
		name   string
		kernel func(k *Kernels) scalarFunc
		want   func(dst, a, s float64) float64
	}{
		{"add-scalar", func(k *Kernels) scalarFunc { return k.AddScalar }, func(_, a, s float64) float64 { return a + s }},
		{"scale", func(k *Kernels) scalarFunc { return k.Scale }, func(_, a, s float64) float64 { return a * s }},
		{"axpy", func(k *Kernels) scalarFunc { return k.Axpy }, func(dst, a, s float64) float64 { return dst + a*s }},
	} {
		eachISA(t, func(t *testing.T, k *Kernels) {
			rapid.Check(t, func(r *rapid.T) {
				rng := drawRand(r)
				n, s := rapid.IntRange(0, 200).Draw(r, "n"), float32(rng.NormFloat64())
				as, ds := normal(rng, n, 0, 1), normal(rng, n, 0, 1)
				a, dst := guardedCopy(as, drawOff.Draw(r, "a")), guardedCopy(ds, drawOff.Draw(r, "dst"))
				c.kernel(k)(dst.s, a.s, s)
				a.check(t, c.name)
				dst.check(t, c.name)
				for i, v := range dst.s {
					want := c.want(float64(ds[i]), float64(as[i]), float64(s))
					if !(math.Abs(float64(v)-want) <= 1.5e-7*(math.Abs(want)+math.Abs(float64(as[i]*s))+math.Abs(float64(ds[i])))) {
						r.Fatalf("%s: element %d of %d is %g, want %g", c.name, i, n, v, want)
					}
				}
			})
		})
	}
}

// Without it the largest element could be missed in a tail, or a NaN or a row of
// −Inf come out as something else.
func TestMax(t *testing.T) {
	eachISA(t, func(t *testing.T, k *Kernels) {
		rapid.Check(t, func(r *rapid.T) {
			rng := drawRand(r)
			n := rapid.IntRange(0, 300).Draw(r, "n")
			xs := normal(rng, n, float64(rapid.IntRange(-100, 100).Draw(r, "mean")), 1)
			if rapid.Bool().Draw(r, "wild") {
				xs = wild(rng, n)
			}
			x := guardedCopy(xs, drawOff.Draw(r, "off"))
			want := float32(math.Inf(-1))
			for _, v := range xs {
				if v > want {
					want = v
				}
			}
			if got := k.Max(x.s); got != want {
				r.Fatalf("max of %d elements is %g, want %g", n, got, want)
			}
		})
	})
}

// Without it a softmax could lose a tail, or its sum differ from what it wrote.
func TestExpSum(t *testing.T) {
	eachISA(t, func(t *testing.T, k *Kernels) {
		rapid.Check(t, func(r *rapid.T) {
			rng := drawRand(r)
			n := rapid.IntRange(1, 300).Draw(r, "n")
			x := guardedCopy(normal(rng, n, 0, math.Exp(4*rng.Float64())), drawOff.Draw(r, "x"))
			if n > 3 {
				x.s[rng.IntN(n)] = float32(math.Inf(-1)) // a masked position
			}
			y := guarded[float32](n, drawOff.Draw(r, "y"))
			m := k.Max(x.s)
			sum := float64(k.ExpSum(y.s, x.s, m))
			y.check(t, "exp-sum")
			var want float64
			for i, v := range x.s {
				e := math.Exp(float64(v - m))
				if u := ulps(y.s[i], e); u > 2 {
					r.Fatalf("element %d of %d: exp(%g − %g) = %g, want %g", i, n, v, m, y.s[i], e)
				}
				want += e
			}
			if math.Abs(sum-want) > 1e-6*want {
				r.Fatalf("sum of %d is %g, want %g", n, sum, want)
			}
		})
	})
}

// Without it the loss or its gradient could be wrong for rows of some length,
// for logits far from zero, or for a target in the tail.
func TestCrossEntropyRow(t *testing.T) {
	eachISA(t, func(t *testing.T, k *Kernels) {
		rapid.Check(t, func(r *rapid.T) {
			rng := drawRand(r)
			n := rapid.IntRange(1, 400).Draw(r, "n")
			shift := float64(rapid.IntRange(-1000, 1000).Draw(r, "shift"))
			x := guardedCopy(normal(rng, n, shift, 3), drawOff.Draw(r, "x"))
			m := float64(k.Max(x.s))
			var sum float64
			for _, v := range x.s {
				sum += math.Exp(float64(v) - m)
			}
			want := m + math.Log(sum)
			lse := k.CrossEntropyRow(x.s)
			if math.Abs(float64(lse)-want) > 4e-7*max(1, math.Abs(want)) {
				r.Fatalf("log-sum-exp of %d is %g, want %g", n, lse, want)
			}
			target, scale := rapid.IntRange(-1, n-1).Draw(r, "target"), float32(rng.Float64())
			y := guarded[float32](n, drawOff.Draw(r, "y"))
			k.CrossEntropyGradRow(y.s, x.s, lse, scale, target)
			y.check(t, "cross-entropy-grad")
			for i, v := range x.s {
				g := math.Exp(float64(v) - float64(lse))
				if i == target {
					g--
				}
				if target < 0 {
					g = 0
				}
				if math.Abs(float64(y.s[i])-float64(scale)*g) > 4e-7 {
					r.Fatalf("gradient %d of %d (target %d) is %g, want %g", i, n, target, y.s[i], float64(scale)*g)
				}
			}
		})
	})
}

// Without it columns could be lost when they are dealt out among threads, or
// the bits depend on how.
func TestColSum(t *testing.T) {
	eachISA(t, func(t *testing.T, k *Kernels) {
		rapid.Check(t, func(r *rapid.T) {
			rng := drawRand(r)
			rows, cols := rapid.IntRange(0, 20).Draw(r, "rows"), rapid.IntRange(1, 150).Draw(r, "cols")
			x := guardedCopy(normal(rng, rows*cols, 0, 1), drawOff.Draw(r, "x"))
			init := normal(rng, cols, 0, 1)
			whole, parts := guardedCopy(init, drawOff.Draw(r, "dst")), guardedCopy(init, 0)
			k.ColSum(whole.s, x.s, rows, cols)
			if cut := rapid.IntRange(0, cols).Draw(r, "cut"); rows > 0 {
				k.ColSum(parts.s[:cut], x.s, rows, cols)
				k.ColSum(parts.s[cut:], x.s[min(cut, cols-1):], rows, cols)
			}
			whole.check(t, "col-sum")
			requireBits(r, "columns in two parts", parts.s, whole.s)
			for j, v := range whole.s {
				want := float64(init[j])
				for i := range rows {
					want += float64(x.s[i*cols+j])
				}
				if math.Abs(float64(v)-want) > 1e-5 {
					r.Fatalf("column %d of %d over %d rows is %g, want %g", j, cols, rows, v, want)
				}
			}
		})
	})
}
