package simd

// gemmTableFor returns the micro-kernels of an instruction set.
func gemmTableFor(isa ISA) gemmTable {
	switch isa {
	case AVX2:
		return avx2Gemm()
	case AVX512:
		return avx512Gemm()
	}
	return portableGemm()
}

func avx2Gemm() gemmTable {
	t := gemmTable{rows: 6, cols: 16, narrow: 8, copyA: copyRows6, transpose8: transpose8}
	t.kernels[0] = []func(*gemmArgs){gemmAVX2x1x16, gemmAVX2x2x16, gemmAVX2x3x16,
		gemmAVX2x4x16, gemmAVX2x5x16, gemmAVX2x6x16}
	t.kernels[1] = []func(*gemmArgs){gemmAVX2x1x8, gemmAVX2x2x8, gemmAVX2x3x8,
		gemmAVX2x4x8, gemmAVX2x5x8, gemmAVX2x6x8}
	t.copyRows[0], t.copyRows[1] = copyRows16, copyRows8
	return t
}

func avx512Gemm() gemmTable {
	t := gemmTable{rows: 12, cols: 32, narrow: 16, masked: true, copyA: copyRows12, transpose8: transpose8}
	t.kernels[0] = []func(*gemmArgs){gemmAVX512x1x32, gemmAVX512x2x32, gemmAVX512x3x32,
		gemmAVX512x4x32, gemmAVX512x5x32, gemmAVX512x6x32, gemmAVX512x7x32, gemmAVX512x8x32,
		gemmAVX512x9x32, gemmAVX512x10x32, gemmAVX512x11x32, gemmAVX512x12x32}
	t.kernels[1] = []func(*gemmArgs){gemmAVX512x1x16, gemmAVX512x2x16, gemmAVX512x3x16,
		gemmAVX512x4x16, gemmAVX512x5x16, gemmAVX512x6x16, gemmAVX512x7x16, gemmAVX512x8x16,
		gemmAVX512x9x16, gemmAVX512x10x16, gemmAVX512x11x16, gemmAVX512x12x16}
	t.copyRows[0], t.copyRows[1] = copyRows32, copyRows16
	return t
}

// attentionTableFor returns the attention kernels of an instruction set.
func attentionTableFor(isa ISA) attentionTable {
	switch isa {
	case AVX2:
		return attentionTable{softmaxRowsAVX2, gradRowsAVX2, dotRowsAVX2, scaleRowsAVX2}
	case AVX512:
		return attentionTable{softmaxRowsAVX512, gradRowsAVX512, dotRowsAVX512, scaleRowsAVX512}
	}
	return portableAttention()
}
