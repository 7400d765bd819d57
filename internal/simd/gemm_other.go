//go:build !amd64

package simd

// gemmTableFor returns the micro-kernels of an instruction set.
func gemmTableFor(ISA) gemmTable { return portableGemm() }

// attentionTableFor returns the attention kernels of an instruction set.
func attentionTableFor(ISA) attentionTable { return portableAttention() }
