package asmsim

import "math"

// Floating point as x86 does it: rounding to nearest, denormals kept. An
// invalid operation gives defaultNaN; otherwise the first NaN operand passes.
const (
	defaultNaN = 0xffc00000
	quietBit   = 0x00400000
)

func isNaN(x uint32) bool { return x&0x7fffffff > 0x7f800000 }

// nan32 returns the NaN that an operation on these operands gives, if one is NaN.
func nan32(xs ...uint32) (uint32, bool) {
	for _, x := range xs {
		if isNaN(x) {
			return x | quietBit, true
		}
	}
	return 0, false
}

// bits32 is a result that isn't due to a NaN operand.
func bits32(f float32) uint32 {
	if f != f {
		return defaultNaN
	}
	return math.Float32bits(f)
}

// float32Op is an operation on two float32.
func float32Op(f func(x, y float32) float32) func(x, y uint32) uint32 {
	return func(x, y uint32) uint32 {
		if n, ok := nan32(x, y); ok {
			return n
		}
		return bits32(f(math.Float32frombits(x), math.Float32frombits(y)))
	}
}

// max32 and min32 return y if either is NaN or both are zero.
func max32(x, y uint32) uint32 {
	if math.Float32frombits(x) > math.Float32frombits(y) {
		return x
	}
	return y
}

func min32(x, y uint32) uint32 {
	if math.Float32frombits(x) < math.Float32frombits(y) {
		return x
	}
	return y
}

// fma32 is x·y + z with one rounding. The product is exact in float64; the sum
// is rounded to odd there, so that the second rounding is right (Boldo and
// Melquiond, «Emulation of FMA and correctly rounded sums», 2008).
func fma32(x, y, z uint32) uint32 {
	if n, ok := nan32(x, y, z); ok {
		return n
	}
	p := float64(math.Float32frombits(x)) * float64(math.Float32frombits(y))
	c := float64(math.Float32frombits(z))
	s := p + c
	if math.IsInf(s, 0) || s != s {
		return bits32(float32(s))
	}
	t := s - p
	if e := (p - (s - t)) + (c - t); e != 0 {
		if b := math.Float64bits(s); b&1 == 0 {
			if (e > 0) == (s > 0) {
				b++
			} else {
				b--
			}
			s = math.Float64frombits(b)
		}
	}
	return bits32(float32(s))
}

// compare32 is predicate 0 … 31 of VCMPPS. Those from 16 on differ only in
// which of them signal.
func compare32(predicate int64, x, y uint32) bool {
	a, b := math.Float32frombits(x), math.Float32frombits(y)
	unordered := isNaN(x) || isNaN(y)
	switch predicate & 15 {
	case 0:
		return a == b
	case 1:
		return a < b
	case 2:
		return a <= b
	case 3:
		return unordered
	case 4:
		return a != b // true if unordered
	case 5:
		return !(a < b)
	case 6:
		return !(a <= b)
	case 7:
		return !unordered
	case 8:
		return a == b || unordered
	case 9:
		return !(a >= b)
	case 10:
		return !(a > b)
	case 12:
		return a < b || a > b
	case 13:
		return a >= b
	case 14:
		return a > b
	}
	return predicate&15 == 15
}

// widen16 is the float32 of a float16.
func widen16(h uint16) uint32 {
	sign, exp, frac := uint32(h>>15)<<31, uint32(h>>10&31), uint32(h&0x3ff)
	switch exp {
	case 31:
		if frac != 0 {
			frac |= 0x200
		}
		return sign | 0x7f800000 | frac<<13
	case 0:
		return sign | math.Float32bits(float32(frac)*0x1p-24)
	}
	return sign | (exp+112)<<23 | frac<<13
}

// narrow16 rounds a float32 to the nearest float16, ties to even.
func narrow16(x uint32) uint16 {
	sign, abs := uint16(x>>16)&0x8000, x&0x7fffffff
	switch {
	case abs > 0x7f800000:
		return sign | 0x7e00 | uint16(abs>>13)&0x3ff
	case abs >= 0x477ff000: // rounds to 2^16 or more
		return sign | 0x7c00
	case abs < 0x38800000: // denormal: count units of 2^-24
		return sign | uint16(math.RoundToEven(float64(math.Float32frombits(abs))*0x1p24))
	}
	return sign | uint16((abs-112<<23+0xfff+abs>>13&1)>>13)
}
