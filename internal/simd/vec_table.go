package simd

// vecTable holds the vector kernels of one instruction set. Every field is
// set: vecTableFor starts from the portable kernels and puts assembly over
// them. The kernels take slices whose lengths the methods of Kernels have
// checked, of any length and alignment.
type vecTable struct {
	add, sub, mul, div binaryFunc
	addScalar, scale   scalarFunc
	axpy               scalarFunc

	exp, log, tanh, sigmoid  unaryFunc
	sqrt, square, cube       unaryFunc
	neg, inverse, relu, gelu unaryFunc
	geluGrad                 binaryFunc
	max                      func(x []float32) float32
	expSum                   func(dst, src []float32, max float32) float32
	sumExp                   func(src []float32, max float32) float32
	expScale                 func(dst, src []float32, shift, factor float32)
	layerNorm                func(y, x, gamma, beta []float32, eps float32) (mean, rstd float32)
	layerNormGradInput       func(dx, x, gamma, dy []float32, mean, rstd float32)
	layerNormGradParams      func(dgamma, dbeta, x, dy, mean, rstd []float32, stride int)
	colSum                   func(dst, x []float32, rows, stride int)
	adamW                    func(param, grad, m, v []float32, c adamWCoef)
	sgd                      func(param, grad, mom []float32, c sgdCoef)
	sumSquares               func(x []float32) float64
	reduceF32                [reduceOps]binaryFunc
	reduceF64                [reduceOps]func(dst, a, b []float64)
	reduceF16, reduceBF16    [reduceOps]func(dst, a, b []uint16)
	divideF32                scalarFunc
	divideF16, divideBF16    func(dst, src []uint16, s float32)
	f32ToBF16, f32ToF16      func(dst []uint16, src []float32)
	bf16ToF32, f16ToF32      func(dst []float32, src []uint16)
	dropout                  func(y, x []float32, key uint64, i0 int, threshold uint32, keep float32)
}

type (
	unaryFunc  = func(dst, src []float32)
	binaryFunc = func(dst, a, b []float32)
	scalarFunc = func(dst, a []float32, s float32)
)

// portableVec is the table in plain Go.
func portableVec() vecTable {
	return vecTable{
		add: addGo, sub: subGo, mul: mulGo, div: divGo,
		addScalar: addScalarGo, scale: scaleGo, axpy: axpyGo,
		exp: mapGo(exp32), log: mapGo(log32), tanh: mapGo(tanh32), sigmoid: mapGo(sigmoid32),
		sqrt: sqrtGo, square: squareGo, cube: cubeGo,
		neg: negGo, inverse: inverseGo, relu: reluGo, gelu: mapGo(gelu32),
		geluGrad: geluGradGo,
		max:      maxGo, expSum: expSumGo, sumExp: sumExpGo, expScale: expScaleGo,
		layerNorm: layerNormGo, layerNormGradInput: layerNormGradInputGo,
		layerNormGradParams: layerNormGradParamsGo, colSum: colSumGo,
		adamW: adamWGo, sgd: sgdGo, sumSquares: sumSquaresGo,
		reduceF32: reduceFloatGo[float32](), reduceF64: reduceFloatGo[float64](),
		reduceF16:  reduceHalfGo(f32FromF16, f16FromF32),
		reduceBF16: reduceHalfGo(f32FromBF16, bf16FromF32),
		divideF32:  divideGo,
		divideF16:  divideHalfGo(f32FromF16, f16FromF32), divideBF16: divideHalfGo(f32FromBF16, bf16FromF32),
		f32ToBF16: narrowGo(bf16FromF32), f32ToF16: narrowGo(f16FromF32),
		bf16ToF32: widenGo(f32FromBF16), f16ToF32: widenGo(f32FromF16),
		dropout: dropoutGo,
	}
}
