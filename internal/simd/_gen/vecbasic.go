package main

import (
	"math"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// vecBasic generates element-wise arithmetic, the maximum and column sums.
func vecBasic(v *vec) {
	v.binary("add", "computes dst = a + b.", func(a, b reg.VecVirtual) { v.VADDPS(b, a, a) })
	v.binary("sub", "computes dst = a − b.", func(a, b reg.VecVirtual) { v.VSUBPS(b, a, a) })
	v.binary("mul", "computes dst = a·b.", func(a, b reg.VecVirtual) { v.VMULPS(b, a, a) })
	v.binary("div", "computes dst = a / b.", func(a, b reg.VecVirtual) { v.VDIVPS(b, a, a) })
	v.byScalar("addScalar", "computes dst = a + s.", func(a, s reg.VecVirtual) { v.VADDPS(s, a, a) })
	v.byScalar("scale", "computes dst = a·s with canonical NaNs.", func(a, s reg.VecVirtual) {
		v.VMULPS(s, a, a)
		v.canonical(a)
	})
	v.byScalar("divide", "computes dst = a / s with canonical NaNs.", func(a, s reg.VecVirtual) {
		v.VDIVPS(s, a, a)
		v.canonical(a)
	})
	v.axpy()
	v.unary("sqrt", "computes dst = √src.", func(x reg.VecVirtual) { v.VSQRTPS(x, x) })
	v.unary("square", "computes dst = src².", func(x reg.VecVirtual) { v.VMULPS(x, x, x) })
	v.unary("cube", "computes dst = (src·src)·src.", func(x reg.VecVirtual) {
		q := v.reg()
		v.VMULPS(x, x, q)
		v.VMULPS(x, q, x)
	})
	v.unary("neg", "computes dst = −src.", func(x reg.VecVirtual) { v.VXORPS(v.k(signBit), x, x) })
	v.unary("inverse", "computes dst = 1/src.", func(x reg.VecVirtual) { v.VDIVPS(x, v.kreg(f32(1)), x) })
	v.unary("relu", "computes dst = max(src, 0), NaN for NaN.", func(x reg.VecVirtual) {
		// The second source comes out if either is NaN or both are zero.
		v.VMAXPS(x, v.kreg(0), x)
	})
	v.maximum()
	v.colSum()
}

const signBit = 0x80000000

// basicUnroll vectors an iteration hide the loop's own instructions.
const basicUnroll = 4

func (v *vec) binary(name, doc string, f func(a, b reg.VecVirtual)) {
	v.fn(name, "func(dst, a, b []float32)", doc)
	dst, a, b, n := v.ptr("dst"), v.ptr("a"), v.ptr("b"), v.len("dst")
	v.each(n, basicUnroll, func(u int) {
		x, y := v.load(a, u), v.load(b, u)
		f(x, y)
		v.store(x, dst, u)
	})
	v.end()
}

func (v *vec) byScalar(name, doc string, f func(a, s reg.VecVirtual)) {
	v.fn(name, "func(dst, a []float32, s float32)", doc)
	dst, a, n, s := v.ptr("dst"), v.ptr("a"), v.len("dst"), v.scalar("s")
	v.hold(1, canonicalNaN)
	v.each(n, basicUnroll, func(u int) {
		x := v.load(a, u)
		f(x, s)
		v.store(x, dst, u)
	})
	v.end()
}

func (v *vec) axpy() {
	v.fn("axpy", "func(dst, a []float32, s float32)", "computes dst += s·a.")
	dst, a, n, s := v.ptr("dst"), v.ptr("a"), v.len("dst"), v.scalar("s")
	v.each(n, basicUnroll, func(u int) {
		x, y := v.load(a, u), v.load(dst, u)
		v.VFMADD231PS(x, s, y)
		v.store(y, dst, u)
	})
	v.end()
}

func (v *vec) unary(name, doc string, f func(x reg.VecVirtual)) {
	v.fn(name, "func(dst, src []float32)", doc)
	dst, src, n := v.ptr("dst"), v.ptr("src"), v.len("dst")
	v.hold(3, signBit, f32(1), 0)
	v.each(n, basicUnroll, func(u int) {
		x := v.load(src, u)
		f(x)
		v.store(x, dst, u)
	})
	v.end()
}

func (v *vec) maximum() {
	v.fn("max", "func(x []float32) float32", "is the largest element, NaNs passed over.")
	x, n := v.ptr("x"), v.len("x")
	negInf := f32(math.Inf(-1))
	acc := make([]reg.VecVirtual, 4)
	for i := range acc {
		acc[i] = v.kcopy(negInf)
	}
	v.each(n, len(acc), func(u int) {
		if v.mask == nil {
			y := v.load(x, u)
			v.VMAXPS(acc[u], y, acc[u]) // the accumulator comes out if y is NaN
			return
		}
		y, lost := v.kcopy(negInf), v.load(x, u)
		v.blend(v.mask, lost, y)
		v.VMAXPS(acc[u], y, acc[u])
	})
	v.result(v.fold(v.VMAXPS, acc), 0)
	v.end()
}

func (v *vec) colSum() {
	v.fn("colSum", "func(dst, x []float32, rows, stride int)", "adds columns to dst; see Kernels.ColSum.")
	dst, x, n := v.ptr("dst"), v.ptr("x"), v.len("dst")
	rows, stride := v.Load(v.Param("rows"), v.GP64()), v.Load(v.Param("stride"), v.GP64())
	v.SHLQ(U8(2), stride)
	v.blocks(n, 8, func(vecs int) {
		acc := make([]reg.VecVirtual, vecs)
		for u := range acc {
			acc[u] = v.load(dst, u)
		}
		v.down(rows, []reg.Register{x}, stride, func(p []reg.Register) {
			for u := range acc {
				y := v.load(p[0], u)
				v.VADDPS(y, acc[u], acc[u])
			}
		})
		for u := range acc {
			v.store(acc[u], dst, u)
		}
	})
	v.end()
}

// down runs body once a row, with pointers that move down by stride bytes.
func (v *vec) down(rows reg.Register, from []reg.Register, stride reg.Register, body func(p []reg.Register)) {
	loop := v.label("row")
	left := v.GP64()
	v.MOVQ(rows, left)
	p := make([]reg.Register, len(from))
	for i, f := range from {
		q := v.GP64()
		v.MOVQ(f, q)
		p[i] = q
	}
	v.Label(loop)
	body(p)
	for _, q := range p {
		v.ADDQ(stride, q)
	}
	v.DECQ(left)
	v.JNZ(LabelRef(loop))
}
