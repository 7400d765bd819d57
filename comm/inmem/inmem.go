// Package inmem makes the goroutines of one process the ranks of a group. It
// moves data by plain copies and has no sockets: it is for tests and examples,
// and the place where a test can delay or abort collectives as it likes.
package inmem

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// Options of New; nil and zero values mean the defaults.
type Options struct {
	// Timeout is how long an operation that is at the head of its queue waits
	// for the other ranks. Default 60 s.
	Timeout time.Duration
	// Delay, if set, is called on the stream's goroutine before an operation
	// joins the others, and may sleep. It is how tests reorder what happens on
	// different ranks. seq counts the collectives of one communicator from 0.
	Delay func(rank int, seq uint64, tag comm.Tag)
	// Logger gets one line when the group fails. nil discards.
	Logger *slog.Logger
}

func (o *Options) validate() (Options, error) {
	var v Options
	if o != nil {
		v = *o
	}
	if v.Timeout < 0 {
		return v, fmt.Errorf("inmem: Timeout %v is negative", v.Timeout)
	}
	if v.Timeout == 0 {
		v.Timeout = 60 * time.Second
	}
	if v.Logger == nil {
		v.Logger = slog.New(slog.DiscardHandler)
	}
	return v, nil
}

// New makes a group of n ranks over the memory of dev, which must be a host
// device. Element i of the result is rank i's communicator; each must be used
// with a stream of its own, because a collective blocks its stream until all
// ranks have come.
func New(dev device.Device, n int, o *Options) ([]comm.Communicator, error) {
	opts, err := o.validate()
	if err != nil {
		return nil, err
	}
	if n < 1 {
		return nil, fmt.Errorf("inmem: group of %d ranks, want at least 1", n)
	}
	d, err := newDomain(dev, opts)
	if err != nil {
		return nil, err
	}
	world := make([]int, n)
	for i := range world {
		world[i] = i
	}
	g := d.newGroup(world)
	all := make([]comm.Communicator, n)
	for i := range all {
		all[i] = g.ranks[i]
	}
	return all, nil
}

// rank is one rank's communicator.
type rank struct {
	g    *group
	rank int

	seq     uint64 // of the next collective; the caller's goroutine only
	sendSeq []uint64
	recvSeq []uint64

	pending atomic.Int64 // operations queued and not finished
	err     atomic.Pointer[comm.OpError]

	// The rest is guarded by g.mu.
	closed   bool
	running  int
	children []*rank
	current  *operation // what the timer is about
	timer    *time.Timer
	free     *operation
}

var _ comm.Communicator = (*rank)(nil)

func (r *rank) Rank() int { return r.rank }
func (r *rank) Size() int { return len(r.g.ranks) }

func (r *rank) Alloc(bytes int) (device.Buffer, error) { return r.g.d.dev.Alloc(bytes) }

func (r *rank) AllReduce(s device.Stream, dst, src device.Buffer, t dtype.Type, op comm.Op, tag comm.Tag) error {
	return r.enqueue(s, dst, src, comm.Call{Kind: comm.KindAllReduce, Op: op, Type: t, Tag: tag}, -1)
}

func (r *rank) ReduceScatter(s device.Stream, dst, src device.Buffer, t dtype.Type, op comm.Op, tag comm.Tag) error {
	return r.enqueue(s, dst, src, comm.Call{Kind: comm.KindReduceScatter, Op: op, Type: t, Tag: tag}, -1)
}

func (r *rank) AllGather(s device.Stream, dst, src device.Buffer, t dtype.Type, tag comm.Tag) error {
	return r.enqueue(s, dst, src, comm.Call{Kind: comm.KindAllGather, Type: t, Tag: tag}, -1)
}

func (r *rank) Broadcast(s device.Stream, buf device.Buffer, t dtype.Type, root int, tag comm.Tag) error {
	return r.enqueue(s, buf, buf, comm.Call{Kind: comm.KindBroadcast, Type: t, Root: root, Tag: tag}, -1)
}

// Send waits until the peer has received.
func (r *rank) Send(s device.Stream, src device.Buffer, t dtype.Type, peer int, tag comm.Tag) error {
	if err := r.checkPeer(comm.KindSend, peer); err != nil {
		return err
	}
	return r.enqueue(s, src, src, comm.Call{Kind: comm.KindSend, Type: t, Root: r.rank, Tag: tag}, peer)
}

func (r *rank) Recv(s device.Stream, dst device.Buffer, t dtype.Type, peer int, tag comm.Tag) error {
	if err := r.checkPeer(comm.KindRecv, peer); err != nil {
		return err
	}
	return r.enqueue(s, dst, dst, comm.Call{Kind: comm.KindRecv, Type: t, Root: peer, Tag: tag}, peer)
}

func (r *rank) checkPeer(k comm.Kind, peer int) error {
	if peer < 0 || peer >= r.Size() || peer == r.rank {
		return fmt.Errorf("comm: %v on rank %d: peer %d is not another rank of the group of %d", k, r.rank, peer, r.Size())
	}
	return nil
}

// enqueue queues a call on s. peer is the other rank of Send and Recv, or -1.
func (r *rank) enqueue(s device.Stream, dst, src device.Buffer, c comm.Call, peer int) error {
	if err := r.Err(); err != nil {
		return err
	}
	if err := c.Prepare(r.rank, r.Size(), dst, src); err != nil {
		return err
	}
	o := r.operation()
	var err error
	if o.dst, err = comm.HostBytes(c.Kind, dst); err != nil {
		return err
	}
	if o.src, err = comm.HostBytes(c.Kind, src); err != nil {
		return err
	}
	o.call, o.peer = c, peer
	count := r.counter(c.Kind, peer)
	o.seq = *count
	r.pending.Add(1)
	if err := s.HostFunc(o.run); err != nil {
		r.pending.Add(-1)
		r.recycle(o)
		return err
	}
	*count++
	return nil
}

// counter is the sequence number that a call takes: collectives share one,
// each direction of each pair has its own.
func (r *rank) counter(k comm.Kind, peer int) *uint64 {
	switch k {
	case comm.KindSend:
		return &r.sendSeq[peer]
	case comm.KindRecv:
		return &r.recvSeq[peer]
	}
	return &r.seq
}

func (r *rank) Barrier(ctx context.Context) error {
	_, err := r.onHost(ctx, comm.Call{Kind: comm.KindBarrier, Tag: comm.Tag{Bucket: -1}}, splitArgs{})
	return err
}

func (r *rank) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	child, err := r.onHost(ctx, comm.Call{Kind: comm.KindSplit, Tag: comm.Tag{Bucket: -1}}, splitArgs{color, key})
	if child == nil {
		return nil, err
	}
	return child, err
}

// onHost runs a call on the caller's goroutine. When ctx ends first the group
// has failed: the other ranks would wait for this one.
func (r *rank) onHost(ctx context.Context, c comm.Call, args splitArgs) (*rank, error) {
	if err := r.Err(); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	o := r.operation()
	o.call, o.peer, o.seq, o.split = c, -1, r.seq, args
	r.seq++
	r.pending.Add(1)
	stop := context.AfterFunc(ctx, func() {
		r.g.fail(failure{call: c, seq: o.seq, culprit: r.g.world[r.rank], cause: context.Cause(ctx)})
	})
	child, err := r.execute(o)
	stop()
	return child, err
}

func (r *rank) Err() error {
	if e := r.err.Load(); e != nil {
		return e
	}
	f := r.g.d.failure.Load()
	if f == nil {
		return nil
	}
	return r.opError(f, 0)
}

// opError is f as this rank tells it. The first call decides the wording.
func (r *rank) opError(f *failure, elapsed time.Duration) error {
	r.err.CompareAndSwap(nil, &comm.OpError{
		Op: f.call.Kind.String(), Rank: r.rank, Culprit: r.g.local(f.culprit),
		Seq: f.seq, Tag: f.call.Tag, Elapsed: elapsed, Err: f.cause,
	})
	return r.err.Load()
}

func (r *rank) Abort(cause error) {
	if cause == nil {
		cause = errors.New("no cause given")
	}
	r.failHere(fmt.Errorf("%w: %w", comm.ErrAborted, cause))
}

// failHere fails the group because of this rank, in the operation that it is in.
func (r *rank) failHere(cause error) {
	r.g.mu.Lock()
	f := failure{culprit: r.g.world[r.rank], cause: cause, seq: r.g.done}
	if r.current != nil {
		f.call, f.seq = r.current.call, r.current.seq
	} else if s := r.g.oldest(); s != nil {
		f.call, f.seq = s.first.call, s.key.seq
	}
	r.g.mu.Unlock()
	r.g.fail(f)
}

func (r *rank) Close() error {
	if r.pending.Load() > 0 {
		r.failHere(comm.ErrClosed)
	}
	r.g.leave(r)
	return nil
}
