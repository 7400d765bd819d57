package ring

import (
	"github.com/tandem-go/tandem/comm"
)

// The pipelined ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce
// algorithms for clusters of workstations", 2009): the elements are cut into P
// blocks. In step s of 2(P−1) a rank sends block (rank − s) to the right while
// block (rank − s − 1) comes from the left; in the first P−1 steps what comes
// is added to the rank's own values, after which block rank+1 is complete
// here; in the others complete blocks are copied. Every rank sends and receives
// 2(P−1)/P of the data. Steps are not synchronised: whatever has arrived is
// added and may go on at once, so the link is busy in both directions.
//
// One rank computes each element and the others copy it: the same bits
// everywhere.

// blockAlign keeps blocks on cache lines for every element size.
const blockAlign = 64

// block is the range of block b in a buffer of n bytes.
func (g *group) block(p []byte, b int) []byte {
	lo, hi := blockRange(len(p), len(g.world), b)
	return p[lo:hi]
}

func blockRange(n, size, b int) (lo, hi int) {
	each := (n + size - 1) / size
	each = (each + blockAlign - 1) / blockAlign * blockAlign
	return min(b*each, n), min((b+1)*each, n)
}

// mod is i modulo the group's size, never negative.
func (g *group) mod(i int) int {
	n := len(g.world)
	return (i%n + n) % n
}

func (g *group) ringAllReduce(o *operation) error {
	size, r := len(g.world), g.rank
	own := g.block(o.src, r)
	if divideFirst(&o.call) {
		own = g.block(o.dst, r)
		g.n.kernels.ScaleBytes(o.call.Type, own, g.block(o.src, r), size)
	}
	g.link.queue(own)
	for s := range 2*size - 3 {
		g.link.queue(g.block(o.dst, g.mod(r-s-1)))
	}
	g.expect(o, algoRing, g.left(), g.link.frame())
	if err := g.link.start(len(own)); err != nil {
		return err
	}
	if err := g.readHead(); err != nil {
		return err
	}
	sent := 0 // of this rank's stream, what the blocks before this one took: block r − j was segment j
	for s := range 2*size - 2 {
		b := g.mod(r - s - 1)
		dst := g.block(o.dst, b)
		var err error
		if s < size-1 {
			a := addition{dst: dst, src: g.block(o.src, b), complete: s == size-2, forward: true}
			err = g.add(o, &a)
		} else {
			err = g.place(dst, s < 2*size-3, sent)
			sent += len(dst)
		}
		if err != nil {
			return err
		}
	}
	return g.link.finish()
}

// addition is one block of a reduce-scatter step.
type addition struct {
	dst, src []byte
	complete bool // the sum is: divide it if it is an average
	forward  bool // the sender may have what was added
	window   int  // if not 0: dst still holds data to send; byte i is free when window+i bytes were sent
}

// add reads len(a.dst) bytes from the left and leaves incoming op src in dst,
// in pieces as they arrive.
func (g *group) add(o *operation, a *addition) error {
	k, c := g.n.kernels, &o.call
	op, first := reduceOp(c.Op), divideFirst(c)
	have := 0 // bytes in scratch that were not added yet
	for off := 0; off < len(a.dst); {
		m, err := g.link.read(g.scratch[have:min(len(g.scratch), len(a.dst)-off)])
		if err != nil {
			return err
		}
		have += m
		n := have
		if off+n < len(a.dst) {
			n -= n % blockAlign
		}
		if n == 0 {
			continue
		}
		if a.window > 0 {
			if _, err := g.link.waitSent(a.window + off + n); err != nil {
				return err
			}
		}
		dst, src := a.dst[off:off+n], a.src[off:off+n]
		if first {
			k.ScaleBytes(c.Type, g.spare[:n], src, len(g.world))
			src = g.spare[:n]
		}
		k.Reduce(op, c.Type, dst, g.scratch[:n], src)
		if a.complete && c.Op == comm.Avg && !first {
			k.ScaleBytes(c.Type, dst, dst, len(g.world))
		}
		copy(g.scratch, g.scratch[n:have])
		off, have = off+n, have-n
		if a.forward {
			if err := g.link.allow(n); err != nil {
				return err
			}
		}
	}
	return nil
}

// ringReduceScatter is the first half, begun one block earlier so that a rank
// ends with its own block. Partial sums on their way through stay in a window
// of one block: what comes in step s overwrites what was sent in it.
func (g *group) ringReduceScatter(o *operation) error {
	size, r, n := len(g.world), g.rank, o.call.Bytes()
	part := func(b int) []byte { b = g.mod(b); return o.src[b*n : (b+1)*n] }
	if need := 2 * n; cap(g.window) < need {
		g.window = make([]byte, need)
	}
	window, own := g.window[:n], part(r-1)
	if divideFirst(&o.call) {
		own = g.window[n : 2*n]
		g.n.kernels.ScaleBytes(o.call.Type, own, part(r-1), size)
	}
	g.link.queue(own)
	for range size - 2 {
		g.link.queue(window)
	}
	g.expect(o, algoRing, g.left(), g.link.frame())
	if err := g.link.start(n); err != nil {
		return err
	}
	if err := g.readHead(); err != nil {
		return err
	}
	for s := range size - 1 {
		a := addition{dst: window, src: part(r - 2 - s), forward: true, window: s * n}
		if s == size-2 {
			a = addition{dst: o.dst, src: part(r), complete: true}
		}
		if err := g.add(o, &a); err != nil {
			return err
		}
	}
	return g.link.finish()
}

// ringAllGather is the second half.
func (g *group) ringAllGather(o *operation) error {
	size, r, n := len(g.world), g.rank, len(o.src)
	part := func(b int) []byte { b = g.mod(b); return o.dst[b*n : (b+1)*n] }
	copy(part(r), o.src)
	for s := range size - 1 {
		g.link.queue(part(r - s))
	}
	g.expect(o, algoRing, g.left(), g.link.frame())
	if err := g.link.start(n); err != nil {
		return err
	}
	if err := g.readHead(); err != nil {
		return err
	}
	for s := range size - 1 {
		if err := g.place(part(r-s-1), s < size-2, -1); err != nil {
			return err
		}
	}
	return g.link.finish()
}
