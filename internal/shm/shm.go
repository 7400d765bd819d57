// Package shm is memory that processes of one host share: anonymous files that
// are mapped here and, to read only, by the peers; the passing of their
// descriptors over authenticated unix sockets; and waiting for a word of such
// memory to change. It exists on Linux on amd64 and arm64; elsewhere
// everything returns ErrUnsupported.
//
// A file lives as long as somebody has it open or mapped: nothing is left
// behind by processes that were killed, and no directory has to be large
// enough, as /dev/shm in a container is not.
package shm

import (
	"errors"
	"fmt"
)

// ErrUnsupported is in the chain when this system can't share memory in the
// way that this package does.
var ErrUnsupported = errors.New("shm: shared memory is not supported here")

const (
	// MaxSegment bounds one segment, in bytes.
	MaxSegment int64 = 1 << 40
	// pageSize is the unit of mappings. Where pages are larger, segments are
	// refused by the kernel and the caller does without.
	pageSize = 4096
	// hugeSize is the size of a huge page, and the size from which a segment
	// asks for them.
	hugeSize = 2 << 20
)

// round is the size of a segment that holds n bytes, and its alignment.
func round(n int) (size, align int, err error) {
	if n <= 0 || int64(n) > MaxSegment {
		return 0, 0, fmt.Errorf("shm: segment of %d bytes, want 1 to %d", n, MaxSegment)
	}
	align = pageSize
	if n >= hugeSize {
		align = hugeSize
	}
	return (n + align - 1) / align * align, align, nil
}

// Place says which processes share memory: those with equal places, since
// sockets of one network namespace, one user and one running kernel reach one
// another.
type Place struct {
	Boot string // the kernel's boot id
	Net  string // the network namespace
	User int    // effective user id
}
