package cpu

import (
	"fmt"
	"math"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/internal/simd"
)

// moveChunk is the piece in bytes in which memory is copied and filled.
const moveChunk = 256 << 10

// pieces is how many chunks of size c make up n.
func pieces(n, c int) int { return (n + c - 1) / c }

// piece is the range of chunk i.
func piece(i, n, c int) (lo, hi int) { return i * c, min(n, (i+1)*c) }

type copyProgram struct{ dst, src []byte }

func compileCopy(_ *Device, op device.Op) (program, error) {
	if op.In[0].Bytes() != op.Out[0].Bytes() {
		return nil, fmt.Errorf("sizes differ: %v and %v", op.In[0], op.Out[0])
	}
	return new(copyProgram), nil
}

func (c *copyProgram) run(p *pool, a [][]byte) error {
	c.src, c.dst = a[0], a[1]
	p.run(pieces(len(c.dst), moveChunk), c)
	return nil
}

func (c *copyProgram) part(_, i int) {
	lo, hi := piece(i, len(c.dst), moveChunk)
	copy(c.dst[lo:hi], c.src[lo:hi])
}

// fillProgram writes a pattern of one element over and over.
type fillProgram struct {
	pattern []byte
	zero    bool
	dst     []byte
}

func compileFill(d *Device, op device.Op) (program, error) {
	t := op.Out[0].Type
	f := &fillProgram{pattern: encode(d.simd, t, op.Attr.Alpha), zero: true}
	for _, b := range f.pattern {
		f.zero = f.zero && b == 0
	}
	return f, nil
}

func (f *fillProgram) run(p *pool, a [][]byte) error {
	f.dst = a[0]
	p.run(pieces(len(f.dst), moveChunk), f)
	return nil
}

func (f *fillProgram) part(_, i int) {
	lo, hi := piece(i, len(f.dst), moveChunk)
	d := f.dst[lo:hi]
	if f.zero {
		clear(d)
		return
	}
	// moveChunk is a multiple of every element size, so pieces start on elements.
	for n := copy(d, f.pattern); n < len(d); n *= 2 {
		copy(d[n:], d[:n])
	}
}

// encode is v as one element of type t, little endian. Integers saturate, and
// are 0 for NaN.
func encode(k *simd.Kernels, t dtype.Type, v float32) []byte {
	var u uint64
	half := make([]uint16, 1)
	switch t {
	case dtype.Float32:
		u = uint64(math.Float32bits(v))
	case dtype.Float64:
		u = math.Float64bits(float64(v))
	case dtype.Float16:
		k.F32ToF16(half, []float32{v})
		u = uint64(half[0])
	case dtype.BFloat16:
		k.F32ToBF16(half, []float32{v})
		u = uint64(half[0])
	case dtype.Int32:
		u = uint64(uint32(int32(saturate(v, math.MinInt32, math.MaxInt32))))
	case dtype.Int64:
		u = uint64(saturate(v, math.MinInt64, math.MaxInt64))
	case dtype.Uint8:
		u = uint64(saturate(v, 0, math.MaxUint8))
	}
	b := make([]byte, t.Size())
	for i := range b {
		b[i] = byte(u >> (8 * i))
	}
	return b
}

func saturate(v float32, lo, hi int64) int64 {
	switch {
	case v != v:
		return 0
	case float64(v) <= float64(lo):
		return lo
	case float64(v) >= float64(hi):
		return hi
	}
	return int64(v)
}
