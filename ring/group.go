package ring

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// scratchBytes is how much incoming data is added at a time. It stays in the
// second-level cache.
const scratchBytes = 256 << 10

// group is a communicator: the world's, or one split from another.
type group struct {
	n      *node
	parent *group
	id     uint64
	world  []int // world rank of each member
	rank   int
	name   string // the same on all members
	flight int    // its number in the flight recorder

	// Of the goroutine that enqueues.
	seq              uint64
	sendSeq, recvSeq []uint64

	run     sync.Mutex // one operation at a time; the rest of this block is its holder's
	link    link       // over TCP
	shared  *shared    // or this
	want    header
	head    [headerSize]byte
	scratch []byte // incoming data to be added
	spare   []byte // for a local contribution that is scaled first
	slots   []byte // header and contributions of an exchange
	window  []byte // partial sums of a reduce-scatter on their way through

	started atomic.Uint64 // collectives begun
	pending atomic.Int64  // operations queued and not finished
	err     atomic.Pointer[comm.OpError]

	mu       sync.Mutex
	free     *operation
	active   active
	late     bool
	closed   bool
	children []*group
	inbound  map[int]net.Conn // direct connections by peer
	outbound map[int]net.Conn
}

var _ comm.Communicator = (*group)(nil)

func (n *node) newGroup(parent *group, id uint64, name string, world []int, rank int) *group {
	size := len(world)
	g := &group{n: n, parent: parent, id: id, world: world, rank: rank, name: name,
		flight:  n.o.Flight.Communicator(name, world),
		sendSeq: make([]uint64, size), recvSeq: make([]uint64, size),
		inbound: map[int]net.Conn{}, outbound: map[int]net.Conn{}}
	if size > 1 {
		g.scratch = make([]byte, scratchBytes)
		g.spare = make([]byte, scratchBytes)
		g.slots = make([]byte, headerSize+max(0, n.o.plan.exchangeLimit(size))+minPayload*size)
	}
	n.mu.Lock()
	n.groups = append(slices.Clone(n.groups), g)
	n.mu.Unlock()
	return g
}

func (g *group) left() int           { return (g.rank + len(g.world) - 1) % len(g.world) }
func (g *group) local(world int) int { return slices.Index(g.world, world) }

// connect makes the data connections to both neighbours.
func (g *group) connect(ctx context.Context) error {
	if len(g.world) == 1 {
		return nil
	}
	if g.Transport() == TransportShm {
		return g.connectShared(ctx)
	}
	n, right := g.n, (g.rank+1)%len(g.world)
	in, out, err := g.neighbours(ctx, g.world[g.left()], g.world[right])
	if err != nil {
		return err
	}
	l, err := newLink(in, out, g.left(), right, n.o.plan.portable, n.spawn, g.sendFailed)
	if err != nil {
		return err
	}
	g.mu.Lock()
	g.link = l
	g.mu.Unlock()
	if n.failure.Load() != nil {
		g.hangUp()
	}
	return nil
}

// neighbours dials the right one while the left one dials this rank.
func (g *group) neighbours(ctx context.Context, left, right int) (in, out net.Conn, err error) {
	n := g.n
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var dialErr error
	done := make(chan struct{})
	go func() {
		defer close(done)
		out, dialErr = dial(ctx, n.cards[right].Addrs, &n.o, n.self, connKey{connData, g.id, n.o.Rank}, right)
		if dialErr != nil {
			cancel(dialErr)
		}
	}()
	in, err = n.lis.take(ctx, n.failed, connKey{connData, g.id, left})
	if err != nil {
		cancel(err)
	}
	<-done
	if err = errors.Join(dialErr, err); err == nil {
		return in, out, nil
	}
	for _, c := range []net.Conn{in, out} {
		if c != nil {
			_ = c.Close()
		}
	}
	return nil, nil, err
}

// sendFailed ends the operation that is running, which waits for data from the
// left and would not notice.
func (g *group) sendFailed(err error) {
	g.mu.Lock()
	o := operation{call: g.active.call, seq: g.active.seq}
	g.mu.Unlock()
	g.n.settle(g.classify(&o, err))
}

// Transport is how the group's bytes travel: TransportShm, TransportTCP, or ""
// for a group of one. Sums of three or more ranks depend on it in their last bits.
func (g *group) Transport() string {
	switch {
	case len(g.world) == 1:
		return ""
	case oneHost(g.n.cards, g.world):
		return TransportShm
	}
	return TransportTCP
}

func (g *group) Rank() int { return g.rank }
func (g *group) Size() int { return len(g.world) }

// Alloc returns memory that the other ranks of this host can read, if there are
// any, else the device's. It stays valid after Close.
func (g *group) Alloc(bytes int) (device.Buffer, error) {
	if g.n.host != nil && bytes > 0 {
		b, err := g.n.host.alloc(bytes)
		if err == nil {
			return b, nil
		}
		g.n.o.Logger.Warn("no shared memory: this buffer will be copied", "rank", g.n.o.Rank, "bytes", bytes, "err", err)
	}
	return g.n.o.Device.Alloc(bytes)
}

func (g *group) AllReduce(s device.Stream, dst, src device.Buffer, t dtype.Type, op comm.Op, tag comm.Tag) error {
	return g.enqueue(s, dst, src, comm.Call{Kind: comm.KindAllReduce, Op: op, Type: t, Tag: tag}, -1)
}

func (g *group) ReduceScatter(s device.Stream, dst, src device.Buffer, t dtype.Type, op comm.Op, tag comm.Tag) error {
	return g.enqueue(s, dst, src, comm.Call{Kind: comm.KindReduceScatter, Op: op, Type: t, Tag: tag}, -1)
}

func (g *group) AllGather(s device.Stream, dst, src device.Buffer, t dtype.Type, tag comm.Tag) error {
	return g.enqueue(s, dst, src, comm.Call{Kind: comm.KindAllGather, Type: t, Tag: tag}, -1)
}

func (g *group) Broadcast(s device.Stream, buf device.Buffer, t dtype.Type, root int, tag comm.Tag) error {
	return g.enqueue(s, buf, buf, comm.Call{Kind: comm.KindBroadcast, Type: t, Root: root, Tag: tag}, -1)
}

// Send returns once the data are with the kernel; it does not wait for the
// receiver unless the socket's buffer is full.
func (g *group) Send(s device.Stream, src device.Buffer, t dtype.Type, peer int, tag comm.Tag) error {
	if err := g.checkPeer(comm.KindSend, peer); err != nil {
		return err
	}
	return g.enqueue(s, src, src, comm.Call{Kind: comm.KindSend, Type: t, Root: g.rank, Tag: tag}, peer)
}

func (g *group) Recv(s device.Stream, dst device.Buffer, t dtype.Type, peer int, tag comm.Tag) error {
	if err := g.checkPeer(comm.KindRecv, peer); err != nil {
		return err
	}
	return g.enqueue(s, dst, dst, comm.Call{Kind: comm.KindRecv, Type: t, Root: peer, Tag: tag}, peer)
}

func (g *group) checkPeer(k comm.Kind, peer int) error {
	if peer < 0 || peer >= len(g.world) || peer == g.rank {
		return fmt.Errorf("comm: %v on rank %d: peer %d is not another rank of the group of %d", k, g.rank, peer, len(g.world))
	}
	return nil
}

func (g *group) Barrier(ctx context.Context) error {
	o := g.operation()
	o.call, o.peer = comm.Call{Kind: comm.KindBarrier, Tag: comm.Tag{Bucket: -1}}, -1
	return g.onHost(ctx, o)
}

// Split exchanges colours and keys around the parent's ring; the child has
// connections of its own.
func (g *group) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	seq := g.seq
	o := g.operation()
	o.call, o.peer = comm.Call{Kind: comm.KindSplit, Tag: comm.Tag{Bucket: -1}}, -1
	binary.LittleEndian.PutUint64(o.payload[:], uint64(int64(color)))
	binary.LittleEndian.PutUint64(o.payload[8:], uint64(int64(key)))
	all := make([]byte, len(o.payload)*len(g.world))
	o.dst = all
	if err := g.onHost(ctx, o); err != nil || color < 0 {
		return nil, err
	}
	type place struct{ key, rank int }
	var places []place
	for r := range g.world {
		b := all[r*len(o.payload):]
		if int64(binary.LittleEndian.Uint64(b)) == int64(color) {
			places = append(places, place{int(int64(binary.LittleEndian.Uint64(b[8:]))), r})
		}
	}
	slices.SortStableFunc(places, func(a, b place) int { return cmp.Compare(a.key, b.key) })
	world, rank := make([]int, len(places)), 0
	for i, p := range places {
		world[i] = g.world[p.rank]
		if p.rank == g.rank {
			rank = i
		}
	}
	return g.child(ctx, hash64(g.id, seq, color), fmt.Sprintf("%s/%d.%d", g.name, seq, color), world, rank)
}

// child connects a group of the same node. Ranks that can't fail everybody.
func (g *group) child(ctx context.Context, id uint64, name string, world []int, rank int) (comm.Communicator, error) {
	h := g.n.newGroup(g, id, name, world, rank)
	ctx, cancel := context.WithTimeout(ctx, g.n.o.Timeout)
	defer cancel()
	if err := h.connect(ctx); err != nil {
		f := &failure{code: codeLost, culprit: -1, reporter: g.n.o.Rank, kind: comm.KindSplit, group: g.id,
			seq: g.started.Load() - 1, tag: comm.Tag{Bucket: -1}, cause: err, text: err.Error()}
		return nil, g.opError(g.n.settle(f), nil, 0)
	}
	g.mu.Lock()
	g.children = append(g.children, h)
	g.mu.Unlock()
	return h, nil
}

func (g *group) Err() error { return g.check(nil) }

// check is Err for an operation that is about to be queued or run.
func (g *group) check(o *operation) error {
	if e := g.err.Load(); e != nil {
		return e
	}
	f := g.n.failure.Load()
	if f == nil {
		if g.n.suspect.Load() == nil {
			return nil
		}
		f = g.n.settle(g.n.suspect.Load()) // being agreed upon
	}
	return g.opError(f, o, 0)
}

func (g *group) Abort(cause error) {
	err := abortCause(cause)
	g.n.abort(g.ownFailure(codeAborted, err))
}

// ownFailure is a failure that this rank causes, in what it is doing now.
func (g *group) ownFailure(c code, cause error) *failure {
	f := &failure{code: c, culprit: g.n.o.Rank, reporter: g.n.o.Rank, group: g.id,
		seq: g.started.Load(), tag: comm.Tag{Bucket: -1}, cause: cause, text: cause.Error()}
	g.describe(f)
	return f
}

// Close of the world group ends the node, of a child only its connections. In
// mid-operation it is a failure that all ranks hear of.
func (g *group) Close() error {
	g.mu.Lock()
	if g.closed {
		g.mu.Unlock()
		return nil
	}
	g.closed = true
	children := g.children
	g.mu.Unlock()
	if g.pending.Load() > 0 && g.n.failure.Load() == nil {
		g.n.settle(g.ownFailure(codeClosed, comm.ErrClosed))
	}
	for _, c := range children {
		_ = c.Close()
	}
	if g.Err() == nil {
		_ = g.opError(g.ownFailure(codeClosed, comm.ErrClosed), nil, 0)
	}
	if g.parent == nil {
		g.n.leave()
	}
	g.hangUp()
	g.n.forget(g)
	if g.parent != nil {
		g.parent.forget(g)
	}
	if g.parent == nil {
		g.n.close()
	}
	g.run.Lock() // what was running has noticed
	defer g.run.Unlock()
	if g.parent == nil && g.n.host != nil {
		return g.n.host.close()
	}
	return g.release()
}

// forget removes a closed group.
func (n *node) forget(g *group) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.groups = slices.DeleteFunc(slices.Clone(n.groups), func(h *group) bool { return h == g })
}

// forget removes a closed child, whose operations hold the memory of its last
// buffers.
func (g *group) forget(child *group) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.children = slices.DeleteFunc(slices.Clone(g.children), func(h *group) bool { return h == child })
}

// hangUp closes the group's data connections, which ends whatever uses them.
func (g *group) hangUp() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.link != nil {
		g.link.close()
	}
	if g.shared != nil {
		g.shared.hangUp()
	}
	for _, c := range g.inbound {
		_ = c.Close()
	}
	for _, c := range g.outbound {
		_ = c.Close()
	}
}
