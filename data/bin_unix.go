//go:build unix

package data

import (
	"os"

	"golang.org/x/sys/unix"
)

// mapFile maps a file read-only.
func mapFile(f *os.File, size int) ([]byte, func() error, error) {
	raw, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, err
	}
	return raw, func() error { return unix.Munmap(raw) }, nil
}
