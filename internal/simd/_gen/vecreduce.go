package main

import (
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// combination is a reduction of two vectors; the result is in a, NaNs canonical.
type combination struct {
	name string
	f    func(v *vec, a, b reg.VecVirtual)
}

var combinations = []combination{
	{"Sum", func(v *vec, a, b reg.VecVirtual) { v.VADDPS(b, a, a); v.canonical(a) }},
	{"Min", func(v *vec, a, b reg.VecVirtual) { v.extreme(a, b, v.VMINPS, v.VORPS) }},
	{"Max", func(v *vec, a, b reg.VecVirtual) { v.extreme(a, b, v.VMAXPS, v.VANDPS) }},
	{"Prod", func(v *vec, a, b reg.VecVirtual) { v.VMULPS(b, a, a); v.canonical(a) }},
}

// extreme is the minimum or maximum. The instructions return their second
// source for two zeros; both orders, combined by or (and), give −0 (+0) if there
// is one, and change nothing else.
func (v *vec) extreme(a, b reg.VecVirtual, op, zeros func(...Op)) {
	nan, c := v.cmp(unordered, a, b), v.reg()
	op(a, b, c)
	op(b, a, a)
	zeros(c, a, a)
	v.blend(nan, v.k(canonicalNaN), a)
}

// vecReduce generates the reductions of collectives.
func vecReduce(v *vec) {
	for _, c := range combinations {
		v.fn("reduceF32"+c.name, "func(dst, a, b []float32)", "combines float32.")
		dst, a, b, n := v.ptr("dst"), v.ptr("a"), v.ptr("b"), v.len("dst")
		v.hold(1, canonicalNaN)
		v.each(n, 2, func(u int) {
			x, y := v.load(a, u), v.load(b, u)
			c.f(v, x, y)
			v.store(x, dst, u)
		})
		v.end()
		v.reduceHalf("reduceF16"+c.name, "float16", c, v.loadF16, v.storeF16)
		v.reduceHalf("reduceBF16"+c.name, "bfloat16", c, v.loadBF16, v.storeBF16)
	}
	v.divideHalf("divideF16", "float16", v.loadF16, v.storeF16)
	v.divideHalf("divideBF16", "bfloat16", v.loadBF16, v.storeBF16)
}

func (v *vec) divideHalf(name, what string, load func(reg.Register) reg.VecVirtual, store func(reg.VecVirtual, reg.Register)) {
	v.fn(name, "func(dst, src []uint16, s float32)", "divides "+what+" in float32; whole vectors only.")
	dst, src, n, s := v.ptr("dst"), v.ptr("src"), v.len("dst"), v.scalar("s")
	v.hold(3, canonicalNaN, 1, 0x7fff)
	v.whole(n, func() {
		x := load(src)
		v.VDIVPS(s, x, x)
		v.canonical(x)
		store(x, dst)
	})
	v.end()
}

func (v *vec) reduceHalf(name, what string, c combination, load func(reg.Register) reg.VecVirtual, store func(reg.VecVirtual, reg.Register)) {
	v.fn(name, "func(dst, a, b []uint16)", "combines "+what+" in float32; whole vectors only.")
	dst, a, b, n := v.ptr("dst"), v.ptr("a"), v.ptr("b"), v.len("dst")
	v.hold(3, canonicalNaN, 1, 0x7fff)
	v.whole(n, func() {
		x, y := load(a), load(b)
		c.f(v, x, y)
		store(x, dst)
	})
	v.end()
}
