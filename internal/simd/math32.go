package simd

import "math"

// The functions of one element, for the portable kernels and for single values.
// They compute in float64 with polynomials just good enough for float32, which
// is faster than package math and leaves an error of about half an ulp.

const (
	log2E = 1.44269504088896340736
	ln2   = 0.693147180559945309417

	// expMax and expMin bound the arguments whose exponential is neither +Inf
	// nor zero in float32, with some margin.
	expMax = 89
	expMin = -104
)

// expWide is exp(x) for |x| ≤ 700 with a relative error below 1e-8: Taylor's
// polynomial of degree 7 on [−ln2/2, ln2/2], times a power of two.
func expWide(x float64) float64 {
	const magic = 3 << 51 // adding it leaves a float64 rounded to an integer
	t := x*log2E + magic
	n := t - magic
	r := x - n*ln2
	p := 1.0/720 + r*(1.0/5040)
	p = 1.0/120 + r*p
	p = 1.0/24 + r*p
	p = 1.0/6 + r*p
	p = 0.5 + r*p
	p = 1 + r*p
	p = 1 + r*p
	return p * math.Float64frombits(uint64(int64(n)+1023)<<52)
}

// exp32 is exp(x), correctly rounded but for about one argument in ten.
func exp32(x float32) float32 {
	switch {
	case x != x:
		return x
	case x > expMax:
		return float32(math.Inf(1))
	case x < expMin:
		return 0
	}
	return float32(expWide(float64(x)))
}

func log32(x float32) float32 { return float32(math.Log(float64(x))) }

// tanh32 is tanh(x): Taylor's series near zero, 1 − 2/(exp(2x)+1) elsewhere.
func tanh32(x float32) float32 {
	w := float64(x)
	switch {
	case x != x:
		return x
	case x > 10:
		return 1
	case x < -10:
		return -1
	case x == 0:
		return x
	case math.Abs(w) < 0.25:
		z := w * w
		p := -1382.0/155925 + z*(21844.0/6081075)
		p = 62.0/2835 + z*p
		p = -17.0/315 + z*p
		p = 2.0/15 + z*p
		p = -1.0/3 + z*p
		return float32(w + w*z*p)
	}
	return float32(1 - 2/(expWide(2*w)+1))
}

// sigmoid32 is 1/(1+exp(−x)).
func sigmoid32(x float32) float32 {
	switch {
	case x != x:
		return x
	case x < expMin:
		return 0
	case x > -expMin:
		return 1
	}
	return float32(1 / (1 + expWide(-float64(x))))
}

const (
	geluC = 0.7978845608028653558799 // √(2/π)
	geluA = 0.044715
)

// gelu32 is x/(1+exp(−2u)), u = √(2/π)·(x + 0.044715·x³).
func gelu32(x float32) float32 {
	w := float64(x)
	u := 2 * geluC * w * (1 + geluA*w*w)
	switch {
	case u > 700:
		return x
	case u < -700:
		return float32(w / math.Inf(1))
	case u != u:
		return x
	}
	return float32(w / (1 + expWide(-u)))
}

// geluSlope32 is the derivative of gelu32: s + x·s·(1−s)·2u′ with
// s = 1/(1+exp(−2u)). Beyond ±10 it is 0 or 1 to float32's precision.
func geluSlope32(x float32) float32 {
	w := float64(x)
	switch {
	case x != x:
		return x
	case w > 10:
		return 1
	case w < -10:
		return 0
	}
	s := 1 / (1 + expWide(-2*geluC*w*(1+geluA*w*w)))
	return float32(s + w*s*(1-s)*2*geluC*(1+3*geluA*w*w))
}
