//go:build !amd64

package simd

// vecTableFor is the portable table, whatever is asked for.
func vecTableFor(ISA) vecTable { return portableVec() }
