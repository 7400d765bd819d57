package simd

// vecTableFor is the table of an instruction set.
func vecTableFor(isa ISA) vecTable {
	var t vecTable
	var h halfKernels
	switch isa {
	case AVX2:
		t, h = vecAVX2()
	case AVX512:
		t, h = vecAVX512()
	default:
		return portableVec()
	}
	t.useHalves(&h)
	return t
}

func vecAVX2() (t vecTable, h halfKernels) {
	t = portableVec()
	t.add, t.sub, t.mul, t.div = addAVX2, subAVX2, mulAVX2, divAVX2
	t.addScalar, t.scale, t.axpy, t.divideF32 = addScalarAVX2, scaleAVX2, axpyAVX2, divideAVX2
	t.exp, t.log, t.tanh, t.sigmoid = expAVX2, logAVX2, tanhAVX2, sigmoidAVX2
	t.sqrt, t.square, t.cube = sqrtAVX2, squareAVX2, cubeAVX2
	t.neg, t.inverse, t.relu = negAVX2, inverseAVX2, reluAVX2
	t.gelu, t.geluGrad = geluAVX2, geluGradAVX2
	t.max, t.colSum = maxAVX2, colSumAVX2
	t.expSum, t.sumExp, t.expScale = expSumAVX2, sumExpAVX2, expScaleAVX2
	t.layerNorm, t.layerNormGradInput = layerNormAVX2, layerNormGradInputAVX2
	t.layerNormGradParams = layerNormGradParamsAVX2
	t.adamW, t.sgd, t.sumSquares, t.dropout = adamWAVX2, sgdAVX2, sumSquaresAVX2, dropoutAVX2
	t.reduceF32 = [...]binaryFunc{reduceF32SumAVX2, reduceF32MinAVX2, reduceF32MaxAVX2, reduceF32ProdAVX2}
	return t, halfKernels{
		lanes:     8,
		f16:       [...]combineHalf{reduceF16SumAVX2, reduceF16MinAVX2, reduceF16MaxAVX2, reduceF16ProdAVX2},
		bf16:      [...]combineHalf{reduceBF16SumAVX2, reduceBF16MinAVX2, reduceBF16MaxAVX2, reduceBF16ProdAVX2},
		divideF16: divideF16AVX2, divideBF16: divideBF16AVX2,
		f32ToBF16: f32ToBF16AVX2, f32ToF16: f32ToF16AVX2,
		bf16ToF32: bf16ToF32AVX2, f16ToF32: f16ToF32AVX2,
	}
}

func vecAVX512() (t vecTable, h halfKernels) {
	t = portableVec()
	t.add, t.sub, t.mul, t.div = addAVX512, subAVX512, mulAVX512, divAVX512
	t.addScalar, t.scale, t.axpy, t.divideF32 = addScalarAVX512, scaleAVX512, axpyAVX512, divideAVX512
	t.exp, t.log, t.tanh, t.sigmoid = expAVX512, logAVX512, tanhAVX512, sigmoidAVX512
	t.sqrt, t.square, t.cube = sqrtAVX512, squareAVX512, cubeAVX512
	t.neg, t.inverse, t.relu = negAVX512, inverseAVX512, reluAVX512
	t.gelu, t.geluGrad = geluAVX512, geluGradAVX512
	t.max, t.colSum = maxAVX512, colSumAVX512
	t.expSum, t.sumExp, t.expScale = expSumAVX512, sumExpAVX512, expScaleAVX512
	t.layerNorm, t.layerNormGradInput = layerNormAVX512, layerNormGradInputAVX512
	t.layerNormGradParams = layerNormGradParamsAVX512
	t.adamW, t.sgd, t.sumSquares, t.dropout = adamWAVX512, sgdAVX512, sumSquaresAVX512, dropoutAVX512
	t.reduceF32 = [...]binaryFunc{reduceF32SumAVX512, reduceF32MinAVX512, reduceF32MaxAVX512, reduceF32ProdAVX512}
	return t, halfKernels{
		lanes:     16,
		f16:       [...]combineHalf{reduceF16SumAVX512, reduceF16MinAVX512, reduceF16MaxAVX512, reduceF16ProdAVX512},
		bf16:      [...]combineHalf{reduceBF16SumAVX512, reduceBF16MinAVX512, reduceBF16MaxAVX512, reduceBF16ProdAVX512},
		divideF16: divideF16AVX512, divideBF16: divideBF16AVX512,
		f32ToBF16: f32ToBF16AVX512, f32ToF16: f32ToF16AVX512,
		bf16ToF32: bf16ToF32AVX512, f16ToF32: f16ToF32AVX512,
	}
}

// halfKernels are kernels in assembly on 16-bit elements. AVX2 has no masked
// access to those, so they take whole vectors only.
type halfKernels struct {
	lanes                 int // elements of a vector
	f16, bf16             [reduceOps]combineHalf
	divideF16, divideBF16 func(dst, src []uint16, s float32)
	f32ToBF16, f32ToF16   func(dst []uint16, src []float32)
	bf16ToF32, f16ToF32   func(dst []float32, src []uint16)
}

type combineHalf = func(dst, a, b []uint16)

// useHalves puts h over the portable kernels, which keep the last elements.
func (t *vecTable) useHalves(h *halfKernels) {
	for op := range t.reduceF16 {
		t.reduceF16[op] = wholeCombine(h.lanes, h.f16[op], t.reduceF16[op])
		t.reduceBF16[op] = wholeCombine(h.lanes, h.bf16[op], t.reduceBF16[op])
	}
	t.f32ToBF16 = wholeConvert(h.lanes, h.f32ToBF16, t.f32ToBF16)
	t.f32ToF16 = wholeConvert(h.lanes, h.f32ToF16, t.f32ToF16)
	t.bf16ToF32 = wholeConvert(h.lanes, h.bf16ToF32, t.bf16ToF32)
	t.f16ToF32 = wholeConvert(h.lanes, h.f16ToF32, t.f16ToF32)
	t.divideF16 = wholeDivide(h.lanes, h.divideF16, t.divideF16)
	t.divideBF16 = wholeDivide(h.lanes, h.divideBF16, t.divideBF16)
}

func wholeCombine(lanes int, vectors, rest combineHalf) combineHalf {
	return func(dst, a, b []uint16) {
		n := len(dst) &^ (lanes - 1)
		vectors(dst[:n], a[:n], b[:n])
		rest(dst[n:], a[n:], b[n:])
	}
}

func wholeConvert[D, S float32 | uint16](lanes int, vectors, rest func([]D, []S)) func([]D, []S) {
	return func(dst []D, src []S) {
		n := len(dst) &^ (lanes - 1)
		vectors(dst[:n], src[:n])
		rest(dst[n:], src[n:])
	}
}

func wholeDivide(lanes int, vectors, rest func(dst, src []uint16, s float32)) func(dst, src []uint16, s float32) {
	return func(dst, src []uint16, s float32) {
		n := len(dst) &^ (lanes - 1)
		vectors(dst[:n], src[:n], s)
		rest(dst[n:], src[n:], s)
	}
}
