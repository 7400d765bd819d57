package simd

import "math"

func addGo(dst, a, b []float32) {
	for i := range dst {
		dst[i] = a[i] + b[i]
	}
}

func subGo(dst, a, b []float32) {
	for i := range dst {
		dst[i] = a[i] - b[i]
	}
}

func mulGo(dst, a, b []float32) {
	for i := range dst {
		dst[i] = a[i] * b[i]
	}
}

func divGo(dst, a, b []float32) {
	for i := range dst {
		dst[i] = a[i] / b[i]
	}
}

func addScalarGo(dst, a []float32, s float32) {
	for i := range dst {
		dst[i] = a[i] + s
	}
}

func scaleGo(dst, a []float32, s float32) {
	for i := range dst {
		dst[i] = canonical(a[i] * s)
	}
}

func divideGo(dst, a []float32, s float32) {
	for i := range dst {
		dst[i] = canonical(a[i] / s)
	}
}

func axpyGo(dst, a []float32, s float32) {
	for i := range dst {
		dst[i] += s * a[i]
	}
}

func sqrtGo(dst, src []float32) {
	for i := range dst {
		dst[i] = float32(math.Sqrt(float64(src[i])))
	}
}

func squareGo(dst, src []float32) {
	for i := range dst {
		dst[i] = src[i] * src[i]
	}
}

func cubeGo(dst, src []float32) {
	for i := range dst {
		dst[i] = src[i] * src[i] * src[i]
	}
}

func negGo(dst, src []float32) {
	for i := range dst {
		dst[i] = -src[i]
	}
}

func inverseGo(dst, src []float32) {
	for i := range dst {
		dst[i] = 1 / src[i]
	}
}

func reluGo(dst, src []float32) {
	for i := range dst {
		v := src[i]
		if v < 0 {
			v = 0
		}
		dst[i] = v
	}
}

func geluGradGo(dx, x, dy []float32) {
	for i := range dx {
		dx[i] = dy[i] * geluSlope32(x[i])
	}
}

// mapGo makes a kernel of a function of one element.
func mapGo(f func(float32) float32) unaryFunc {
	return func(dst, src []float32) {
		for i := range dst {
			dst[i] = f(src[i])
		}
	}
}

func maxGo(x []float32) float32 {
	m := float32(math.Inf(-1))
	for _, v := range x {
		if v > m {
			m = v
		}
	}
	return m
}

func expSumGo(dst, src []float32, max float32) float32 {
	var sum float64
	for i := range dst {
		e := exp32(src[i] - max)
		dst[i] = e
		sum += float64(e)
	}
	return float32(sum)
}

func sumExpGo(src []float32, max float32) float32 {
	var sum float64
	for _, v := range src {
		sum += float64(exp32(v - max))
	}
	return float32(sum)
}

func expScaleGo(dst, src []float32, shift, factor float32) {
	for i := range dst {
		dst[i] = exp32(src[i]-shift) * factor
	}
}

func colSumGo(dst, x []float32, rows, stride int) {
	for i := range rows {
		row := x[i*stride:][:len(dst)]
		for j, v := range row {
			dst[j] += v
		}
	}
}
