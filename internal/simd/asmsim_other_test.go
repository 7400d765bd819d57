//go:build !amd64

package simd

import "testing"

// interpretedKernels are none: there is no assembly.
func interpretedKernels(*testing.T) map[string]*Kernels { return nil }
