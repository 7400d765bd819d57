package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// The constants of SplitMix64, as device.DropoutBits has them: the step between
// counters and the two multipliers of the finaliser.
const (
	golden = 0x9e3779b97f4a7c15
	mixA   = 0xbf58476d1ce4e5b9
	mixB   = 0x94d049bb133111eb
)

// quads is a constant of 64 bits, 64 bytes of it.
func (v *vec) quads(q uint64) Mem {
	words := make([]Constant, 8)
	for i := range words {
		words[i] = U64(q)
	}
	return v.global(fmt.Sprintf("q%016x", q), words)
}

// vecDropout generates dropout. The bits of lanes elements come from two vectors
// of 64-bit counters. Taking the upper half of each (VSHUFPS) works within 128
// bits, so the first vector holds elements 0 1 4 5 8 9 …, the second 2 3 6 7 ….
func vecDropout(v *vec) {
	v.fn("dropout", "func(y, x []float32, key uint64, i0 int, threshold uint32, keep float32)", "drops as dropoutGo does.")
	y, x, n, keep := v.ptr("y"), v.ptr("x"), v.len("y"), v.scalar("keep")
	threshold := v.scalar("threshold")
	counter := v.counters()
	v.each(n, 1, func(u int) {
		first, second := v.reg(), v.reg()
		v.VMOVUPS(counter, first)
		v.VPADDQ(v.quads(elements(2)), counter, second)
		v.mix(first)
		v.mix(second)
		bits, low := v.reg(), v.reg()
		v.VSHUFPS(U8(0b11011101), second, first, bits)
		// bits ≥ threshold, unsigned: their maximum is bits.
		v.VPMAXUD(threshold, bits, low)
		z := v.load(x, u)
		v.VDIVPS(keep, z, z)
		v.zeroUnlessEqual(low, bits, z)
		v.store(z, y, u)
		v.VPADDQ(v.quads(elements(v.lanes)), counter, counter)
	})
	v.end()
}

// elements is what a counter advances by for n elements, modulo 2^64.
func elements(n int) uint64 { return uint64(n) * golden }

// counters is key + i·golden for the elements of the first vector.
func (v *vec) counters() reg.VecVirtual {
	start, g := v.Load(v.Param("i0"), v.GP64()), v.GP64()
	v.MOVQ(U64(golden), g)
	v.IMULQ(g, start)
	key := v.Load(v.Param("key"), v.GP64())
	v.ADDQ(key, start)
	s, c := v.XMM(), v.reg()
	v.VMOVQ(start, s)
	v.VPBROADCASTQ(s, c)
	words := make([]Constant, 8)
	for i := range words {
		words[i] = U64(elements(i/2*4 + i%2))
	}
	v.VPADDQ(v.global("elements", words), c, c)
	return c
}

// mix is SplitMix64's finaliser.
func (v *vec) mix(z reg.VecVirtual) {
	for _, m := range []struct {
		shift  uint8
		factor uint64
	}{{30, mixA}, {27, mixB}, {31, 0}} {
		t := v.reg()
		v.VPSRLQ(U8(m.shift), z, t)
		v.VXORPS(t, z, z)
		if m.factor != 0 {
			v.mul64(z, m.factor)
		}
	}
}

// mul64 multiplies by a constant modulo 2^64, from products of 32-bit halves.
func (v *vec) mul64(z reg.VecVirtual, factor uint64) {
	low, cross, high := v.reg(), v.reg(), v.reg()
	v.VPSRLQ(U8(32), z, high)
	v.VPMULUDQ(v.quads(factor&(1<<32-1)), high, high)
	v.VPMULUDQ(v.quads(factor>>32), z, cross)
	v.VPMULUDQ(v.quads(factor&(1<<32-1)), z, low)
	v.VPADDQ(high, cross, cross)
	v.VPSLLQ(U8(32), cross, cross)
	v.VPADDQ(cross, low, z)
}

// zeroUnlessEqual clears the elements of r where the integers a and b differ.
func (v *vec) zeroUnlessEqual(a, b, r reg.VecVirtual) {
	if v.wide() {
		k := v.K()
		v.VPCMPEQD(a, b, k)
		v.VMOVUPS_Z(r, k, r)
		return
	}
	m := v.reg()
	v.VPCMPEQD(a, b, m)
	v.VANDPS(m, r, r)
}
