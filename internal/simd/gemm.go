package simd

// gemmTable holds the matrix micro-kernels of one instruction set.
type gemmTable struct{}

func gemmTableFor(isa ISA) gemmTable { return gemmTable{} }
