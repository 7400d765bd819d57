package ring

import (
	"bytes"
	"context"
	"io"
	"net"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/internal/simd"
)

// minPayload is what Barrier and Split exchange.
const minPayload = 16

// perform moves the data of o. Errors of connections are peerErrors.
func (g *group) perform(o *operation) error {
	size := len(g.world)
	if size == 1 {
		if o.call.Kind == comm.KindSplit {
			copy(o.dst, o.payload[:])
		} else {
			copy(o.dst, o.src)
		}
		return nil
	}
	if g.shared != nil {
		return g.shared.perform(o)
	}
	small := o.call.Bytes()*(size-1) <= g.n.o.plan.exchangeLimit(size)
	switch o.call.Kind {
	case comm.KindAllReduce:
		if small {
			return g.exchangeReduce(o)
		}
		return g.ringAllReduce(o)
	case comm.KindAllGather:
		if small {
			return g.exchangeGather(o, o.src)
		}
		return g.ringAllGather(o)
	case comm.KindReduceScatter:
		return g.ringReduceScatter(o)
	case comm.KindBroadcast:
		return g.broadcast(o)
	case comm.KindBarrier:
		return g.exchange(o, o.payload[:])
	case comm.KindSplit:
		return g.exchangeGather(o, o.payload[:])
	case comm.KindSend:
		return g.send(o)
	}
	return g.receive(o)
}

// expect prepares the header that the left neighbour (or a direct peer) must
// send, and writes this rank's own to b.
func (g *group) expect(o *operation, algorithm uint8, from int, b []byte) {
	g.want = header{call: o.call, algorithm: algorithm, job: g.n.job, generation: uint64(g.n.o.Generation),
		group: g.id, seq: o.seq, from: g.rank}
	g.want.marshal(b)
	g.want.from = from
}

// checkHead compares a header that came with the expected one.
func (g *group) checkHead(b []byte) error {
	var w [headerSize]byte
	g.want.marshal(w[:])
	if bytes.Equal(w[:], b) {
		return nil
	}
	return &peerError{g.want.from, g.want.disagree(g.rank, b)}
}

// readHead reads and compares the header from the left.
func (g *group) readHead() error {
	if err := g.readFull(g.head[:]); err != nil {
		return err
	}
	return g.checkHead(g.head[:])
}

func (g *group) readFull(p []byte) error {
	for have := 0; have < len(p); {
		n, err := g.link.read(p[have:])
		if err != nil {
			return err
		}
		have += n
	}
	return nil
}

// exchange gives own of every rank to every rank: each sends its own
// contribution to the right and passes on what comes from the left, P−1 hops
// of one message. Contributions end up in slots, see slot.
func (g *group) exchange(o *operation, own []byte) error {
	hops, n := len(g.world)-1, len(own)
	at := func(hop int) int { return headerSize + hop*n }
	g.expect(o, algoExchange, g.left(), g.link.frame())
	g.link.queue(own)
	for hop := range hops - 1 {
		g.link.queue(g.slots[at(hop):at(hop+1)])
	}
	if err := g.link.start(n); err != nil {
		return err
	}
	have := 0
	for hop := -1; hop < hops; hop++ { // −1 is the header alone: the rest's length rests on it
		for have < at(hop+1) {
			m, err := g.link.read(g.slots[have:at(hops)])
			if err != nil {
				return err
			}
			have += m
		}
		var err error
		if hop < 0 {
			err = g.checkHead(g.slots[:headerSize])
		} else if hop < hops-1 {
			err = g.link.allow(n)
		}
		if err != nil {
			return err
		}
	}
	return g.link.finish()
}

// slot is what rank r contributed to the exchange of own.
func (g *group) slot(own []byte, r int) []byte {
	if r == g.rank {
		return own
	}
	size := len(g.world)
	at := headerSize + ((g.rank-1-r+2*size)%size)*len(own)
	return g.slots[at : at+len(own)]
}

// exchangeReduce adds in the order of the ranks, on every rank.
func (g *group) exchangeReduce(o *operation) error {
	own := o.src
	k, c, size := g.n.kernels, &o.call, len(g.world)
	first := divideFirst(c)
	if first && len(own) > 0 {
		own = g.spare[:len(own)]
		k.ScaleBytes(c.Type, own, o.src, size)
	}
	if err := g.exchange(o, own); err != nil || len(own) == 0 {
		return err
	}
	op, sum := reduceOp(c.Op), g.scratch[:len(own)]
	left := g.slot(own, 0)
	for r := 1; r < size; r++ {
		to := sum
		if r == size-1 {
			to = o.dst // only now: dst may be src
		}
		k.Reduce(op, c.Type, to, left, g.slot(own, r))
		left = to
	}
	if c.Op == comm.Avg && !first {
		k.ScaleBytes(c.Type, o.dst, o.dst, size)
	}
	return nil
}

func (g *group) exchangeGather(o *operation, own []byte) error {
	if err := g.exchange(o, own); err != nil {
		return err
	}
	for r := range g.world {
		copy(o.dst[r*len(own):], g.slot(own, r))
	}
	return nil
}

// divideFirst is whether contributions are divided before they are added.
func divideFirst(c *comm.Call) bool { return c.Op == comm.Avg && c.Type == dtype.Float16 }

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

// broadcast passes the root's buffer along the ring, piece by piece. The rank
// before the root is the last: it sends only its header, so that the root hears
// of a disagreement too.
func (g *group) broadcast(o *operation) error {
	size := len(g.world)
	at := (g.rank - o.call.Root + size) % size // hops from the root
	last, limit := at == size-1, 0
	g.expect(o, algoRing, g.left(), g.link.frame())
	if !last {
		g.link.queue(o.dst)
	}
	if at == 0 {
		limit = len(o.dst)
	}
	if err := g.link.start(limit); err != nil {
		return err
	}
	if err := g.readHead(); err != nil {
		return err
	}
	if at > 0 {
		if err := g.place(o.dst, !last, -1); err != nil {
			return err
		}
	}
	return g.link.finish()
}

// place reads dst from the left and lets the sender pass it on. If from is not
// negative, dst holds data that this operation sends, beginning at byte from of
// all that it sends. They are at the right neighbour long before their
// successors come back from the left; but whether the write that took them has
// returned, only the sender knows.
func (g *group) place(dst []byte, forward bool, from int) error {
	for off := 0; off < len(dst); {
		n := min(len(dst)-off, pieceBytes)
		if from >= 0 {
			sent, err := g.link.waitSent(from + off + 1)
			if err != nil {
				return err
			}
			n = min(n, sent-from-off)
		}
		m, err := g.link.read(dst[off : off+n])
		if err == nil && forward {
			err = g.link.allow(m)
		}
		if err != nil {
			return err
		}
		off += m
	}
	return nil
}

// send and receive are the two ends of one direct connection, which Send opens
// when it is first used.
func (g *group) send(o *operation) error {
	c, err := g.direct(g.outbound, o, func(ctx context.Context) (net.Conn, error) {
		w := g.world[o.peer]
		return dial(ctx, g.n.cards[w].Addrs, &g.n.o, g.n.self, connKey{connDirect, g.id, g.n.o.Rank}, w)
	})
	if err != nil {
		return err
	}
	call := o.call
	o.call.Kind = comm.KindRecv // what the other end calls it
	g.expect(o, algoDirect, o.peer, g.head[:])
	o.call = call
	b := net.Buffers{g.head[:], o.src}
	if _, err := b.WriteTo(c); err != nil {
		return &peerError{o.peer, err}
	}
	return nil
}

func (g *group) receive(o *operation) error {
	c, err := g.direct(g.inbound, o, func(ctx context.Context) (net.Conn, error) {
		return g.n.lis.take(ctx, g.n.failed, connKey{connDirect, g.id, g.world[o.peer]})
	})
	if err != nil {
		return err
	}
	g.expect(o, algoDirect, o.peer, g.head[:])
	if _, err := io.ReadFull(c, g.head[:]); err != nil {
		return &peerError{o.peer, err}
	}
	if err := g.checkHead(g.head[:]); err != nil {
		return err
	}
	if _, err := io.ReadFull(c, o.dst); err != nil {
		return &peerError{o.peer, err}
	}
	return nil
}

// direct is the connection to or from o.peer, opened on first use.
func (g *group) direct(have map[int]net.Conn, o *operation, open func(context.Context) (net.Conn, error)) (net.Conn, error) {
	g.mu.Lock()
	c := have[o.peer]
	g.mu.Unlock()
	if c != nil {
		return c, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), g.n.o.Timeout)
	defer cancel()
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-g.n.failed:
			cancel()
		case <-done:
		}
	}()
	c, err := open(ctx)
	if err != nil {
		return nil, &peerError{o.peer, err}
	}
	g.mu.Lock()
	have[o.peer] = c
	g.mu.Unlock()
	if g.n.failure.Load() != nil {
		g.hangUp()
	}
	return c, nil
}
