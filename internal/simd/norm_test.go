package simd

import (
	"math"
	"testing"

	"pgregory.net/rapid"
)

// normCase is a random layer norm with its results in float64.
type normCase struct {
	rows, d                int
	x, gamma, beta, dy     []float32
	eps                    float32
	y, dx                  []float64
	mean, rstd, dgam, dbet []float64
}

func drawNorm(r *rapid.T) *normCase {
	rng := drawRand(r)
	c := &normCase{rows: rapid.IntRange(0, 9).Draw(r, "rows"), d: rapid.IntRange(1, 140).Draw(r, "d"), eps: 1e-5}
	n := c.rows * c.d
	c.x = normal(rng, n, float64(rapid.IntRange(-20, 20).Draw(r, "mean")), 1)
	c.gamma, c.beta, c.dy = normal(rng, c.d, 1, 0.3), normal(rng, c.d, 0, 1), normal(rng, n, 0, 1)
	c.y, c.dx = make([]float64, n), make([]float64, n)
	c.mean, c.rstd = make([]float64, c.rows), make([]float64, c.rows)
	c.dgam, c.dbet = make([]float64, c.d), make([]float64, c.d)
	for i := range c.rows {
		c.row(i)
	}
	return c
}

func (c *normCase) row(i int) {
	x, dy := c.x[i*c.d:][:c.d], c.dy[i*c.d:][:c.d]
	var m, v, sg, sgh float64
	for _, a := range x {
		m += float64(a) / float64(c.d)
	}
	for _, a := range x {
		v += (float64(a) - m) * (float64(a) - m) / float64(c.d)
	}
	s := 1 / math.Sqrt(v+float64(c.eps))
	c.mean[i], c.rstd[i] = m, s
	for j, a := range x {
		h, g := (float64(a)-m)*s, float64(dy[j])*float64(c.gamma[j])
		c.y[i*c.d+j] = h*float64(c.gamma[j]) + float64(c.beta[j])
		sg, sgh = sg+g/float64(c.d), sgh+g*h/float64(c.d)
		c.dgam[j] += float64(dy[j]) * h
		c.dbet[j] += float64(dy[j])
	}
	for j, a := range x {
		c.dx[i*c.d+j] = s * (float64(dy[j])*float64(c.gamma[j]) - sg - (float64(a)-m)*s*sgh)
	}
}

// requireClose compares with a tolerance that grows with rstd for rows of
// nearly equal elements, where the inputs themselves say no more.
func requireClose(r *rapid.T, what string, got []float32, want []float64, tol float64) {
	r.Helper()
	for i, v := range got {
		if !(math.Abs(float64(v)-want[i]) <= tol*max(1, math.Abs(want[i]))) {
			r.Fatalf("%s: element %d of %d is %g, want %g", what, i, len(got), v, want[i])
		}
	}
}

// Without it a layer norm or one of its gradients could be wrong for some
// width, far from zero, at a misaligned address, or in place.
func TestLayerNorm(t *testing.T) {
	eachISA(t, func(t *testing.T, k *Kernels) {
		rapid.Check(t, func(r *rapid.T) {
			c := drawNorm(r)
			x, gamma := guardedCopy(c.x, drawOff.Draw(r, "x")), guardedCopy(c.gamma, drawOff.Draw(r, "gamma"))
			beta, dy := guardedCopy(c.beta, drawOff.Draw(r, "beta")), guardedCopy(c.dy, drawOff.Draw(r, "dy"))
			y, dx := guarded[float32](len(c.x), drawOff.Draw(r, "y")), guarded[float32](len(c.x), 0)
			mean, rstd := guarded[float32](c.rows, 0), guarded[float32](c.rows, 4)
			k.LayerNorm(y.s, x.s, gamma.s, beta.s, mean.s, rstd.s, c.rows, c.d, c.eps)
			tol := 4e-6
			for i, s := range c.rstd { // the mean is rounded, and rstd magnifies that
				tol = max(tol, 4e-6*s, 5e-7*math.Abs(c.mean[i])*s)
			}
			requireClose(r, "mean", mean.s, c.mean, 1e-6)
			requireClose(r, "rstd", rstd.s, c.rstd, tol)
			requireClose(r, "y", y.s, c.y, tol)
			k.LayerNormGradInput(dx.s, x.s, gamma.s, dy.s, mean.s, rstd.s, c.rows, c.d)
			for i := range c.rows {
				row := dx.s[i*c.d:][:c.d]
				requireClose(r, "dx", row, c.dx[i*c.d:], 4*tol*max(1, c.rstd[i]))
			}
			for _, g := range []guard[float32]{x, gamma, beta, dy, y, dx, mean, rstd} {
				g.check(t, "layer norm")
			}
			k.LayerNormGradInput(dy.s, x.s, gamma.s, dy.s, mean.s, rstd.s, c.rows, c.d)
			requireBits(r, "dx in place", dy.s, dx.s)
		})
	})
}

// Without it the gradients of gamma and beta could overwrite instead of add,
// lose columns, or depend on how columns are dealt out among threads.
func TestLayerNormGradParams(t *testing.T) {
	eachISA(t, func(t *testing.T, k *Kernels) {
		rapid.Check(t, func(r *rapid.T) {
			c := drawNorm(r)
			mean, rstd := make([]float32, c.rows), make([]float32, c.rows)
			for i := range mean {
				mean[i], rstd[i] = float32(c.mean[i]), float32(c.rstd[i])
			}
			x, dy := guardedCopy(c.x, drawOff.Draw(r, "x")), guardedCopy(c.dy, drawOff.Draw(r, "dy"))
			dg, db := guarded[float32](c.d, drawOff.Draw(r, "dgamma")), guarded[float32](c.d, drawOff.Draw(r, "dbeta"))
			pg, pb := make([]float32, c.d), make([]float32, c.d)
			for j := range c.d {
				dg.s[j], db.s[j], pg[j], pb[j] = 1, 2, 1, 2
				c.dgam[j]++
				c.dbet[j] += 2
			}
			k.LayerNormGradParams(dg.s, db.s, x.s, dy.s, mean, rstd, c.rows, c.d)
			tol := 1e-5
			for i, s := range c.rstd {
				tol = max(tol, 1e-6*s*math.Abs(c.mean[i])*float64(c.rows))
			}
			requireClose(r, "dgamma", dg.s, c.dgam, tol)
			requireClose(r, "dbeta", db.s, c.dbet, 1e-5)
			for _, g := range []guard[float32]{x, dy, dg, db} {
				g.check(t, "layer norm gradient")
			}
			if cut := rapid.IntRange(0, c.d-1).Draw(r, "cut"); c.rows > 0 {
				k.LayerNormGradParams(pg[:cut], pb[:cut], x.s, dy.s, mean, rstd, c.rows, c.d)
				k.LayerNormGradParams(pg[cut:], pb[cut:], x.s[cut:], dy.s[cut:], mean, rstd, c.rows, c.d)
				requireBits(r, "dgamma in two parts", pg, dg.s)
				requireBits(r, "dbeta in two parts", pb, db.s)
			}
		})
	})
}
