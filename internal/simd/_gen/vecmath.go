package main

import (
	"math"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// vecMath generates exp, log, tanh, sigmoid, GELU and what softmax and cross
// entropy need.
//
// exp(x) = 2^n·exp(r) with n = round(x/ln2) and r = x − n·ln2, |r| ≤ ln2/2, where
// ln2 is a float32 and its remainder: n·ln2 is subtracted without error by an
// FMA. exp(r) = 1 + r + r²/2 + r³·s(r) with s of degree 3, minimax in the
// relative error of exp (Remez; 2^-28, below the rounding of float32).
func vecMath(v *vec) {
	v.exp()
	v.log()
	v.tanh()
	v.sigmoid()
	v.gelu()
	v.geluGrad()
	v.expSum()
	v.sumExp()
	v.expScale()
}

// Coefficients of s, lowest first.
var expCoef = [...]uint32{0x3e2aaa51, 0x3d2aab45, 0x3c091824, 0x3ab5b6d2}

var (
	log2E  = f32(math.Log2E)
	ln2    = f32(math.Ln2)
	ln2Low = f32(math.Ln2 - float64(float32(math.Ln2)))
	one    = f32(1)
	half   = f32(0.5)
	expLow = f32(-104) // exp of it and below is 0
)

const (
	magic   = 0x4b400000 // 1.5·2^23: added, it leaves the rounded integer in the low bits
	oneBits = 0x3f800000
)

// group is how many chains of these functions run side by side. Two are as fast
// as can be measured, and leave AVX2 registers for a few constants.
const group = 2

// spare is how many registers AVX2 has left for constants beside two chains.
const spare = 5

// holdExp keeps expOf's constants in registers, AVX2 the first few of them.
func (v *vec) holdExp(few int) {
	v.hold(few, log2E, magic, ln2, expCoef[3], ln2Low, expCoef[2], expCoef[1], expCoef[0], half, one)
}

// reduce replaces x by r and returns t, whose low bits hold n; n as a float too.
func (v *vec) reduce(x reg.VecVirtual) (t, n reg.VecVirtual) {
	t, n = v.kcopy(magic), v.reg()
	v.VFMADD231PS(v.k(log2E), x, t)
	v.VSUBPS(v.k(magic), t, n)
	v.VFNMADD231PS(v.k(ln2), n, x)
	v.VFNMADD231PS(v.k(ln2Low), n, x)
	return t, n
}

// horner is c[0] + c[1]·x + …, by FMAs.
func (v *vec) horner(x reg.VecVirtual, c ...uint32) reg.VecVirtual {
	p := v.kcopy(c[len(c)-1])
	for i := len(c) - 2; i >= 0; i-- {
		v.VFMADD213PS(v.k(c[i]), x, p)
	}
	return p
}

// expPoly destroys x; exp(x) = p·2^n, with n in the low bits of t.
func (v *vec) expPoly(x reg.VecVirtual) (p, t reg.VecVirtual) {
	t, _ = v.reduce(x)
	return v.horner(x, expCoef[0], expCoef[1], expCoef[2], expCoef[3]), t
}

// expOf is expPoly with the low terms added.
func (v *vec) expOf(x reg.VecVirtual) (p, t reg.VecVirtual) {
	p, t = v.expPoly(x)
	for _, c := range []uint32{half, one, one} {
		v.VFMADD213PS(v.k(c), x, p)
	}
	return p, t
}

// power turns t, which holds n, into 2^(n+bias).
func (v *vec) power(t reg.VecVirtual, bias int) {
	v.VPSLLD(U8(23), t, t)
	v.VPADDD(v.k(uint32(127+bias)<<23), t, t)
}

// expNegative is exp(x) for x ≤ 0 (up to 40), down to denormals and 0: the
// power of two is 2^64 too large at first, so that it's never denormal.
func (v *vec) expNegative(x reg.VecVirtual) reg.VecVirtual {
	v.VMAXPS(x, v.kreg(expLow), x) // x comes out if it is NaN
	p, t := v.expOf(x)
	v.power(t, 64)
	v.VMULPS(t, p, p)
	v.VMULPS(v.k(f32(0x1p-64)), p, p)
	return p
}

// expClamped is exp(x) for x that is clamped here to where 2^n is normal or
// infinite: about [−87, 88.7], Inf from 88.4 on.
func (v *vec) expClamped(x reg.VecVirtual) reg.VecVirtual {
	v.VMINPS(x, v.kreg(f32(88.7)), x)
	v.VMAXPS(x, v.kreg(f32(-87)), x)
	return v.expInRange(x)
}

// expInRange is exp(x) for |x| ≤ 87.33.
func (v *vec) expInRange(x reg.VecVirtual) reg.VecVirtual {
	p, t := v.expOf(x)
	v.power(t, 0)
	v.VMULPS(t, p, p)
	return p
}

func (v *vec) exp() {
	v.fn("exp", "func(dst, src []float32)", "computes dst = exp(src).")
	dst, src, n := v.ptr("dst"), v.ptr("src"), v.len("dst")
	v.holdExp(spare)
	v.hold(0, f32(89), expLow, oneBits)
	v.each(n, group, func(u int) {
		x := v.load(src, u)
		v.VMINPS(x, v.kreg(f32(89)), x)
		v.VMAXPS(x, v.kreg(expLow), x)
		p, t := v.expOf(x)
		// n is in [−150, 128]: two factors, each within range.
		h := v.reg()
		v.VPSUBD(v.k(magic), t, t)
		v.VPSRAD(U8(1), t, h)
		v.VPSUBD(h, t, t)
		v.power(h, 0)
		v.power(t, 0)
		v.VMULPS(h, p, p)
		v.VMULPS(t, p, p)
		v.store(p, dst, u)
	})
	v.end()
}

// Coefficients of log(1+f) = f − f²/2 + f³·P(f) on [√½−1, √2−1], lowest first:
// minimax in the relative error of log (Remez; 2^-27).
var logCoef = [...]uint32{0x3eaaaaaa, 0xbe800113, 0x3e4cd003, 0xbe2a3923, 0x3e116d22, 0xbe06c2b0, 0x3e02ad36, 0xbd9c592f}

func (v *vec) log() {
	const sqrtHalf, minNormal = 0x3f3504f3, 0x00800000
	v.fn("log", "func(dst, src []float32)", "computes dst = log(src).")
	dst, src, n := v.ptr("dst"), v.ptr("src"), v.len("dst")
	v.hold(0, append(logCoef[:], sqrtHalf, minNormal, one, half, ln2, ln2Low, f32(0x1p23), f32(-23), f32(math.Inf(1)), f32(math.Inf(-1)), canonicalNaN)...)
	v.each(n, group, func(u int) {
		x := v.load(src, u)
		// Denormals are scaled into the normal range; m·2^e = x, m in [√½, √2).
		m, e, scaled := v.reg(), v.reg(), v.reg()
		tiny := v.cmp(lessThan, x, v.k(minNormal))
		v.VMOVAPS(x, m)
		v.VMULPS(v.k(f32(0x1p23)), x, scaled)
		v.blend(tiny, scaled, m)
		v.VPSUBD(v.k(sqrtHalf), m, e)
		v.VPSRAD(U8(23), e, e)
		shifted, shift := v.reg(), v.zero()
		v.VPSLLD(U8(23), e, shifted)
		v.VPSUBD(shifted, m, m)
		v.VCVTDQ2PS(e, e)
		v.blend(tiny, v.k(f32(-23)), shift)
		v.VADDPS(shift, e, e)
		v.VSUBPS(v.k(one), m, m) // f, exactly
		p := v.horner(m, logCoef[:]...)
		f2 := v.reg()
		v.VMULPS(m, m, f2)
		v.VMULPS(m, p, p)
		v.VMULPS(f2, p, p)
		v.VFMADD231PS(v.k(ln2Low), e, p)
		v.VFNMADD231PS(v.k(half), f2, p)
		v.VADDPS(p, m, m)
		v.VFMADD231PS(v.k(ln2), e, m)
		v.logSpecials(x, m)
		v.store(m, dst, u)
	})
	v.end()
}

// logSpecials puts −Inf where x is zero, Inf where it is Inf, and NaN where it
// is negative or NaN.
func (v *vec) logSpecials(x, y reg.VecVirtual) {
	posInf := f32(math.Inf(1))
	v.blend(v.cmp(equal, x, v.k(0)), v.k(f32(math.Inf(-1))), y)
	v.blend(v.cmp(equal, x, v.k(posInf)), v.k(posInf), y)
	v.blend(v.cmp(lessThan, x, v.k(0)), v.k(canonicalNaN), y)
	v.blend(v.cmp(unordered, x, x), v.k(canonicalNaN), y)
}

// tanh is −e/(2+e) with e = expm1(−2|x|) = 2^n·(exp(r)−1) + (2^n−1), which
// has no cancellation, and the sign of x.
func (v *vec) tanh() {
	v.fn("tanh", "func(dst, src []float32)", "computes dst = tanh(src).")
	dst, src, n := v.ptr("dst"), v.ptr("src"), v.len("dst")
	v.holdExp(spare)
	v.hold(0, signBit, ^uint32(signBit), f32(-2), f32(-20), f32(2), oneBits)
	v.each(n, group, func(u int) {
		x := v.load(src, u)
		a := v.reg()
		v.VANDPS(v.k(^uint32(signBit)), x, a)
		v.VMULPS(v.k(f32(-2)), a, a)
		v.VMAXPS(a, v.kreg(f32(-20)), a)
		p, t := v.expPoly(a)
		v.VFMADD213PS(v.k(half), a, p)
		v.VMULPS(a, p, p)
		v.VFMADD213PS(a, a, p) // exp(r) − 1
		v.power(t, 0)
		e := v.reg()
		v.VSUBPS(v.k(one), t, e)
		v.VFMADD231PS(p, t, e)
		d := v.reg()
		v.VADDPS(v.k(f32(2)), e, d)
		v.VDIVPS(d, e, e)
		v.VANDPS(v.k(^uint32(signBit)), e, e)
		v.VANDPS(v.k(signBit), x, x)
		v.VORPS(x, e, e)
		v.store(e, dst, u)
	})
	v.end()
}

// sigmoid is 1/(1+z) or z/(1+z) with z = exp(−|x|).
func (v *vec) sigmoid() {
	v.fn("sigmoid", "func(dst, src []float32)", "computes dst = 1/(1+exp(−src)).")
	dst, src, n := v.ptr("dst"), v.ptr("src"), v.len("dst")
	v.holdExp(spare)
	v.hold(0, signBit, expLow, f32(0x1p-64), uint32(127+64)<<23, 0)
	v.each(n, group, func(u int) {
		x, a := v.load(src, u), v.reg()
		v.VORPS(v.k(signBit), x, a)
		z := v.expNegative(a)
		num, den := v.kcopy(one), v.reg()
		v.VADDPS(num, z, den)
		v.blend(v.cmp(lessThan, x, v.k(0)), z, num)
		v.VDIVPS(den, num, num)
		v.store(num, dst, u)
	})
	v.end()
}

// Constants of GELU: −2√(2/π), and that times 0.044715 and three times that.
var (
	geluC  = f32(-2 * geluRoot)
	geluA  = f32(-2 * geluRoot * 0.044715)
	geluA3 = f32(-2 * geluRoot * 0.044715 * 3)
)

const geluRoot = 0.7978845608028653558799

func (v *vec) gelu() {
	v.fn("gelu", "func(y, x []float32)", "computes the tanh form of GELU.")
	dst, src, n := v.ptr("y"), v.ptr("x"), v.len("y")
	v.holdExp(spare)
	v.hold(0, geluC, geluA, f32(88.7), f32(-87), oneBits)
	v.each(n, group, func(u int) {
		x := v.load(src, u)
		q, z := v.reg(), v.kcopy(geluC)
		v.VMULPS(x, x, q)
		v.VFMADD231PS(v.k(geluA), q, z)
		v.VMULPS(x, z, z) // −2u
		e := v.expClamped(z)
		v.VADDPS(v.k(one), e, e)
		v.VDIVPS(e, x, x)
		v.store(x, dst, u)
	})
	v.end()
}

func (v *vec) geluGrad() {
	v.fn("geluGrad", "func(dx, x, dy []float32)", "computes dx = dy·gelu′(x).")
	dst, src, grad, n := v.ptr("dx"), v.ptr("x"), v.ptr("dy"), v.len("dx")
	v.holdExp(spare)
	v.hold(0, geluC, geluA, geluA3, f32(10), f32(-10), oneBits)
	v.each(n, group, func(u int) {
		// Beyond ±10 the slope is 0 or 1, and nothing below overflows within.
		x := v.load(src, u)
		v.VMINPS(x, v.kreg(f32(10)), x)
		v.VMAXPS(x, v.kreg(f32(-10)), x)
		q, z, dz := v.reg(), v.kcopy(geluC), v.kcopy(geluC)
		v.VMULPS(x, x, q)
		v.VFMADD231PS(v.k(geluA), q, z)
		v.VFMADD231PS(v.k(geluA3), q, dz) // −2u′
		v.VMULPS(x, z, z)
		v.VMULPS(x, dz, dz)
		e, d := v.expInRange(z), v.reg()
		v.VADDPS(v.k(one), e, d)
		s := v.reg()
		v.VDIVPS(d, v.kreg(one), s)
		v.VMULPS(s, e, e)
		v.VMULPS(s, e, e) // s·(1−s)
		v.VFNMADD231PS(dz, e, s)
		dy := v.load(grad, u)
		v.VMULPS(dy, s, s)
		v.store(s, dst, u)
	})
	v.end()
}

// shifted begins a kernel that computes exp(src − shift).
func (v *vec) shifted(shift string) (src reg.Register, exp func(u int) reg.VecVirtual) {
	src = v.ptr("src")
	s := v.scalar(shift)
	v.holdExp(spare)
	v.hold(0, expLow, f32(0x1p-64), uint32(127+64)<<23)
	return src, func(u int) reg.VecVirtual {
		x := v.load(src, u)
		v.VSUBPS(s, x, x)
		return v.expNegative(x)
	}
}

func (v *vec) expSum() {
	v.fn("expSum", "func(dst, src []float32, max float32) float32", "computes dst = exp(src − max) and its sum.")
	dst, n := v.ptr("dst"), v.len("dst")
	_, exp := v.shifted("max")
	acc := v.zeros(group)
	v.each(n, len(acc), func(u int) {
		p := exp(u)
		v.store(p, dst, u)
		v.zeroRest(p)
		v.VADDPS(p, acc[u], acc[u])
	})
	v.result(v.fold(v.VADDPS, acc), 0)
	v.end()
}

func (v *vec) sumExp() {
	v.fn("sumExp", "func(src []float32, max float32) float32", "is the sum of exp(src − max).")
	n := v.len("src")
	_, exp := v.shifted("max")
	acc := v.zeros(group)
	v.each(n, len(acc), func(u int) {
		p := exp(u)
		v.zeroRest(p)
		v.VADDPS(p, acc[u], acc[u])
	})
	v.result(v.fold(v.VADDPS, acc), 0)
	v.end()
}

func (v *vec) expScale() {
	v.fn("expScale", "func(dst, src []float32, shift, factor float32)", "computes dst = factor·exp(src − shift).")
	dst, n, f := v.ptr("dst"), v.len("dst"), v.scalar("factor")
	_, exp := v.shifted("shift")
	v.each(n, group, func(u int) {
		p := exp(u)
		v.VMULPS(f, p, p)
		v.store(p, dst, u)
	})
	v.end()
}
