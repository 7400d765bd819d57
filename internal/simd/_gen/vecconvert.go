package main

import (
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// vecConvert generates the conversions between float32 and the two halves. All
// of them handle whole vectors only.
func vecConvert(v *vec) {
	v.convert("f32ToBF16", "func(dst []uint16, src []float32)", func(dst, src reg.Register) {
		x, nan := v.load(src, 0), v.reg()
		isNaN := v.cmp(unordered, x, x)
		v.VPSRLD(U8(16), x, nan)
		v.VORPS(v.k(0x40), nan, nan)
		v.roundBF16(x)
		v.blend(isNaN, nan, x)
		v.storeWords(x, dst)
	})
	v.convert("bf16ToF32", "func(dst []float32, src []uint16)", func(dst, src reg.Register) {
		v.store(v.loadBF16(src), dst, 0)
	})
	v.convert("f32ToF16", "func(dst []uint16, src []float32)", func(dst, src reg.Register) {
		v.storeF16(v.load(src, 0), dst)
	})
	v.convert("f16ToF32", "func(dst []float32, src []uint16)", func(dst, src reg.Register) {
		v.store(v.loadF16(src), dst, 0)
	})
}

func (v *vec) convert(name, signature string, body func(dst, src reg.Register)) {
	v.fn(name, signature, "converts whole vectors.")
	dst, src, n := v.ptr("dst"), v.ptr("src"), v.len("dst")
	v.hold(3, 1, 0x7fff, 0x40)
	v.whole(n, func() { body(dst, src) })
	v.end()
}

// words is where a vector's 16-bit elements lie.
func (v *vec) words(p reg.Register) Mem { return Mem{Base: p, Index: v.index, Scale: 2} }

func (v *vec) loadF16(p reg.Register) reg.VecVirtual {
	r := v.reg()
	v.VCVTPH2PS(v.words(p), r)
	return r
}

// storeF16 rounds to nearest even, whatever the control register says.
func (v *vec) storeF16(r reg.VecVirtual, p reg.Register) { v.VCVTPS2PH(U8(0), r, v.words(p)) }

func (v *vec) loadBF16(p reg.Register) reg.VecVirtual {
	r := v.reg()
	v.VPMOVZXWD(v.words(p), r)
	v.VPSLLD(U8(16), r, r)
	return r
}

// storeBF16 rounds to nearest even. NaNs must be canonical.
func (v *vec) storeBF16(r reg.VecVirtual, p reg.Register) {
	v.roundBF16(r)
	v.storeWords(r, p)
}

// roundBF16 leaves in each element the upper half, rounded to nearest even;
// wrong for NaNs that aren't canonical.
func (v *vec) roundBF16(r reg.VecVirtual) {
	odd := v.reg()
	v.VPSRLD(U8(16), r, odd)
	v.VANDPS(v.k(1), odd, odd)
	v.VPADDD(v.k(0x7fff), r, r)
	v.VPADDD(odd, r, r)
	v.VPSRLD(U8(16), r, r)
}

// storeWords stores the lower half of each element, whose upper half is zero.
func (v *vec) storeWords(r reg.VecVirtual, p reg.Register) {
	if v.wide() {
		v.VPMOVDW(r, v.words(p))
		return
	}
	v.VPACKUSDW(r, r, r) // within 128-bit lanes: quadwords 0 and 2 are ours
	v.VPERMQ(U8(0b1000), r, r)
	v.VMOVUPS(r.AsX(), v.words(p))
}
