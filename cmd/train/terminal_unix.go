//go:build linux || darwin

package main

import (
	"os"

	"golang.org/x/sys/unix"
)

// hasSize reports whether a terminal has columns to draw in. Those that mpirun
// and script make have none.
func hasSize(f *os.File) bool {
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	return err == nil && size.Col > 0
}
