package simd

import (
	"fmt"
	"slices"
)

// ISA is an instruction set that kernels are written for.
type ISA uint8

// The instruction sets, from the slowest to the fastest.
const (
	// Portable is plain Go and runs everywhere.
	Portable ISA = iota
	// AVX2 needs AVX2, FMA and F16C.
	AVX2
	// AVX512 needs AVX-512 F, VL, BW and DQ besides what AVX2 needs.
	AVX512
)

var isaNames = [...]string{Portable: "portable", AVX2: "avx2", AVX512: "avx512"}

func (i ISA) String() string {
	if int(i) < len(isaNames) {
		return isaNames[i]
	}
	return fmt.Sprintf("isa(%d)", uint8(i))
}

// Best is the fastest instruction set of this machine.
func Best() ISA {
	s := Supported()
	return s[len(s)-1]
}

// Supported lists the instruction sets of this machine, the fastest last.
// Portable is always the first.
func Supported() []ISA { return append([]ISA{Portable}, machineISAs()...) }

// Kernels is the set of kernels for one instruction set. Its methods may be
// called from any number of goroutines at once: it holds no mutable state.
type Kernels struct {
	isa       ISA
	gemm      gemmTable
	attention attentionTable
	vec       vecTable
}

// For returns the kernels of an instruction set. It fails if this machine
// lacks it.
func For(isa ISA) (*Kernels, error) {
	if s := Supported(); !slices.Contains(s, isa) {
		return nil, fmt.Errorf("simd: kernels for %v: this machine has only %v", isa, s)
	}
	return &Kernels{isa: isa, gemm: gemmTableFor(isa), attention: attentionTableFor(isa), vec: vecTableFor(isa)}, nil
}

// ISA is the instruction set that k was made for.
func (k *Kernels) ISA() ISA { return k.isa }
