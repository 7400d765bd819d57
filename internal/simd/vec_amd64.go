package simd

// vecTableFor is the table of an instruction set.
func vecTableFor(isa ISA) vecTable {
	return portableVec()
}
