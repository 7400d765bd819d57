package cpu

import (
	"fmt"
	"unsafe"

	"github.com/tandem-go/tandem/device"
)

const (
	// alignment is that of a cache line and of the widest vector.
	alignment = 64
	pageSize  = 4096
	// hugeSize is the size of a huge page, and the size from which an
	// allocation asks for them.
	hugeSize = 2 << 20
)

// buffer is memory of the Go heap. Not mapped memory, which would be gone with
// the device while values bound to it are still around; what a mapping gives
// besides (huge pages, pages touched in advance) the heap can have as well.
type buffer struct{ b []byte }

var _ device.Buffer = (*buffer)(nil)

// Wrap makes a buffer of memory that was allocated elsewhere, such as that of
// a tensor or of a mapping; it must outlive the buffer. Kernels want it
// aligned to its element type.
func Wrap(b []byte) device.Buffer { return &buffer{b: b[:len(b):len(b)]} }

func (b *buffer) Len() int { return len(b.b) }

func (b *buffer) Slice(off, n int) device.Buffer {
	if off < 0 || n < 0 || off > len(b.b)-n {
		panic(fmt.Sprintf("cpu: slice [%d, %d+%d) of a buffer of %d bytes", off, off, n, len(b.b)))
	}
	return &buffer{b: b.b[off : off+n : off+n]}
}

func (b *buffer) HostBytes() ([]byte, bool) { return b.b, true }

// allocate returns n zeroed bytes on a boundary of a cache line, or of a huge
// page when there are that many, and touches every page: a page fault inside a
// kernel costs as much as the kernel.
func allocate(n int) []byte {
	align := alignment
	if n >= hugeSize {
		align = hugeSize
	}
	raw := make([]byte, n+align)
	off := 0
	if r := int(uintptr(unsafe.Pointer(unsafe.SliceData(raw))) % uintptr(align)); r != 0 {
		off = align - r
	}
	b := raw[off : off+n : off+n]
	if n >= hugeSize {
		adviseHuge(b[:n/hugeSize*hugeSize])
	}
	for i := 0; i < n; i += pageSize {
		b[i] = 0
	}
	return b
}

// view gives n bytes of memory the type of its elements.
func view[T any](b []byte) []T {
	var t T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(t)))
}

// aligned reports whether b starts on a multiple of size, a power of two.
func aligned(b []byte, size int) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(b)))&uintptr(size-1) == 0
}

// copyChunk is as much as is copied at once: memmove can't be preempted.
const copyChunk = 1 << 20

// copyBytes copies src to dst of the same length, also where they overlap.
func copyBytes(dst, src []byte) {
	d, s := uintptr(unsafe.Pointer(unsafe.SliceData(dst))), uintptr(unsafe.Pointer(unsafe.SliceData(src)))
	if n := uintptr(len(src)); d < s+n && s < d+n {
		copy(dst, src)
		return
	}
	for len(src) > copyChunk {
		copy(dst[:copyChunk], src)
		dst, src = dst[copyChunk:], src[copyChunk:]
	}
	copy(dst, src)
}

// raw sees elements as memory.
func raw(s []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), 4*len(s))
}
