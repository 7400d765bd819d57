package simd

// The element-wise kernels below take slices of one length, of any alignment.
// They panic if a source is shorter than dst; longer ones are cut. dst may be
// one of the sources; other overlaps give undefined values. Arguments reach
// assembly through function pointers, so the compiler moves a local array that
// is passed here to the heap: pass slices of memory that lives longer.

// Add computes dst = a + b.
func (k *Kernels) Add(dst, a, b []float32) { k.vec.add(dst, a[:len(dst)], b[:len(dst)]) }

// Sub computes dst = a − b.
func (k *Kernels) Sub(dst, a, b []float32) { k.vec.sub(dst, a[:len(dst)], b[:len(dst)]) }

// Mul computes dst = a·b, element by element.
func (k *Kernels) Mul(dst, a, b []float32) { k.vec.mul(dst, a[:len(dst)], b[:len(dst)]) }

// Div computes dst = a / b, element by element, correctly rounded.
func (k *Kernels) Div(dst, a, b []float32) { k.vec.div(dst, a[:len(dst)], b[:len(dst)]) }

// AddScalar computes dst = a + s.
func (k *Kernels) AddScalar(dst, a []float32, s float32) { k.vec.addScalar(dst, a[:len(dst)], s) }

// Scale computes dst = a·s. The bits are the same on every instruction set; a
// NaN comes out as the canonical one, 0x7fc00000.
func (k *Kernels) Scale(dst, a []float32, s float32) { k.vec.scale(dst, a[:len(dst)], s) }

// Axpy computes dst += s·a. Whether the product is rounded before the sum
// depends on the instruction set.
func (k *Kernels) Axpy(dst, a []float32, s float32) { k.vec.axpy(dst, a[:len(dst)], s) }

// Exp computes dst = exp(src) to within 1 ulp (0.84 measured over all float32
// at a stride, as for the functions below), denormal results included.
func (k *Kernels) Exp(dst, src []float32) { k.vec.exp(dst, src[:len(dst)]) }

// Log computes dst = log(src) to within 1 ulp (0.79): −Inf for ±0, NaN below 0.
func (k *Kernels) Log(dst, src []float32) { k.vec.log(dst, src[:len(dst)]) }

// Tanh computes dst = tanh(src) to within 3 ulp (2.5), denormals and the sign of
// zero kept.
func (k *Kernels) Tanh(dst, src []float32) { k.vec.tanh(dst, src[:len(dst)]) }

// Sigmoid computes dst = 1/(1+exp(−src)) to within 3 ulp (2.1), denormal
// results included.
func (k *Kernels) Sigmoid(dst, src []float32) { k.vec.sigmoid(dst, src[:len(dst)]) }

// Sqrt computes dst = √src, correctly rounded.
func (k *Kernels) Sqrt(dst, src []float32) { k.vec.sqrt(dst, src[:len(dst)]) }

// Square computes dst = src².
func (k *Kernels) Square(dst, src []float32) { k.vec.square(dst, src[:len(dst)]) }

// Cube computes dst = src³ as (src·src)·src.
func (k *Kernels) Cube(dst, src []float32) { k.vec.cube(dst, src[:len(dst)]) }

// Neg computes dst = −src; zeros and NaNs change their sign, too.
func (k *Kernels) Neg(dst, src []float32) { k.vec.neg(dst, src[:len(dst)]) }

// Inverse computes dst = 1/src, correctly rounded.
func (k *Kernels) Inverse(dst, src []float32) { k.vec.inverse(dst, src[:len(dst)]) }

// ReLU computes dst = src where src is not below zero, else 0. NaN stays NaN.
func (k *Kernels) ReLU(dst, src []float32) { k.vec.relu(dst, src[:len(dst)]) }

// GELU computes the tanh form of the Gaussian error linear unit,
// y = x/2·(1+tanh(u)) with u = √(2/π)·(x + 0.044715·x³) (Hendrycks and Gimpel,
// 2016), as x/(1+exp(−2u)), which is the same and has no cancellation. The error
// is below 4 ulp or 1e-7, whichever is more (8.5e-8 in the negative tail).
func (k *Kernels) GELU(y, x []float32) { k.vec.gelu(y, x[:len(y)]) }

// GELUGrad computes dx = dy·gelu′(x), with an error in gelu′ below 2e-6.
func (k *Kernels) GELUGrad(dx, x, dy []float32) { k.vec.geluGrad(dx, x[:len(dx)], dy[:len(dx)]) }

// Max is the largest element. NaNs are passed over; −Inf when nothing is left.
func (k *Kernels) Max(x []float32) float32 { return k.vec.max(x) }

// ExpSum computes dst = exp(src − max) and returns the sum of dst, for
// max ≥ every element of src. With Scale by the inverse it is a softmax.
func (k *Kernels) ExpSum(dst, src []float32, max float32) float32 {
	return k.vec.expSum(dst, src[:len(dst)], max)
}

// CrossEntropyRow is log Σ exp(logits), the log-sum-exp of one row, computed
// around its maximum. The loss of the row is that minus the target's logit.
// It is NaN if a logit is NaN or +Inf, or if all are −Inf.
func (k *Kernels) CrossEntropyRow(logits []float32) float32 {
	m := k.vec.max(logits)
	return m + log32(k.vec.sumExp(logits, m))
}

// CrossEntropyGradRow computes dlogits = scale·(softmax(logits) − onehot(target))
// from lse, the row's CrossEntropyRow. A target of −1 marks an ignored row,
// whose gradient is zero. dlogits may be logits.
func (k *Kernels) CrossEntropyGradRow(dlogits, logits []float32, lse, scale float32, target int) {
	if target < 0 {
		clear(dlogits)
		return
	}
	k.vec.expScale(dlogits, logits[:len(dlogits)], lse, scale)
	dlogits[target] -= scale
}

// ColSum adds the columns of x to dst: dst[j] += Σ_i x[i·cols+j] for rows rows,
// in order of i. len(dst) may be less than cols, the distance between rows: a
// thread takes the columns [c, c+n) as ColSum(dst[c:c+n], x[c:], rows, cols),
// and the sums don't depend on how columns are dealt out.
func (k *Kernels) ColSum(dst, x []float32, rows, cols int) {
	if rows == 0 || len(dst) == 0 {
		return
	}
	k.vec.colSum(dst, x[:(rows-1)*cols+len(dst)], rows, cols)
}
