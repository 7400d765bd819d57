//go:build !linux

package cpu

// adviseHuge does nothing where the system decides about huge pages alone.
func adviseHuge([]byte) {}
