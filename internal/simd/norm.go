package simd

import "math"

// LayerNorm normalises rows of d elements: y = (x−mean)·rstd·gamma + beta with
// the row's mean and rstd = 1/√(variance+eps), which are kept for the gradients.
// x and y hold rows·d elements and may be the same; gamma and beta hold d, mean
// and rstd rows. The variance is taken around the mean, not as a difference
// of squares, so that it stays right far from zero.
func (k *Kernels) LayerNorm(y, x, gamma, beta, mean, rstd []float32, rows, d int, eps float32) {
	gamma, beta = gamma[:d], beta[:d]
	for r := range rows {
		o := r * d
		mean[r], rstd[r] = k.vec.layerNorm(y[o:o+d], x[o:o+d], gamma, beta, eps)
	}
}

// LayerNormGradInput computes dx from dy and what LayerNorm left: with
// g = dy·gamma and h = (x−mean)·rstd, dx = rstd·(g − mean(g) − h·mean(g·h)).
// dx may be dy or x.
func (k *Kernels) LayerNormGradInput(dx, x, gamma, dy, mean, rstd []float32, rows, d int) {
	gamma = gamma[:d]
	for r := range rows {
		o := r * d
		k.vec.layerNormGradInput(dx[o:o+d], x[o:o+d], gamma, dy[o:o+d], mean[r], rstd[r])
	}
}

// LayerNormGradParams adds to dgamma the column sums of dy·(x−mean)·rstd and to
// dbeta those of dy, row by row in order. len(dgamma) = len(dbeta) may be
// less than d, the distance between rows: a thread takes the columns [c, c+n)
// by passing dgamma[c:c+n], dbeta[c:c+n], x[c:] and dy[c:], and the sums don't
// depend on how columns are dealt out.
func (k *Kernels) LayerNormGradParams(dgamma, dbeta, x, dy, mean, rstd []float32, rows, d int) {
	n := len(dgamma)
	if rows == 0 || n == 0 {
		return
	}
	end := (rows-1)*d + n
	k.vec.layerNormGradParams(dgamma, dbeta[:n], x[:end], dy[:end], mean[:rows], rstd[:rows], d)
}

func layerNormGo(y, x, gamma, beta []float32, eps float32) (mean, rstd float32) {
	var sum, sq float64
	for _, v := range x {
		sum += float64(v)
	}
	m := sum / float64(len(x))
	for _, v := range x {
		c := float64(v) - m
		sq += c * c
	}
	mean = float32(m)
	rstd = float32(1 / math.Sqrt(sq/float64(len(x))+float64(eps)))
	for i, v := range x {
		y[i] = (v-mean)*rstd*gamma[i] + beta[i]
	}
	return mean, rstd
}

func layerNormGradInputGo(dx, x, gamma, dy []float32, mean, rstd float32) {
	var sg, sgh float64
	for i, v := range x {
		g := dy[i] * gamma[i]
		sg += float64(g)
		sgh += float64(g) * float64((v-mean)*rstd)
	}
	n := float64(len(x))
	mg, mgh := float32(sg/n), float32(sgh/n)
	for i, v := range x {
		dx[i] = rstd * (dy[i]*gamma[i] - mg - (v-mean)*rstd*mgh)
	}
}

func layerNormGradParamsGo(dgamma, dbeta, x, dy, mean, rstd []float32, stride int) {
	for r, m := range mean {
		xr, dr, s := x[r*stride:][:len(dgamma)], dy[r*stride:][:len(dgamma)], rstd[r]
		for i, d := range dr {
			dgamma[i] += d * ((xr[i] - m) * s)
			dbeta[i] += d
		}
	}
}
