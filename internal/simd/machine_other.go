//go:build !amd64

package simd

// machineISAs is empty: other architectures run the portable kernels.
func machineISAs() []ISA { return nil }
