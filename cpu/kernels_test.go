package cpu

import (
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/tandem-go/tandem/device"
)

func size(t *rapid.T, name string, lo, hi int) int { return rapid.IntRange(lo, hi).Draw(t, name) }

// Without it products could be wrong for some transposition, share of a thread
// or edge of a tile.
func TestMatMul(t *testing.T) {
	r := newRig(t)
	rapid.Check(t, func(t *rapid.T) {
		rnd := seeded(t)
		m, n, k := size(t, "m", 0, 130), size(t, "n", 0, 130), size(t, "k", 0, 90)
		ta, tb := rapid.Bool().Draw(t, "ta"), rapid.Bool().Draw(t, "tb")
		acc, bias := rapid.Bool().Draw(t, "accumulate"), rapid.Bool().Draw(t, "bias")
		a, b, c0, v := normal(rnd, m*k), normal(rnd, k*n), normal(rnd, m*n), normal(rnd, n)
		want := refMatMul(widen(a), widen(b), m, n, k, ta, tb)
		c := call{kind: device.MatMul, attr: device.Attr{TransA: ta, TransB: tb, Accumulate: acc, Bias: bias}}
		c.in = []arg{floats(a, m, k), floats(b, k, n)}
		if ta {
			c.in[0].t.Shape = []int{k, m}
		}
		if tb {
			c.in[1].t.Shape = []int{n, k}
		}
		c.out = []arg{garbage(m, n)}
		if acc {
			c.out = []arg{floats(c0, m, n)}
		}
		if bias {
			c.in = append(c.in, floats(v, n))
		}
		for i := range want {
			if acc {
				want[i] += float64(c0[i])
			}
			if bias {
				want[i] += float64(v[i%n])
			}
		}
		r.run(t, c, false, func(t *rapid.T, res result) { near(t, "C", res.f32(0), want, 2e-6) })
	})
}

// Without it the products of a batch could be mixed up.
func TestBatchedMatMul(t *testing.T) {
	r := newRig(t)
	rapid.Check(t, func(t *rapid.T) {
		rnd := seeded(t)
		g := size(t, "g", 0, 5)
		m, n, k := size(t, "m", 0, 80), size(t, "n", 0, 80), size(t, "k", 0, 40)
		ta, tb := rapid.Bool().Draw(t, "ta"), rapid.Bool().Draw(t, "tb")
		acc := rapid.Bool().Draw(t, "accumulate")
		a, b, c0 := normal(rnd, g*m*k), normal(rnd, g*k*n), normal(rnd, g*m*n)
		c := call{kind: device.BatchedMatMul, attr: device.Attr{TransA: ta, TransB: tb, Accumulate: acc}}
		c.in = []arg{floats(a, g, m, k), floats(b, g, k, n)}
		if ta {
			c.in[0].t.Shape = []int{g, k, m}
		}
		if tb {
			c.in[1].t.Shape = []int{g, n, k}
		}
		c.out = []arg{garbage(g, m, n)}
		if acc {
			c.out = []arg{floats(c0, g, m, n)}
		}
		var want []float64
		for i := range g {
			want = append(want, refMatMul(widen(a[i*m*k:(i+1)*m*k]), widen(b[i*k*n:(i+1)*k*n]), m, n, k, ta, tb)...)
		}
		for i := range want {
			if acc {
				want[i] += float64(c0[i])
			}
		}
		r.run(t, c, false, func(t *rapid.T, res result) { near(t, "C", res.f32(0), want, 2e-6) })
	})
}

// Without it bias gradients could miss rows or columns.
func TestColSum(t *testing.T) {
	r := newRig(t)
	rapid.Check(t, func(t *rapid.T) {
		rnd := seeded(t)
		n, d := size(t, "n", 0, 300), size(t, "d", 0, 200)
		acc := rapid.Bool().Draw(t, "accumulate")
		x, y0 := normal(rnd, n*d), normal(rnd, d)
		want := refColSum(widen(x), d)
		c := call{kind: device.ColSum, attr: device.Attr{Accumulate: acc}, in: []arg{floats(x, n, d)}, out: []arg{garbage(d)}}
		if acc {
			c.out = []arg{floats(y0, d)}
			for i := range want {
				want[i] += float64(y0[i])
			}
		}
		r.run(t, c, false, func(t *rapid.T, res result) { near(t, "y", res.f32(0), want, 1e-5) })
	})
}

// Without it a function could be another one, or wrong at the seam of chunks.
func TestUnary(t *testing.T) {
	r := newRig(t)
	funcs := []device.Func{device.Neg, device.Exp, device.Log, device.Sqrt, device.Square, device.Cube,
		device.Tanh, device.Sigmoid, device.Inverse, device.ReLU}
	rapid.Check(t, func(t *rapid.T) {
		rnd := seeded(t)
		n := size(t, "n", 0, 3*chunkElems)
		f := rapid.SampledFrom(funcs).Draw(t, "f")
		x := normal(rnd, n)
		want := make([]float64, n)
		for i := range x {
			if f == device.Log || f == device.Sqrt || f == device.Inverse {
				x[i] = float32(math.Abs(float64(x[i]))) + 0.01
			}
			want[i] = refUnary(f, float64(x[i]))
		}
		c := call{kind: device.Unary, attr: device.Attr{Func: f}, in: []arg{floats(x, n)}, out: []arg{garbage(n)}}
		r.run(t, c, false, func(t *rapid.T, res result) { near(t, "y", res.f32(0), want, 1e-6) })
	})
}

// Without it operands could be swapped, or a scalar be applied to one chunk only.
func TestBinary(t *testing.T) {
	r := newRig(t)
	funcs := []device.Func{device.Add, device.Sub, device.Mul, device.Div}
	rapid.Check(t, func(t *rapid.T) {
		rnd := seeded(t)
		n := size(t, "n", 0, 3*chunkElems)
		f := rapid.SampledFrom(funcs).Draw(t, "f")
		scalar := size(t, "scalar operand", -1, 1)
		ab := [2][]float32{normal(rnd, n), normal(rnd, n)}
		for i := range ab[1] {
			ab[1][i] += float32(math.Copysign(0.1, float64(ab[1][i]))) // a divisor
		}
		args := []arg{floats(ab[0], n), floats(ab[1], n)}
		if scalar >= 0 {
			ab[scalar] = []float32{1.5}
			args[scalar] = floats(ab[scalar])
		}
		want := make([]float64, n)
		for i := range want {
			want[i] = refBinary(f, float64(ab[0][i%len(ab[0])]), float64(ab[1][i%len(ab[1])]))
		}
		c := call{kind: device.Binary, attr: device.Attr{Func: f}, in: args, out: []arg{garbage(n)}}
		r.run(t, c, true, func(t *rapid.T, res result) { near(t, "y", res.f32(0), want, 1e-6) })
	})
}

// Without it the activation could be the other form of GELU.
func TestGELU(t *testing.T) {
	r := newRig(t)
	rapid.Check(t, func(t *rapid.T) {
		rnd := seeded(t)
		n := size(t, "n", 0, 3*chunkElems)
		x, dy := normal(rnd, n), normal(rnd, n)
		y, dx := make([]float64, n), make([]float64, n)
		for i, v := range x {
			x[i] = 3 * v
			y[i] = refGELU(float64(x[i]))
			dx[i] = refGELUGrad(float64(x[i])) * float64(dy[i])
		}
		c := call{kind: device.GELU, in: []arg{floats(x, n)}, out: []arg{garbage(n)}}
		r.run(t, c, false, func(t *rapid.T, res result) { near(t, "y", res.f32(0), y, 1e-6) })
		c = call{kind: device.GELUGrad, in: []arg{floats(x, n), floats(dy, n)}, out: []arg{garbage(n)}}
		r.run(t, c, false, func(t *rapid.T, res result) { near(t, "dx", res.f32(0), dx, 2e-6) })
	})
}

// Without it dropout could depend on how work is cut, or ignore its key.
func TestDropout(t *testing.T) {
	r := newRig(t)
	rapid.Check(t, func(t *rapid.T) {
		rnd := seeded(t)
		samples, seq, d := size(t, "samples", 0, 4), size(t, "seq", 1, 40), size(t, "d", 0, 900)
		p := rapid.SampledFrom([]float32{0, 0.1, 0.5, 0.9}).Draw(t, "p")
		key := []int64{rapid.Int64().Draw(t, "seed key"), 7, 11}
		x := normal(rnd, samples*seq*d)
		want := make([]float64, len(x))
		for i, v := range x {
			s, j := i/(seq*d), i%(seq*d)
			if device.DropoutKeep(key[0], key[1], 5, key[2]+int64(s), j, p) {
				want[i] = float64(v) / float64(1-p)
			}
		}
		c := call{kind: device.Dropout, attr: device.Attr{P: p, Seq: seq, Salt: 5},
			in: []arg{floats(x, samples*seq, d), ints(key, 3)}, out: []arg{garbage(samples*seq, d)}}
		r.run(t, c, true, func(t *rapid.T, res result) { near(t, "y", res.f32(0), want, 1e-6) })
	})
}

// Without it a norm or one of its gradients could be wrong, or the statistics
// that travel in the state.
func TestLayerNorm(t *testing.T) {
	r := newRig(t)
	rapid.Check(t, func(t *rapid.T) {
		rnd := seeded(t)
		n, d := size(t, "n", 0, 120), size(t, "d", 8, 400)
		const eps = 1e-5
		x, dy, gamma, beta := normal(rnd, n*d), normal(rnd, n*d), normal(rnd, d), normal(rnd, d)
		for i := range x {
			x[i] += 3
		}
		ref := refLayerNorm(widen(x), widen(gamma), widen(beta), d, eps)
		var mean, rstd []float32
		c := call{kind: device.LayerNorm, attr: device.Attr{Eps: eps},
			in:    []arg{floats(x, n, d), floats(gamma, d), floats(beta, d)},
			state: []arg{garbage(n), garbage(n)}, out: []arg{garbage(n, d)}}
		r.run(t, c, false, func(t *rapid.T, res result) {
			near(t, "mean", res.f32(0), ref.mean, 1e-6)
			near(t, "rstd", res.f32(1), ref.rstd, 5e-6)
			near(t, "y", res.f32(2), ref.y, 5e-6)
			mean, rstd = res.f32(0), res.f32(1)
		})
		dx, dgamma, dbeta := refLayerNormGrad(widen(x), widen(gamma), widen(dy), d, eps)
		c = call{kind: device.LayerNormGradInput,
			in:    []arg{floats(x, n, d), floats(gamma, d), floats(dy, n, d)},
			state: []arg{floats(mean, n), floats(rstd, n)}, out: []arg{garbage(n, d)}}
		r.run(t, c, false, func(t *rapid.T, res result) { near(t, "dx", res.f32(2), dx, 1e-5) })
		var left []float32
		c = call{kind: device.LayerNormGradGamma,
			in:    []arg{floats(x, n, d), floats(dy, n, d)},
			state: []arg{floats(mean, n), floats(rstd, n), garbage(d)}, out: []arg{garbage(d)}}
		r.run(t, c, false, func(t *rapid.T, res result) {
			near(t, "dbeta", res.f32(2), dbeta, 1e-5)
			near(t, "dgamma", res.f32(3), dgamma, 1e-5)
			left = res.f32(2)
		})
		c = call{kind: device.LayerNormGradBeta,
			in:    []arg{floats(dy, n, d), garbage(d)},
			state: []arg{floats(left, d)}, out: []arg{garbage(d)}}
		r.run(t, c, false, func(t *rapid.T, res result) { near(t, "dbeta", res.f32(1), dbeta, 1e-5) })
	})
}

// Without it a position could see the future, or another head's keys.
func TestAttention(t *testing.T) {
	r := newRig(t)
	rapid.Check(t, func(t *rapid.T) {
		rnd := seeded(t)
		b, s, h := size(t, "b", 1, 3), size(t, "t", 1, 70), size(t, "h", 1, 3)
		d := h * size(t, "k", 1, 40)
		n := b * s
		qkv, dy := normal(rnd, n*3*d), normal(rnd, n*d)
		y, lse, dqkv := refAttention(widen(qkv), widen(dy), b, s, h, d)
		attr := device.Attr{Heads: h, Seq: s}
		var gotY, gotLSE []float32
		c := call{kind: device.Attention, attr: attr, in: []arg{floats(qkv, n, 3*d)},
			state: []arg{garbage(b * h * s)}, out: []arg{garbage(n, d)}}
		r.run(t, c, false, func(t *rapid.T, res result) {
			near(t, "lse", res.f32(0), lse, 1e-5)
			near(t, "y", res.f32(1), y, 1e-5)
			gotLSE, gotY = res.f32(0), res.f32(1)
		})
		c = call{kind: device.AttentionGrad, attr: attr,
			in:    []arg{floats(qkv, n, 3*d), floats(gotY, n, d), floats(dy, n, d)},
			state: []arg{floats(gotLSE, b*h*s)}, out: []arg{garbage(n, 3*d)}}
		r.run(t, c, false, func(t *rapid.T, res result) { near(t, "dqkv", res.f32(1), dqkv, 1e-5) })
	})
}

// Without it an embedding could take another row than the token says.
func TestEmbedding(t *testing.T) {
	r := newRig(t)
	rapid.Check(t, func(t *rapid.T) {
		rnd := seeded(t)
		v, d := size(t, "v", 1, 70), size(t, "d", 0, 300)
		b, seq, extra := size(t, "b", 0, 5), size(t, "seq", 1, 30), size(t, "rows beyond seq", 0, 3)
		acc := rapid.Bool().Draw(t, "accumulate")
		n, rows := b*seq, seq+extra
		wte, wpe, dy := normal(rnd, v*d), normal(rnd, rows*d), normal(rnd, n*d)
		tokens := indices(rnd, n, 0, v)
		x, dwte, dwpe := make([]float64, n*d), make([]float64, v*d), make([]float64, rows*d)
		token, position := garbage(v, d), garbage(rows, d)
		if acc {
			token, position = floats(wte, v, d), floats(wpe, rows, d)
			copy(dwte, widen(wte))
			copy(dwpe, widen(wpe))
		}
		for i := range x {
			w, p := int(tokens[i/d])*d+i%d, i/d%seq*d+i%d
			x[i] = float64(wte[w]) + float64(wpe[p])
			dwte[w] += float64(dy[i])
			dwpe[p] += float64(dy[i])
		}
		attr := device.Attr{Seq: seq}
		c := call{kind: device.Embedding, attr: attr, out: []arg{garbage(n, d)},
			in: []arg{floats(wte, v, d), floats(wpe, rows, d), ints(tokens, n)}}
		r.run(t, c, true, func(t *rapid.T, res result) { near(t, "x", res.f32(0), x, 1e-6) })
		attr.Accumulate = acc
		c = call{kind: device.EmbeddingGradToken, attr: attr, out: []arg{token},
			in: []arg{ints(tokens, n), floats(dy, n, d)}}
		r.run(t, c, true, func(t *rapid.T, res result) { near(t, "dwte", res.f32(0), dwte, 1e-5) })
		c = call{kind: device.EmbeddingGradPosition, attr: attr, out: []arg{position}, in: []arg{floats(dy, n, d)}}
		r.run(t, c, true, func(t *rapid.T, res result) { near(t, "dwpe", res.f32(0), dwpe, 1e-5) })
	})
}

// Without it the loss could count ignored rows, and its bits depend on threads.
func TestCrossEntropy(t *testing.T) {
	r := newRig(t)
	rapid.Check(t, func(t *rapid.T) {
		rnd := seeded(t)
		n, v := size(t, "n", 0, 300), size(t, "v", 1, 300)
		mean := rapid.Bool().Draw(t, "mean")
		lo := size(t, "lowest target", -1, 0)
		logits, targets := normal(rnd, n*v), indices(rnd, n, lo, v)
		if rapid.IntRange(0, 9).Draw(t, "all ignored") == 0 {
			for i := range targets {
				targets[i] = -1
			}
		}
		loss, lse, count, d := refCrossEntropy(widen(logits), targets, v, mean)
		attr := device.Attr{Mean: mean}
		var gotLSE, gotCount []float32
		c := call{kind: device.CrossEntropy, attr: attr, in: []arg{floats(logits, n, v), ints(targets, n)},
			state: []arg{garbage(n), garbage(1)}, out: []arg{garbage()}}
		r.run(t, c, false, func(t *rapid.T, res result) {
			near(t, "lse", res.f32(0), lse, 1e-6)
			near(t, "count", res.f32(1), []float64{float64(count)}, 0)
			near(t, "loss", res.f32(2), []float64{loss}, 1e-6)
			gotLSE, gotCount = res.f32(0), res.f32(1)
		})
		for i := range d {
			d[i] *= 2.5
		}
		c = call{kind: device.CrossEntropyGrad, attr: attr,
			in:    []arg{floats(logits, n, v), ints(targets, n), floats([]float32{2.5})},
			state: []arg{floats(gotLSE, n), floats(gotCount, 1)}, out: []arg{garbage(n, v)}}
		r.run(t, c, false, func(t *rapid.T, res result) { near(t, "dlogits", res.f32(2), d, 2e-6) })
	})
}

func hyper() []float32 {
	h := make([]float32, device.HyperLen)
	h[device.HyperLR], h[device.HyperBeta1], h[device.HyperBeta2] = 1e-2, 0.9, 0.95
	h[device.HyperEps], h[device.HyperDecay] = 1e-8, 0.1
	h[device.HyperBias1], h[device.HyperBias2], h[device.HyperScale] = 0.19, 0.0975, 0.5
	return h
}

// Without it updates could differ between ranks with other machines or
// threads, and parameters drift apart.
func TestUpdates(t *testing.T) {
	r := newRig(t)
	rapid.Check(t, func(t *rapid.T) {
		rnd := seeded(t)
		n := size(t, "n", 0, 3*chunkElems)
		decay := rapid.Bool().Draw(t, "decay")
		h := hyper()
		g, p, m, v := normal(rnd, n), normal(rnd, n), normal(rnd, n), normal(rnd, n)
		adam, sgd := make([]float64, n), make([]float64, n)
		wd := 0.0
		if decay {
			wd = float64(h[device.HyperDecay])
		}
		lr, b1, b2 := float64(h[device.HyperLR]), float64(h[device.HyperBeta1]), float64(h[device.HyperBeta2])
		for i := range g {
			v[i] *= v[i]
			gr, pa := float64(g[i])/2, float64(p[i])
			m1 := b1*float64(m[i]) + (1-b1)*gr
			v1 := b2*float64(v[i]) + (1-b2)*gr*gr
			adam[i] = pa - lr*wd*pa - lr*(m1/float64(h[device.HyperBias1]))/
				(math.Sqrt(v1/float64(h[device.HyperBias2]))+float64(h[device.HyperEps]))
			sgd[i] = pa - lr*(b1*float64(m[i])+gr+wd*pa)
		}
		in := []arg{floats(g, n), floats(h, device.HyperLen)}
		attr := device.Attr{Decay: decay}
		c := call{kind: device.AdamW, attr: attr, in: in, out: []arg{floats(p, n), floats(m, n), floats(v, n)}}
		r.run(t, c, true, func(t *rapid.T, res result) { near(t, "param after AdamW", res.f32(0), adam, 1e-6) })
		c = call{kind: device.SGD, attr: attr, in: in, out: []arg{floats(p, n), floats(m, n)}}
		r.run(t, c, true, func(t *rapid.T, res result) { near(t, "param after SGD", res.f32(0), sgd, 1e-6) })
	})
}

// Without it ranks could clip by different norms.
func TestNorms(t *testing.T) {
	r := newRig(t)
	rapid.Check(t, func(t *rapid.T) {
		rnd := seeded(t)
		n := size(t, "n", 0, 4*chunkElems)
		x := normal(rnd, n)
		sum := 0.0
		for _, v := range x {
			sum += float64(v) * float64(v)
		}
		c := call{kind: device.SumSquares, in: []arg{floats(x, n)}, out: []arg{doubles(make([]float64, 1), 1)}}
		r.run(t, c, true, func(t *rapid.T, res result) {
			if got := view[float64](res[0])[0]; math.Abs(got-sum) > 1e-12*sum {
				t.Fatalf("sum of squares %v, want %v", got, sum)
			}
		})
		h := hyper()
		h[device.HyperMaxNorm] = rapid.SampledFrom([]float32{0, 1, 1e9}).Draw(t, "limit")
		norm, scale := math.Sqrt(sum+4), 1.0
		if l := float64(h[device.HyperMaxNorm]); l > 0 {
			scale = min(1, l/norm)
		}
		want := widen(h)
		want[device.HyperNorm], want[device.HyperScale] = norm, scale
		c = call{kind: device.ClipScale, in: []arg{doubles([]float64{sum, 4}, 2), floats(h, device.HyperLen)},
			out: []arg{garbage(device.HyperLen)}}
		r.run(t, c, true, func(t *rapid.T, res result) { near(t, "hyper", res.f32(0), want, 1e-7) })
		scaled := widen(x)
		for i := range scaled {
			scaled[i] *= 0.3
		}
		c = call{kind: device.Scale, in: []arg{floats(x, n), floats([]float32{0.3}, 1)}, out: []arg{garbage(n)}}
		r.run(t, c, true, func(t *rapid.T, res result) { near(t, "y", res.f32(0), scaled, 1e-6) })
	})
}
