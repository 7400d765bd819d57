package cpu

import (
	"math"

	"github.com/tandem-go/tandem/device"
)

// The kinds in float64, as package device defines them, with plain loops.

func refMatMul(a, b []float64, m, n, k int, ta, tb bool) []float64 {
	c := make([]float64, m*n)
	for i := range m {
		for j := range n {
			for p := range k {
				x, y := i*k+p, p*n+j
				if ta {
					x = p*m + i
				}
				if tb {
					y = j*k + p
				}
				c[i*n+j] += a[x] * b[y]
			}
		}
	}
	return c
}

func refColSum(x []float64, d int) []float64 {
	y := make([]float64, d)
	for i, v := range x {
		y[i%d] += v
	}
	return y
}

func refUnary(f device.Func, x float64) float64 {
	switch f {
	case device.Neg:
		return -x
	case device.Exp:
		return math.Exp(x)
	case device.Log:
		return math.Log(x)
	case device.Sqrt:
		return math.Sqrt(x)
	case device.Square:
		return x * x
	case device.Cube:
		return x * x * x
	case device.Tanh:
		return math.Tanh(x)
	case device.Sigmoid:
		return 1 / (1 + math.Exp(-x))
	case device.Inverse:
		return 1 / x
	case device.ReLU:
		return max(0, x)
	}
	panic(f)
}

func refBinary(f device.Func, a, b float64) float64 {
	switch f {
	case device.Add:
		return a + b
	case device.Sub:
		return a - b
	case device.Mul:
		return a * b
	case device.Div:
		return a / b
	}
	panic(f)
}

func refGELU(x float64) float64 {
	return x / 2 * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x)))
}

// refGELUGrad is the derivative by central differences, good to 1e-9.
func refGELUGrad(x float64) float64 {
	const h = 1e-5
	return (refGELU(x+h) - refGELU(x-h)) / (2 * h)
}

type refNorm struct{ y, mean, rstd []float64 }

func refLayerNorm(x, gamma, beta []float64, d int, eps float64) refNorm {
	n := len(x) / d
	r := refNorm{make([]float64, len(x)), make([]float64, n), make([]float64, n)}
	for i := range n {
		row := x[i*d : (i+1)*d]
		var mean, v float64
		for _, e := range row {
			mean += e / float64(d)
		}
		for _, e := range row {
			v += (e - mean) * (e - mean) / float64(d)
		}
		r.mean[i], r.rstd[i] = mean, 1/math.Sqrt(v+eps)
		for j, e := range row {
			r.y[i*d+j] = (e-mean)*r.rstd[i]*gamma[j] + beta[j]
		}
	}
	return r
}

func refLayerNormGrad(x, gamma, dy []float64, d int, eps float64) (dx, dgamma, dbeta []float64) {
	r := refLayerNorm(x, gamma, make([]float64, d), d, eps)
	dx, dgamma, dbeta = make([]float64, len(x)), make([]float64, d), make([]float64, d)
	for i := range r.mean {
		var g, gh float64
		for j := range d {
			o := i*d + j
			h := (x[o] - r.mean[i]) * r.rstd[i]
			dgamma[j] += dy[o] * h
			dbeta[j] += dy[o]
			g += dy[o] * gamma[j] / float64(d)
			gh += dy[o] * gamma[j] * h / float64(d)
		}
		for j := range d {
			o := i*d + j
			h := (x[o] - r.mean[i]) * r.rstd[i]
			dx[o] = r.rstd[i] * (dy[o]*gamma[j] - g - h*gh)
		}
	}
	return dx, dgamma, dbeta
}

// refAttention is causal attention; with dy it also differentiates.
func refAttention(qkv, dy []float64, b, t, h, d int) (y, lse, dqkv []float64) {
	k := d / h
	y, lse, dqkv = make([]float64, b*t*d), make([]float64, b*h*t), make([]float64, b*t*3*d)
	at := func(n, part, head int) int { return n*3*d + part*d + head*k }
	scale := 1 / math.Sqrt(float64(k))
	for s := range b {
		for head := range h {
			for i := range t {
				n := s*t + i
				p := make([]float64, i+1)
				top := math.Inf(-1)
				for j := range p {
					for e := range k {
						p[j] += qkv[at(n, 0, head)+e] * qkv[at(s*t+j, 1, head)+e] * scale
					}
					top = max(top, p[j])
				}
				sum := 0.0
				for j := range p {
					p[j] = math.Exp(p[j] - top)
					sum += p[j]
				}
				lse[(s*h+head)*t+i] = top + math.Log(sum)
				o := n*d + head*k
				for j := range p {
					p[j] /= sum
					for e := range k {
						y[o+e] += p[j] * qkv[at(s*t+j, 2, head)+e]
					}
				}
				if dy == nil {
					continue
				}
				dot := 0.0
				for e := range k {
					dot += dy[o+e] * y[o+e]
				}
				for j := range p {
					m := s*t + j
					dp := 0.0
					for e := range k {
						dp += dy[o+e] * qkv[at(m, 2, head)+e]
						dqkv[at(m, 2, head)+e] += p[j] * dy[o+e]
					}
					ds := p[j] * (dp - dot) * scale
					for e := range k {
						dqkv[at(n, 0, head)+e] += ds * qkv[at(m, 1, head)+e]
						dqkv[at(m, 1, head)+e] += ds * qkv[at(n, 0, head)+e]
					}
				}
			}
		}
	}
	return y, lse, dqkv
}

// refCrossEntropy returns the loss, the log-sum-exps, the number of rows that
// count and the gradient for dloss = 1.
func refCrossEntropy(logits []float64, targets []int64, v int, mean bool) (loss float64, lse []float64, count int, d []float64) {
	lse, d = make([]float64, len(targets)), make([]float64, len(logits))
	for r, t := range targets {
		if t < 0 {
			continue
		}
		count++
		row := logits[r*v : (r+1)*v]
		sum := 0.0
		for _, l := range row {
			sum += math.Exp(l)
		}
		lse[r] = math.Log(sum)
		loss += lse[r] - row[t]
		for j, l := range row {
			d[r*v+j] = math.Exp(l - lse[r])
		}
		d[r*v+int(t)]--
	}
	if mean && count > 0 {
		loss /= float64(count)
		for i := range d {
			d[i] /= float64(count)
		}
	}
	return loss, lse, count, d
}
