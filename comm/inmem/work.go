package inmem

import (
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/internal/simd"
)

// chunkBytes is how much is combined at a time, small enough for the cache and
// a multiple of every element size.
const chunkBytes = 64 << 10

// work moves the data of a full slot whose calls agree. Only its goroutine
// touches the buffers: all ranks of the slot are waiting.
func (g *group) work(s *slot) {
	c := s.ops[0].call
	n := len(g.ranks)
	size := c.Bytes()
	switch c.Kind {
	case comm.KindAllReduce:
		for off := 0; off < size; off += chunkBytes {
			sum := g.combine(s, off, min(chunkBytes, size-off))
			for _, o := range s.ops[:n] {
				copy(o.dst[off:], sum)
			}
		}
	case comm.KindReduceScatter:
		for i, o := range s.ops[:n] {
			for off := 0; off < size; off += chunkBytes {
				copy(o.dst[off:], g.combine(s, i*size+off, min(chunkBytes, size-off)))
			}
		}
	case comm.KindAllGather:
		for i, from := range s.ops[:n] {
			for _, o := range s.ops[:n] {
				copy(o.dst[i*size:], from.src)
			}
		}
	case comm.KindBroadcast:
		for _, o := range s.ops[:n] {
			copy(o.dst, s.ops[c.Root].src)
		}
	case comm.KindSend, comm.KindRecv:
		copy(s.ops[1].dst, s.ops[0].src)
	case comm.KindSplit:
		g.split(s)
	}
}

// combine reduces n bytes at off of all sources, in the order of the ranks,
// and returns the result, which lives until the next call.
func (g *group) combine(s *slot, off, n int) []byte {
	sum, term := g.scratch[:n], g.scratch[chunkBytes:chunkBytes+n]
	k, c, size := g.d.kernels, s.ops[0].call, len(g.ranks)
	first := c.Op == comm.Avg && c.Type == dtype.Float16 && size > 1 // divide first
	op := reduceOp(c.Op)
	for i, o := range s.ops[:size] {
		src := o.src[off : off+n]
		if first {
			k.ScaleBytes(c.Type, term, src, size)
			src = term
		}
		if i == 0 {
			copy(sum, src)
		} else {
			k.Reduce(op, c.Type, sum, sum, src)
		}
	}
	if c.Op == comm.Avg && !first && size > 1 {
		k.ScaleBytes(c.Type, sum, sum, size)
	}
	return sum
}

// reduceOp is the kernel of an operation; the division of Avg comes on top.
func reduceOp(op comm.Op) simd.ReduceOp {
	switch op {
	case comm.Min:
		return simd.ReduceMin
	case comm.Max:
		return simd.ReduceMax
	case comm.Prod:
		return simd.ReduceProd
	}
	return simd.ReduceSum
}
