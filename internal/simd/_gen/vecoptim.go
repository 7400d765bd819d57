package main

import (
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// vecOptim generates the updates and the sum of squares, which promise the
// same bits everywhere: no FMA, the operations in the order of the Go code.
func vecOptim(v *vec) {
	v.adamW()
	v.sgd()
	v.sumSquares()
}

// field fills a vector with a float32 of the parameter c, a struct.
func (v *vec) field(name string) reg.VecVirtual {
	b, err := v.Param("c").Field(name).Resolve()
	if err != nil {
		panic(err)
	}
	r := v.reg()
	v.VBROADCASTSS(b.Addr, r)
	return r
}

func (v *vec) adamW() {
	v.fn("adamW", "func(param, grad, m, v []float32, c struct{scale, beta1, rest1, beta2, rest2, root, eps, step, keep float32})",
		"updates as adamWGo does; c is an adamWCoef.")
	param, grad, m, w, n := v.ptr("param"), v.ptr("grad"), v.ptr("m"), v.ptr("v"), v.len("param")
	scale, beta1, rest1, beta2, rest2 := v.field("scale"), v.field("beta1"), v.field("rest1"), v.field("beta2"), v.field("rest2")
	root, eps, step, keep := v.field("root"), v.field("eps"), v.field("step"), v.field("keep")
	v.each(n, 1, func(u int) {
		g, m1, v1, t := v.load(grad, u), v.load(m, u), v.load(w, u), v.reg()
		v.VMULPS(scale, g, g)
		v.VMULPS(beta1, m1, m1)
		v.VMULPS(rest1, g, t)
		v.VADDPS(t, m1, m1)
		v.VMULPS(rest2, g, t)
		v.VMULPS(g, t, t)
		v.VMULPS(beta2, v1, v1)
		v.VADDPS(t, v1, v1)
		v.canonical(m1)
		v.canonical(v1)
		v.store(m1, m, u)
		v.store(v1, w, u)
		v.VSQRTPS(v1, v1)
		v.VMULPS(root, v1, v1)
		v.VADDPS(eps, v1, v1)
		v.VMULPS(step, m1, m1)
		v.VDIVPS(v1, m1, m1)
		p := v.load(param, u)
		v.VMULPS(keep, p, p)
		v.VSUBPS(m1, p, p)
		v.canonical(p)
		v.store(p, param, u)
	})
	v.end()
}

func (v *vec) sgd() {
	v.fn("sgd", "func(param, grad, mom []float32, c struct{scale, momentum, lr, decay float32})", "updates as sgdGo does; c is an sgdCoef.")
	param, grad, mom, n := v.ptr("param"), v.ptr("grad"), v.ptr("mom"), v.len("param")
	scale, momentum, lr, decay := v.field("scale"), v.field("momentum"), v.field("lr"), v.field("decay")
	v.hold(1, canonicalNaN)
	v.each(n, 2, func(u int) {
		p, g, m, t := v.load(param, u), v.load(grad, u), v.load(mom, u), v.reg()
		v.VMULPS(scale, g, g)
		v.VMULPS(decay, p, t)
		v.VADDPS(t, g, g)
		v.VMULPS(momentum, m, m)
		v.VADDPS(g, m, m)
		v.canonical(m)
		v.store(m, mom, u)
		v.VMULPS(lr, m, m)
		v.VSUBPS(m, p, p)
		v.canonical(p)
		v.store(p, param, u)
	})
	v.end()
}

// sumSquares keeps 16 lanes of float64: four registers in AVX2, two in AVX-512.
func (v *vec) sumSquares() {
	v.fn("sumSquares", "func(x []float32) float64", "is the sum of squares, in the lane order of sumSquaresGo.")
	x, n := v.ptr("x"), v.len("x")
	regs := 32 / v.lanes
	acc := v.zeros(regs)
	add := func(f reg.VecVirtual, u int) { // the float32 in f go to the lanes from u·lanes on
		low, high := v.reg(), v.reg()
		if v.wide() {
			v.VEXTRACTF64X4(U8(1), f, high.AsY())
		} else {
			v.VEXTRACTF128(U8(1), f, high.AsX())
		}
		v.widen(f, low)
		v.widen(high, high)
		for i, d := range []reg.VecVirtual{low, high} {
			a := acc[2*u+i]
			v.VMULPD(d, d, d)
			v.VADDPD(d, a, a)
		}
	}
	v.sixteens(n, func(u int) { add(v.load(x, u), u) })
	if v.wide() {
		v.VADDPD(acc[1], acc[0], acc[0])
		h := v.YMM()
		v.VEXTRACTF64X4(U8(1), acc[0], h)
		v.VADDPD(h, acc[0].AsY(), acc[0].AsY())
	} else {
		v.VADDPD(acc[2], acc[0], acc[0])
		v.VADDPD(acc[3], acc[1], acc[1])
		v.VADDPD(acc[1], acc[0], acc[0])
	}
	r, h := acc[0], v.XMM()
	v.VEXTRACTF128(U8(1), r.AsY(), h)
	v.VADDPD(h, r.AsX(), r.AsX())
	v.VPERMILPD(U8(1), r.AsX(), h)
	v.VADDPD(h, r.AsX(), r.AsX())
	v.result(r, 0)
	v.end()
}

// sixteens runs body over n elements so that element i is in lane i mod 16:
// body(u) handles the lanes from u·v.lanes on.
func (v *vec) sixteens(n reg.Register, body func(u int)) {
	loop, tail, few, done := v.label("sixteen"), v.label("tail"), v.label("few"), v.label("done")
	v.index = v.GP64()
	rest := v.GP64()
	v.XORQ(v.index, v.index)
	v.MOVQ(n, rest)
	v.SUBQ(U8(16), rest)
	v.JLT(LabelRef(tail))
	v.Label(loop)
	for u := range 16 / v.lanes {
		body(u)
	}
	v.ADDQ(U8(16), v.index)
	v.SUBQ(U8(16), rest)
	v.JGE(LabelRef(loop))
	v.Label(tail)
	v.ADDQ(U8(16), rest)
	v.JZ(LabelRef(done))
	if !v.wide() {
		v.SUBQ(U8(8), rest)
		v.JLT(LabelRef(few))
		body(0)
		v.CMPQ(rest, U8(0))
		v.JEQ(LabelRef(done))
		v.maskFor(rest)
		body(1)
		v.mask = nil
		v.JMP(LabelRef(done))
		v.Label(few)
		v.ADDQ(U8(8), rest)
	}
	v.maskFor(rest)
	body(0)
	v.mask = nil
	v.Label(done)
}

// widen converts the lower float32 of f to float64.
func (v *vec) widen(f, to reg.VecVirtual) {
	if v.wide() {
		v.VCVTPS2PD(f.AsY(), to)
		return
	}
	v.VCVTPS2PD(f.AsX(), to)
}
