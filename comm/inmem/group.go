package inmem

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/internal/simd"
)

// domain is what fails together: a group and everything split from it.
type domain struct {
	dev     device.Device
	opts    Options
	kernels *simd.Kernels
	failure atomic.Pointer[failure]

	mu     sync.Mutex
	groups []*group
}

// failure is the first thing that went wrong, in numbers of the world group.
type failure struct {
	call    comm.Call
	seq     uint64
	culprit int
	cause   error
}

func newDomain(dev device.Device, o Options) (*domain, error) {
	k, err := simd.For(simd.Best())
	if err != nil {
		return nil, fmt.Errorf("inmem: %w", err)
	}
	return &domain{dev: dev, opts: o, kernels: k}, nil
}

// group is one set of ranks that meet in slots.
type group struct {
	d     *domain
	world []int // world rank of each member
	ranks []*rank

	mu    sync.Mutex
	cond  sync.Cond // something changed: an operation is done, the domain failed
	slots map[slotKey]*slot
	free  *slot
	done  uint64 // collectives that are over

	scratch []byte // of whoever runs a slot; slots of pairs take turns too
	busy    bool   // scratch is in use
}

// slotKey is what ranks meet for: collective seq of the group (pair -1), or
// message seq from one rank to another (pair = from·size + to).
type slotKey struct {
	pair int
	seq  uint64
}

// slot is one meeting.
type slot struct {
	key     slotKey
	ops     []*operation // by rank; of a pair the sender's and the receiver's
	need    int          // how many make it complete
	arrived int
	left    int
	first   *operation // who opened the slot
	running bool
	done    bool
	next    *slot
}

func (d *domain) newGroup(world []int) *group {
	g := &group{d: d, world: world, slots: map[slotKey]*slot{}, scratch: make([]byte, 2*chunkBytes)}
	g.cond.L = &g.mu
	for i := range world {
		r := &rank{g: g, rank: i, sendSeq: make([]uint64, len(world)), recvSeq: make([]uint64, len(world))}
		r.timer = time.AfterFunc(time.Hour, r.timeout)
		r.timer.Stop()
		g.ranks = append(g.ranks, r)
	}
	d.mu.Lock()
	d.groups = append(d.groups, g)
	d.mu.Unlock()
	return g
}

// local is the group's number of a world rank, -1 for one outside.
func (g *group) local(world int) int { return slices.Index(g.world, world) }

// fail records the first failure and wakes everybody.
func (g *group) fail(f failure) {
	if !g.d.failure.CompareAndSwap(nil, &f) {
		return
	}
	g.d.opts.Logger.Error("group failed", "culprit", f.culprit, "op", f.call.Kind, "seq", f.seq, "err", f.cause)
	g.d.mu.Lock()
	defer g.d.mu.Unlock()
	for _, h := range g.d.groups {
		h.mu.Lock()
		h.cond.Broadcast()
		h.mu.Unlock()
	}
}

// oldest is the incomplete collective that others wait in, nil if none.
func (g *group) oldest() *slot {
	var first *slot
	for _, s := range g.slots {
		if s.arrived < s.need && (first == nil || s.key.seq < first.key.seq) {
			first = s
		}
	}
	return first
}

// slot finds or opens the meeting of o. The caller holds g.mu.
func (g *group) slot(o *operation) *slot {
	key, need := o.key(), len(g.ranks)
	if o.peer >= 0 {
		need = 2
	}
	s := g.slots[key]
	if s != nil {
		return s
	}
	if s = g.free; s != nil {
		g.free = s.next
		clear(s.ops)
		*s = slot{ops: s.ops}
	} else {
		s = &slot{ops: make([]*operation, max(2, len(g.ranks)))}
	}
	s.key, s.need, s.first = key, need, o
	g.slots[key] = s
	return s
}

// leaveSlot gives s back when the last of its ranks is out.
func (g *group) leaveSlot(s *slot) {
	if s.left++; s.left < s.arrived || !s.done {
		return
	}
	delete(g.slots, s.key)
	s.next, g.free = g.free, s
}

// leave closes r: whoever waits for it, or will, gets an error.
func (g *group) leave(r *rank) {
	g.mu.Lock()
	if r.closed {
		g.mu.Unlock()
		return
	}
	r.closed = true
	var f *failure
	if s := g.waitingFor(r.rank); s != nil {
		f = &failure{call: s.first.call, seq: s.key.seq, culprit: g.world[r.rank], cause: comm.ErrClosed}
	}
	g.mu.Unlock()
	if f != nil {
		g.fail(*f)
	}
	g.mu.Lock()
	for r.running > 0 {
		g.cond.Wait()
	}
	children := r.children
	g.mu.Unlock()
	for _, c := range children {
		_ = c.Close()
	}
	r.opError(&failure{call: comm.Call{Kind: comm.KindBarrier}, seq: r.seq, culprit: g.world[r.rank], cause: comm.ErrClosed}, 0)
}

// waitingFor is a meeting that rank has not come to, nil if none.
func (g *group) waitingFor(rank int) *slot {
	for _, s := range g.slots {
		if s.arrived < s.need && s.lacks(rank, len(g.ranks)) {
			return s
		}
	}
	return nil
}

func (s *slot) lacks(rank, size int) bool {
	if s.key.pair < 0 {
		return s.ops[rank] == nil
	}
	return s.ops[0] == nil && s.key.pair/size == rank || s.ops[1] == nil && s.key.pair%size == rank
}

// split makes the child groups once all ranks have said where they belong.
func (g *group) split(s *slot) {
	byColor := map[int][]int{}
	for i, o := range s.ops[:len(g.ranks)] {
		if o.split.color >= 0 {
			byColor[o.split.color] = append(byColor[o.split.color], i)
		}
	}
	for _, members := range byColor {
		slices.SortStableFunc(members, func(a, b int) int { return cmp.Compare(s.ops[a].split.key, s.ops[b].split.key) })
		world := make([]int, len(members))
		for i, m := range members {
			world[i] = g.world[m]
		}
		h := g.d.newGroup(world)
		for i, m := range members {
			s.ops[m].child = h.ranks[i]
		}
	}
}

// timeout is the deadline of the operation that r is in.
func (r *rank) timeout() {
	g := r.g
	g.mu.Lock()
	o := r.current
	if o == nil {
		g.mu.Unlock()
		return
	}
	s := g.slots[o.key()]
	if s == nil || s.arrived == s.need {
		g.mu.Unlock()
		return
	}
	absent := -1
	for i := range g.ranks {
		if s.lacks(i, len(g.ranks)) {
			absent = i
			break
		}
	}
	f := failure{call: o.call, seq: o.seq, culprit: g.world[absent], cause: fmt.Errorf(
		"rank %d did not come within %v: %w", absent, g.d.opts.Timeout, context.DeadlineExceeded)}
	g.mu.Unlock()
	g.fail(f)
}
