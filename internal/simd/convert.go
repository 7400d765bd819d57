package simd

import "math"

// F32ToBF16 rounds src to bfloat16, to nearest even, into dst of the same
// length. Infinities stay, what is too large becomes one, denormals are kept;
// a NaN keeps its sign and upper payload and becomes quiet. The same bits on
// every instruction set, as for all conversions.
func (k *Kernels) F32ToBF16(dst []uint16, src []float32) { k.vec.f32ToBF16(dst, src[:len(dst)]) }

// BF16ToF32 widens src, exactly.
func (k *Kernels) BF16ToF32(dst []float32, src []uint16) { k.vec.bf16ToF32(dst, src[:len(dst)]) }

// F32ToF16 rounds src to float16 (IEEE 754 binary16), to nearest even, as
// F32ToBF16 does: beyond 65504 (from 65520) an infinity, denormals are kept.
func (k *Kernels) F32ToF16(dst []uint16, src []float32) { k.vec.f32ToF16(dst, src[:len(dst)]) }

// F16ToF32 widens src, exactly; a signalling NaN becomes quiet.
func (k *Kernels) F16ToF32(dst []float32, src []uint16) { k.vec.f16ToF32(dst, src[:len(dst)]) }

func narrowGo(f func(float32) uint16) func([]uint16, []float32) {
	return func(dst []uint16, src []float32) {
		for i := range dst {
			dst[i] = f(src[i])
		}
	}
}

func widenGo(f func(uint16) float32) func([]float32, []uint16) {
	return func(dst []float32, src []uint16) {
		for i := range dst {
			dst[i] = f(src[i])
		}
	}
}

func bf16FromF32(x float32) uint16 {
	b := math.Float32bits(x)
	if b&0x7fffffff > 0x7f800000 {
		return uint16(b>>16) | 0x40
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

func f32FromBF16(h uint16) float32 { return math.Float32frombits(uint32(h) << 16) }

func f16FromF32(x float32) uint16 {
	b := math.Float32bits(x)
	sign := uint16(b >> 16 & 0x8000)
	b &= 0x7fffffff
	switch {
	case b > 0x7f800000: // NaN
		return sign | 0x7e00 | uint16(b>>13&0x3ff)
	case b >= 0x47800000: // 65536 and more
		return sign | 0x7c00
	case b < 0x38800000: // below 2^-14: adding ½ rounds to multiples of 2^-24
		return sign | uint16(math.Float32bits(math.Float32frombits(b)+0.5)-0x3f000000)
	}
	return sign | uint16((b-112<<23+0xfff+b>>13&1)>>13)
}

func f32FromF16(h uint16) float32 {
	sign := uint32(h&0x8000) << 16
	exp, frac := h>>10&31, uint32(h&0x3ff)
	switch {
	case exp == 31 && frac != 0:
		return math.Float32frombits(sign | 0x7fc00000 | frac<<13)
	case exp == 31:
		return math.Float32frombits(sign | 0x7f800000)
	case exp == 0:
		return math.Float32frombits(sign | math.Float32bits(float32(frac)*0x1p-24))
	}
	return math.Float32frombits(sign | (uint32(exp)+112)<<23 | frac<<13)
}
