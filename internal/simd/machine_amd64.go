package simd

import "golang.org/x/sys/cpu"

// machineISAs lists what the machine offers beyond Portable, the fastest last.
// x/sys/cpu checks that the operating system saves the registers, too. Every
// processor with AVX2 has F16C, which x/sys/cpu doesn't report.
func machineISAs() []ISA {
	x := &cpu.X86
	if !x.HasAVX2 || !x.HasFMA {
		return nil
	}
	if !x.HasAVX512F || !x.HasAVX512VL || !x.HasAVX512BW || !x.HasAVX512DQ {
		return []ISA{AVX2}
	}
	return []ISA{AVX2, AVX512}
}
