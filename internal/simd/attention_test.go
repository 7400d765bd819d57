package simd

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"
)

// attentionCase is one problem with its answers in float64.
type attentionCase struct {
	AttentionShape
	qkv, dy      []float32
	y, lse, dqkv []float64
	size         float64 // the largest sum of a score's absolute summands
	tol          float64 // grows with the scores, whose rounding errors exp multiplies
}

// solve fills in the answers, by the textbook.
func (c *attentionCase) solve() {
	n, head := c.B*c.T, c.D/c.H
	c.y, c.lse, c.dqkv = make([]float64, n*c.D), make([]float64, n*c.H), make([]float64, 3*n*c.D)
	p, dp := make([]float64, c.T), make([]float64, c.T)
	for b := range c.B {
		for h := range c.H {
			at := func(t, part int) int { return (b*c.T+t)*3*c.D + part*c.D + h*head }
			for t := range c.T {
				c.row(at, p, dp, (b*c.H+h)*c.T+t, (b*c.T+t)*c.D+h*head, t, head)
			}
		}
	}
}

// row solves for one query; stat and out are where its lse and y lie.
func (c *attentionCase) row(at func(t, part int) int, p, dp []float64, stat, out, t, head int) {
	scale := 1 / math.Sqrt(float64(head))
	top, sum, size := math.Inf(-1), 0.0, 0.0
	for u := range t + 1 {
		p[u] = 0
		for d := range head {
			s := scale * float64(c.qkv[at(t, 0)+d]) * float64(c.qkv[at(u, 1)+d])
			p[u] += s
			size += math.Abs(s)
		}
		top = math.Max(top, p[u])
		c.size = math.Max(c.size, size)
		size = 0
	}
	for u := range t + 1 {
		sum += math.Exp(p[u] - top)
	}
	c.lse[stat] = top + math.Log(sum)
	c.tol = max(c.tol, 3e-6, 3e-7*c.size)
	var delta float64
	for u := range t + 1 {
		p[u] = math.Exp(p[u] - c.lse[stat])
		dp[u] = 0
		for d := range head {
			c.y[out+d] += p[u] * float64(c.qkv[at(u, 2)+d])
			c.dqkv[at(u, 2)+d] += p[u] * float64(c.dy[out+d])
			dp[u] += float64(c.dy[out+d]) * float64(c.qkv[at(u, 2)+d])
		}
		delta += p[u] * dp[u]
	}
	for u := range t + 1 {
		ds := scale * p[u] * (dp[u] - delta)
		for d := range head {
			c.dqkv[at(t, 0)+d] += ds * float64(c.qkv[at(u, 1)+d])
			c.dqkv[at(u, 1)+d] += ds * float64(c.qkv[at(t, 0)+d])
		}
	}
}

func newAttentionCase(r *rand.Rand, s AttentionShape, spread float32) *attentionCase {
	c := &attentionCase{AttentionShape: s, qkv: random(r, 3*s.B*s.T*s.D), dy: random(r, s.B*s.T*s.D)}
	for i := range c.qkv {
		c.qkv[i] *= spread
	}
	c.solve()
	return c
}

// poisoned is n times NaN.
func poisoned(n int) []float32 {
	x := make([]float32, n)
	fill(x, float32(math.NaN()))
	return x
}

// near fails unless got is want within tol of the largest element.
func near(t interface{ Fatalf(string, ...any) }, what string, got []float32, want []float64, tol float64) {
	scale := 1e-6
	for _, v := range want {
		scale = math.Max(scale, math.Abs(v))
	}
	for i, v := range want {
		if !(math.Abs(float64(got[i])-v) <= tol*scale) {
			t.Fatalf("%s[%d] = %v, want %v (largest %v)", what, i, got[i], v, scale)
		}
	}
}

// check runs both directions on poisoned outputs and scratch memory.
func (c *attentionCase) check(t interface{ Fatalf(string, ...any) }, k *Kernels, w *Workspace) {
	n := c.B * c.T
	y, lse, dqkv := poisoned(n*c.D), poisoned(n*c.H), poisoned(3*n*c.D)
	for b := range c.B {
		for h := range c.H {
			fill(w.scores, float32(math.NaN()))
			fill(w.grads, float32(math.NaN()))
			k.Attention(w, y, c.qkv, lse, c.AttentionShape, b, h)
		}
	}
	near(t, "y", y, c.y, c.tol)
	// A sum that cancels keeps the rounding errors of its summands.
	near(t, "lse", append(lse, float32(c.size)), append(c.lse, c.size), c.tol)
	for b := range c.B {
		for h := range c.H {
			fill(w.scores, float32(math.NaN()))
			fill(w.grads, float32(math.NaN()))
			k.AttentionGrad(w, dqkv, c.qkv, y, c.dy, lse, c.AttentionShape, b, h)
		}
	}
	near(t, "dqkv", dqkv, c.dqkv, 3*c.tol)
}

// Forward and backward agree with float64 for any shape, whatever the outputs
// and the scratch memory held: a wrong mask, tail or head offset shows here.
func TestAttentionMatchesReference(t *testing.T) {
	everyISA(t, func(t *testing.T, k *Kernels) {
		w := k.NewWorkspace()
		rapid.Check(t, func(t *rapid.T) {
			h := rapid.IntRange(1, 3).Draw(t, "heads")
			s := AttentionShape{B: rapid.IntRange(1, 2).Draw(t, "batch"), T: rapid.IntRange(1, 70).Draw(t, "positions"),
				H: h, D: h * rapid.IntRange(1, 40).Draw(t, "head size")}
			r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
			newAttentionCase(r, s, rapid.Float32Range(0.01, 3).Draw(t, "spread")).check(t, k, w)
		})
	})
}

// Sequences longer than a block need the running maximum and sums over blocks.
func TestAttentionBlocks(t *testing.T) {
	shapes := []AttentionShape{
		{1, attentionBlock, 1, 32}, {1, attentionBlock + 1, 2, 24}, {1, 2*attentionBlock + 37, 1, 12},
	}
	everyISA(t, func(t *testing.T, k *Kernels) {
		w := k.NewWorkspace()
		for i, s := range shapes {
			newAttentionCase(rand.New(rand.NewPCG(uint64(i), 2)), s, 1).check(t, k, w)
		}
	})
}

// Large scores must not overflow: the maximum is subtracted before exp.
func TestAttentionLargeScores(t *testing.T) {
	everyISA(t, func(t *testing.T, k *Kernels) {
		newAttentionCase(rand.New(rand.NewPCG(5, 5)), AttentionShape{1, 150, 1, 8}, 12).check(t, k, k.NewWorkspace())
	})
}

// A NaN in a key reaches every query from that position on and none before it.
func TestAttentionSpreadsNaN(t *testing.T) {
	everyISA(t, func(t *testing.T, k *Kernels) {
		s := AttentionShape{1, 40, 1, 8}
		c := newAttentionCase(rand.New(rand.NewPCG(6, 6)), s, 1)
		c.qkv[17*3*s.D+s.D+3] = float32(math.NaN())
		y, lse := poisoned(s.T*s.D), poisoned(s.T)
		k.Attention(k.NewWorkspace(), y, c.qkv, lse, s, 0, 0)
		for i, v := range y {
			if isNaN := v != v; isNaN != (i/s.D >= 17) {
				t.Fatalf("NaN at key 17: y[%d,%d] = %v", i/s.D, i%s.D, v)
			}
		}
	})
}

// A training step must not allocate: neither may attention.
func TestAttentionAllocatesNothing(t *testing.T) {
	runnable(t, func(t *testing.T, k *Kernels) {
		s := AttentionShape{1, 150, 2, 16}
		w, n := k.NewWorkspace(), s.B*s.T
		y, lse, qkv := make([]float32, n*s.D), make([]float32, n*s.H), make([]float32, 3*n*s.D)
		if n := testing.AllocsPerRun(5, func() {
			k.Attention(w, y, qkv, lse, s, 0, 1)
			k.AttentionGrad(w, qkv, qkv, y, y, lse, s, 0, 1)
		}); n != 0 {
			t.Errorf("%v allocations", n)
		}
	})
}

// The rates count the causal half only: 4 (forward) and 10 (backward) T²·D flops
// in full, half of that here.
func BenchmarkAttention(b *testing.B) {
	for _, isa := range Supported() {
		k, err := For(isa)
		if err != nil {
			b.Fatal(err)
		}
		w := k.NewWorkspace()
		for _, s := range []AttentionShape{{1, 64, 4, 128}, {1, 128, 6, 384}, {1, 1024, 12, 768}} {
			r := rand.New(rand.NewPCG(1, 1))
			n := s.B * s.T
			qkv, dy := random(r, 3*n*s.D), random(r, n*s.D)
			y, lse, dqkv := make([]float32, n*s.D), make([]float32, n*s.H), make([]float32, 3*n*s.D)
			half := float64(s.T) * float64(s.T+1) / 2 * float64(s.D/s.H)
			run := func(name string, flops float64, f func()) {
				b.Run(fmt.Sprintf("%v/%s/T=%d,Dh=%d", isa, name, s.T, s.D/s.H), func(b *testing.B) {
					for b.Loop() {
						f()
					}
					b.ReportMetric(flops*half*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
				})
			}
			run("forward", 4, func() { k.Attention(w, y, qkv, lse, s, 0, 1) })
			run("backward", 10, func() { k.AttentionGrad(w, dqkv, qkv, y, dy, lse, s, 0, 1) })
		}
	}
}
