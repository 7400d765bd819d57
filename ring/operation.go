package ring

import (
	"context"
	"fmt"
	"time"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/trace"
)

// operation is one call. They are pooled, and run is made once for each, so
// that a collective allocates nothing.
type operation struct {
	g        *group
	call     comm.Call
	peer     int // of Send and Recv, else -1
	seq      uint64
	dst, src []byte
	payload  [16]byte // of Split; also Barrier's token
	flight   trace.FlightID
	run      func() error
	next     *operation
}

func (g *group) operation() *operation {
	g.mu.Lock()
	defer g.mu.Unlock()
	if o := g.free; o != nil {
		g.free = o.next
		return o
	}
	o := &operation{g: g}
	o.run = func() error { return o.g.execute(o) }
	return o
}

func (g *group) recycle(o *operation) {
	g.mu.Lock()
	defer g.mu.Unlock()
	*o = operation{g: g, run: o.run, next: g.free}
	g.free = o
}

// enqueue queues a call on s.
func (g *group) enqueue(s device.Stream, dst, src device.Buffer, c comm.Call, peer int) error {
	if g.err.Load() != nil || g.n.failure.Load() != nil || g.n.suspect.Load() != nil {
		return g.check(&operation{call: c, seq: *g.counter(c.Kind, peer)})
	}
	if err := c.Prepare(g.rank, len(g.world), dst, src); err != nil {
		return err
	}
	d, err := comm.HostBytes(c.Kind, dst)
	if err != nil {
		return err
	}
	b, err := comm.HostBytes(c.Kind, src)
	if err != nil {
		return err
	}
	o := g.operation()
	o.call, o.peer, o.dst, o.src = c, peer, d, b
	count := g.counter(c.Kind, peer)
	o.seq = *count
	g.pending.Add(1)
	g.record(o)
	if err := s.HostFunc(o.run); err != nil {
		g.pending.Add(-1)
		g.n.o.Flight.End(o.flight, true)
		g.recycle(o)
		return err
	}
	*count++
	return nil
}

// counter numbers calls: collectives have one sequence, each direction of each
// pair has its own.
func (g *group) counter(k comm.Kind, peer int) *uint64 {
	switch k {
	case comm.KindSend:
		return &g.sendSeq[peer]
	case comm.KindRecv:
		return &g.recvSeq[peer]
	}
	return &g.seq
}

// execute runs o when it is at the head of the queue.
func (g *group) execute(o *operation) error {
	g.run.Lock()
	defer g.run.Unlock()
	defer g.pending.Add(-1)
	if err := g.check(o); err != nil {
		g.n.o.Flight.End(o.flight, true)
		return err
	}
	g.begin(o)
	err := g.perform(o)
	elapsed := g.end()
	g.n.o.Flight.End(o.flight, err != nil)
	if err != nil {
		return g.opError(g.n.settle(g.classify(o, err)), o, elapsed)
	}
	g.recycle(o)
	return nil
}

// onHost runs a call on the caller's goroutine. When ctx ends first the group
// fails: the others wait for this rank.
func (g *group) onHost(ctx context.Context, o *operation) error {
	o.seq = g.seq
	if err := g.check(o); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	g.seq++
	g.pending.Add(1)
	g.record(o)
	// What the callback needs is copied: o is recycled when it is done.
	f := &failure{code: codeAborted, culprit: g.world[g.rank], reporter: g.n.o.Rank,
		kind: o.call.Kind, group: g.id, seq: o.seq, tag: o.call.Tag}
	stop := context.AfterFunc(ctx, func() {
		f.cause = abortCause(context.Cause(ctx))
		f.text = f.cause.Error()
		g.n.settle(f)
	})
	defer stop()
	return g.execute(o)
}

// active is the operation at the head of the queue, for the clock and for
// failures that come from elsewhere.
type active struct {
	since int64 // node.now, 0 when there is none
	call  comm.Call
	peer  int
	seq   uint64
}

func (g *group) begin(o *operation) {
	g.mu.Lock()
	g.active = active{g.n.now(), o.call, o.peer, o.seq}
	g.mu.Unlock()
	g.n.o.Flight.Start(o.flight)
	if o.peer < 0 {
		g.started.Store(o.seq + 1)
	}
}

func (g *group) end() time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	d := time.Duration(g.n.now() - g.active.since)
	g.active = active{}
	return d
}

// describe adds the running operation to f and reports whether there is one.
func (g *group) describe(f *failure) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	a := &g.active
	if a.since == 0 {
		return false
	}
	f.kind, f.group, f.seq, f.tag = a.call.Kind, g.id, a.seq, a.call.Tag
	return true
}

// overdue is the failure of an operation that has waited too long, else nil.
func (g *group) overdue(now int64) *failure {
	g.mu.Lock()
	defer g.mu.Unlock()
	a := &g.active
	if a.since == 0 || time.Duration(now-a.since) <= g.n.o.Timeout || g.late {
		return nil
	}
	g.late = true // report once
	peer := a.peer
	if peer < 0 {
		peer = g.left()
	}
	f := &failure{code: codeTimeout, culprit: g.world[peer], reporter: g.n.o.Rank,
		kind: a.call.Kind, group: g.id, seq: a.seq, tag: a.call.Tag}
	f.text = fmt.Sprintf("nothing came from rank %d within %v", peer, g.n.o.Timeout)
	if a.call.Kind == comm.KindSend {
		f.text = fmt.Sprintf("rank %d took nothing within %v", peer, g.n.o.Timeout)
	}
	return f
}
