package commtest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/dtype"
)

// value is element i of rank's input to op over size ranks: an integer, small
// enough for results to be exact in every type, different between ranks and
// neighbours.
func value(op comm.Op, t dtype.Type, rank, size, i int) int64 {
	low := int64(0)
	if t != dtype.Uint8 {
		low = 2
	}
	switch op {
	case comm.Avg:
		return int64(size * ((i + rank) % 2)) // averages are whole
	case comm.Min, comm.Max:
		return int64((i*7+rank*11)%13) - low
	case comm.Prod:
		if (i+rank)%4 == 0 {
			return 2
		}
		return 1
	}
	return int64((i*7+rank*3)%5) - low
}

// expected is the result that all inputs of element i give.
func expected(op comm.Op, t dtype.Type, size, i int) int64 {
	acc := value(op, t, 0, size, i)
	for r := 1; r < size; r++ {
		v := value(op, t, r, size, i)
		switch op {
		case comm.Min:
			acc = min(acc, v)
		case comm.Max:
			acc = max(acc, v)
		case comm.Prod:
			acc *= v
		default:
			acc += v
		}
	}
	if op == comm.Avg {
		acc /= int64(size)
	}
	return acc
}

// fill is n elements of type t, element i from f(i).
func fill(t dtype.Type, n int, f func(i int) int64) []byte {
	b := make([]byte, 0, n*t.Size())
	for i := range n {
		b = appendValue(b, t, f(i))
	}
	return b
}

// appendValue encodes an integer that t represents exactly.
func appendValue(b []byte, t dtype.Type, v int64) []byte {
	le := binary.LittleEndian
	f := float32(v)
	switch t {
	case dtype.Float32:
		return le.AppendUint32(b, math.Float32bits(f))
	case dtype.Float64:
		return le.AppendUint64(b, math.Float64bits(float64(v)))
	case dtype.Float16:
		return le.AppendUint16(b, half(f))
	case dtype.BFloat16:
		return le.AppendUint16(b, uint16(math.Float32bits(f)>>16))
	case dtype.Int32:
		return le.AppendUint32(b, uint32(v))
	case dtype.Int64:
		return le.AppendUint64(b, uint64(v))
	}
	return append(b, byte(v))
}

// half is f as binary16; f must be representable and not subnormal there.
func half(f float32) uint16 {
	b := math.Float32bits(f)
	if b<<1 == 0 {
		return uint16(b >> 16)
	}
	return uint16(b>>16&0x8000 | (b>>23&0xff-112)<<10 | b>>13&0x3ff)
}

// same compares bytes element by element and says where they differ.
func same(t dtype.Type, got, want []byte) error {
	if bytes.Equal(got, want) {
		return nil
	}
	if len(got) != len(want) {
		return fmt.Errorf("%d bytes, want %d", len(got), len(want))
	}
	n := t.Size()
	for i := 0; i < len(got); i += n {
		if g, w := got[i:i+n], want[i:i+n]; !bytes.Equal(g, w) {
			return fmt.Errorf("element %d of %d %v is % x, want % x", i/n, len(got)/n, t, g, w)
		}
	}
	return nil
}

// lengths are the numbers of elements at which algorithms change: nothing, one,
// around the number of ranks, and enough for pieces of several kinds.
func lengths(size int) []int {
	n := 10_000
	if raced {
		n = 700
	}
	return []int{0, 1, size - 1, size, size + 1, n}
}

var allOps = []comm.Op{comm.Sum, comm.Avg, comm.Min, comm.Max, comm.Prod}
