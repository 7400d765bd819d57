// Package asmsim executes the assembly of package simd in plain Go, from its
// text. It is for tests: it shows on any machine what the AVX-512 kernels
// compute, and that they touch only the memory they were given.
//
// It knows the instructions that these kernels use, with the semantics of
// Intel's manual (Software Developer's Manual, volume 2), down to rounding,
// zeroed upper lanes and suppressed faults under a mask; any other instruction
// is an error, to be added here. NaNs keep the payload of the first NaN operand,
// which is not always the one that a processor picks. Registers start with
// garbage, so that reading one before writing it shows.
package asmsim
