package simd

// vecTable holds the vector kernels of one instruction set.
type vecTable struct{}

func vecTableFor(isa ISA) vecTable { return vecTable{} }
