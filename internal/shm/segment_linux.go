//go:build linux && (amd64 || arm64)

package shm

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Segment is memory of this process that others may map. The memory is a piece
// of the Go heap over which the file is mapped: so slices of it stay valid for
// as long as somebody holds them, also after Close, when the pages are private
// again. A Segment must be closed: it holds the memory until then.
type Segment struct {
	b   []byte
	mu  sync.Mutex
	fd  int // -1 when closed
	raw []byte
}

// sealed keeps anybody who has the descriptor from changing the size, after
// which an access beyond the end would kill the others.
const sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// Create makes a segment of at least n zeroed bytes, on a page's boundary. Pages
// are not touched; large segments ask for huge ones.
func Create(n int) (*Segment, error) {
	size, align, err := round(n)
	if err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate("tandem", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("shm: memfd_create: %w: %w", ErrUnsupported, err)
	}
	s := &Segment{fd: fd, raw: make([]byte, size+align)}
	off := 0
	if r := int(uintptr(unsafe.Pointer(unsafe.SliceData(s.raw))) % uintptr(align)); r != 0 {
		off = align - r
	}
	s.b = s.raw[off : off+size : off+size]
	if err = unix.Ftruncate(fd, int64(size)); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, sealed)
	}
	if err == nil {
		err = overlay(s.b, fd, unix.MAP_SHARED)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("shm: segment of %d bytes: %w", size, err)
	}
	return s, nil
}

// overlay maps fd over b, or fresh private memory if fd is -1. The call is made
// here because the address is the Go heap's: as a result it would look like
// memory from elsewhere.
func overlay(b []byte, fd, flags int) error {
	if fd < 0 {
		flags |= unix.MAP_ANONYMOUS
	}
	_, _, e := syscall.Syscall6(unix.SYS_MMAP, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)),
		unix.PROT_READ|unix.PROT_WRITE, uintptr(flags|unix.MAP_FIXED), uintptr(fd), 0)
	if e != 0 {
		return os.NewSyscallError("mmap", e)
	}
	if len(b) >= hugeSize {
		_ = unix.Madvise(b, unix.MADV_HUGEPAGE) // a wish
	}
	return nil
}

// Bytes is the memory.
func (s *Segment) Bytes() []byte { return s.b }

// Close makes the memory private to this process, with the values that it has.
// What is written to it meanwhile, as by a stream that an abort left running,
// may be lost. Peers keep what they have mapped.
func (s *Segment) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		return nil
	}
	err := overlay(s.b, -1, unix.MAP_PRIVATE)
	for off := 0; err == nil && off < len(s.b); {
		var n int
		n, err = refill(s.fd, s.b[off:], off)
		off += n
	}
	if err != nil {
		return fmt.Errorf("shm: close a segment of %d bytes: %w", len(s.b), err)
	}
	err = unix.Close(s.fd)
	s.fd, s.raw = -1, nil
	return err
}

// refill reads fd from off on into b. The bare system call tells the race
// detector nothing: a stream may still use the memory, whose values are then
// undefined by comm's contract.
func refill(fd int, b []byte, off int) (int, error) {
	n, _, e := syscall.Syscall6(unix.SYS_PREAD64, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), uintptr(off), 0, 0)
	switch {
	case e == unix.EINTR:
		return 0, nil
	case e != 0:
		return 0, os.NewSyscallError("pread", e)
	case n == 0:
		return 0, errors.New("the file is shorter than its mapping")
	}
	return int(n), nil
}

// Mapping is another process's segment, to read.
type Mapping struct{ b []byte }

// mapFile maps a descriptor that a peer sent, which must be a segment.
func mapFile(fd int) (*Mapping, error) {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || seals&sealed != sealed {
		return nil, errors.Join(errors.New("shm: the peer's descriptor is no segment: its size can change"), err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("shm: %w", os.NewSyscallError("fstat", err))
	}
	if st.Size <= 0 || st.Size > MaxSegment {
		return nil, fmt.Errorf("shm: the peer's segment has %d bytes, want 1 to %d", st.Size, MaxSegment)
	}
	b, err := unix.Mmap(fd, 0, int(st.Size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("shm: map %d bytes of a peer: %w", st.Size, err)
	}
	if len(b) >= hugeSize {
		_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	}
	return &Mapping{b}, nil
}

// Bytes is the memory. A write to it is fatal.
func (m *Mapping) Bytes() []byte { return m.b }

// Close unmaps: slices of Bytes must not be used afterwards.
func (m *Mapping) Close() error {
	if m.b == nil {
		return nil
	}
	err := unix.Munmap(m.b)
	m.b = nil
	if err != nil {
		return fmt.Errorf("shm: %w", os.NewSyscallError("munmap", err))
	}
	return nil
}
