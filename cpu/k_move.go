package cpu

import (
	"fmt"
	"math"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
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

func compileFill(_ *Device, op device.Op) (program, error) {
	t := op.Out[0].Type
	f := &fillProgram{pattern: encode(t, op.Attr.Alpha), zero: true}
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
func encode(t dtype.Type, v float32) []byte {
	var u uint64
	switch t {
	case dtype.Float32:
		u = uint64(math.Float32bits(v))
	case dtype.Float64:
		u = math.Float64bits(float64(v))
	case dtype.Float16:
		u = uint64(float16bits(v))
	case dtype.BFloat16:
		u = uint64(bfloat16bits(v))
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

// bfloat16bits rounds to nearest, ties to even.
func bfloat16bits(v float32) uint16 {
	b := math.Float32bits(v)
	if v != v {
		return uint16(b>>16) | 0x40
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

// float16bits rounds to nearest, ties to even; what is too large becomes
// infinite and what is too small denormal or zero.
func float16bits(v float32) uint16 {
	b := math.Float32bits(v)
	sign := uint16(b >> 16 & 0x8000)
	abs := b & 0x7fffffff
	switch {
	case abs > 0x7f800000:
		return sign | 0x7e00
	case abs >= 0x477ff000: // rounds to 65536 or more
		return sign | 0x7c00
	case abs >= 0x38800000: // normal: rebias the exponent by 112, drop 13 bits
		return sign | uint16((abs-112<<23+0xfff+abs>>13&1)>>13)
	}
	// Denormal: a multiple of 2^-24.
	return sign | uint16(math.RoundToEven(float64(math.Float32frombits(abs))*(1<<24)))
}
