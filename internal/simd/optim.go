package simd

import (
	"math"

	"github.com/tandem-go/tandem/device"
)

// The kernels of this file give the same bits on every instruction set and
// architecture, so that ranks on different machines hold the same parameters.
// They are element-wise, so any split of the work gives these bits, too. That
// rules out fused multiply-adds: every product is rounded before it is added,
// in Go by an explicit conversion. A NaN becomes the canonical one, 0x7fc00000,
// since which payload survives an addition differs between machines.

// adamWCoef holds what AdamW needs of the hyper-parameters, each rounded once:
// the gradient's scale, β and 1−β of the moments, 1/√(1−β2^t), eps,
// lr/(1−β1^t) and 1 − lr·decay. It's an alias since assembly is declared with
// the type spelled out.
type adamWCoef = struct{ scale, beta1, rest1, beta2, rest2, root, eps, step, keep float32 }

// AdamW updates param, m and v with grad, all of one length, by hyper, indexed
// with device.HyperLR and its neighbours (Loshchilov and Hutter, 2019):
//
//	g = grad·scale
//	m = β1·m + (1−β1)·g
//	v = β2·v + ((1−β2)·g)·g
//	param = param·(1−lr·decay) − (lr/(1−β1^t))·m / (√v/√(1−β2^t) + eps)
//
// decay says whether weight decay applies; without it the first factor is 1.
func (k *Kernels) AdamW(param, grad, m, v []float32, hyper []float32, decay bool) {
	n := len(param)
	k.vec.adamW(param, grad[:n], m[:n], v[:n], newAdamWCoef(hyper, decay))
}

func newAdamWCoef(hyper []float32, decay bool) adamWCoef {
	h := hyper[:device.HyperLen]
	lr := float64(h[device.HyperLR])
	c := adamWCoef{
		scale: h[device.HyperScale],
		beta1: h[device.HyperBeta1], rest1: 1 - h[device.HyperBeta1],
		beta2: h[device.HyperBeta2], rest2: 1 - h[device.HyperBeta2],
		root: float32(1 / math.Sqrt(float64(h[device.HyperBias2]))),
		eps:  h[device.HyperEps],
		step: float32(lr / float64(h[device.HyperBias1])),
		keep: 1,
	}
	if decay {
		c.keep = float32(1 - float64(lr*float64(h[device.HyperDecay])))
	}
	return c
}

func adamWGo(param, grad, m, v []float32, c adamWCoef) {
	for i, p := range param {
		g := grad[i] * c.scale
		m1 := canonical(float32(c.beta1*m[i]) + float32(c.rest1*g))
		v1 := canonical(float32(c.beta2*v[i]) + float32(float32(c.rest2*g)*g))
		d := float32(float32(math.Sqrt(float64(v1)))*c.root) + c.eps
		m[i], v[i] = m1, v1
		param[i] = canonical(float32(p*c.keep) - float32(c.step*m1)/d)
	}
}

// sgdCoef holds what SGD needs of the hyper-parameters.
type sgdCoef = struct{ scale, momentum, lr, decay float32 }

// SGD updates param and mom with grad, all of one length, by hyper:
//
//	g = grad·scale + decay·param
//	mom = momentum·mom + g      (HyperBeta1 is the momentum)
//	param = param − lr·mom
//
// as torch.optim.SGD does with dampening 0. decay says whether weight decay
// applies.
func (k *Kernels) SGD(param, grad, mom []float32, hyper []float32, decay bool) {
	h := hyper[:device.HyperLen]
	n := len(param)
	c := sgdCoef{scale: h[device.HyperScale], momentum: h[device.HyperBeta1], lr: h[device.HyperLR]}
	if decay {
		c.decay = h[device.HyperDecay]
	}
	k.vec.sgd(param, grad[:n], mom[:n], c)
}

func sgdGo(param, grad, mom []float32, c sgdCoef) {
	for i, p := range param {
		g := float32(grad[i]*c.scale) + float32(c.decay*p)
		v := canonical(float32(c.momentum*mom[i]) + g)
		mom[i] = v
		param[i] = canonical(p - float32(c.lr*v))
	}
}

// SumSquaresChunk is the number of elements whose squares SumSquares adds up
// on their own. A caller that splits a vector for its threads cuts at multiples
// of it, keeps one partial sum a chunk (SumSquaresChunks) and adds them in
// order: then the bits don't depend on the split.
const SumSquaresChunk = 1 << 14

// SumSquares is Σ x², in float64: the sum, in order, of the sums of chunks of
// SumSquaresChunk elements. Within a chunk, element i goes to lane i mod 16,
// where the (exact) squares are added in order; lanes are then added in halves
// (i and i+8, i and i+4, …). The same bits on every instruction set.
func (k *Kernels) SumSquares(x []float32) float64 {
	var sum float64
	for len(x) > SumSquaresChunk {
		sum += k.vec.sumSquares(x[:SumSquaresChunk])
		x = x[SumSquaresChunk:]
	}
	return canonical64(sum + k.vec.sumSquares(x))
}

// SumSquaresChunks sets dst[i] to the sum of squares of chunk i of x; dst holds
// ⌈len(x)/SumSquaresChunk⌉ elements. Their sum in order, from 0, is SumSquares(x).
func (k *Kernels) SumSquaresChunks(dst []float64, x []float32) {
	for i := 0; len(x) > 0; i++ {
		n := min(len(x), SumSquaresChunk)
		dst[i] = canonical64(k.vec.sumSquares(x[:n]))
		x = x[n:]
	}
}

func sumSquaresGo(x []float32) float64 {
	var lanes [16]float64
	for len(x) >= 16 {
		b := x[:16]
		for j, v := range b {
			w := float64(v)
			lanes[j] += w * w // exact, so fusing changes nothing
		}
		x = x[16:]
	}
	for j, v := range x {
		w := float64(v)
		lanes[j] += w * w
	}
	for h := 8; h > 0; h /= 2 {
		for j := range h {
			lanes[j] += lanes[j+h]
		}
	}
	return lanes[0]
}

// canonical replaces a NaN by the one NaN that these kernels produce.
func canonical(x float32) float32 {
	if x != x {
		return math.Float32frombits(canonicalNaN)
	}
	return x
}

const canonicalNaN = 0x7fc00000

func canonical64(x float64) float64 {
	if x != x {
		return math.Float64frombits(canonicalNaN64)
	}
	return x
}

const canonicalNaN64 = 0x7ff8000000000000
