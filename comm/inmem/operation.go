package inmem

import (
	"time"

	"github.com/tandem-go/tandem/comm"
)

// operation is one call of one rank. They are pooled, and run is made once, so
// that a collective allocates nothing.
type operation struct {
	r        *rank
	call     comm.Call
	peer     int
	seq      uint64
	dst, src []byte
	split    splitArgs
	child    *rank
	run      func() error
	next     *operation
}

type splitArgs struct{ color, key int }

func (r *rank) operation() *operation {
	r.g.mu.Lock()
	defer r.g.mu.Unlock()
	if o := r.free; o != nil {
		r.free = o.next
		return o
	}
	o := &operation{r: r}
	o.run = func() error {
		_, err := o.r.execute(o)
		return err
	}
	return o
}

func (r *rank) recycle(o *operation) {
	r.g.mu.Lock()
	r.recycleLocked(o)
	r.g.mu.Unlock()
}

func (r *rank) recycleLocked(o *operation) {
	*o = operation{r: r, run: o.run, next: r.free}
	r.free = o
}

// index is the operation's place in its slot.
func (o *operation) index() int {
	switch {
	case o.peer < 0:
		return o.r.rank
	case o.call.Kind == comm.KindSend:
		return 0
	}
	return 1
}

func (o *operation) key() slotKey {
	n := len(o.r.g.ranks)
	switch {
	case o.peer < 0:
		return slotKey{-1, o.seq}
	case o.call.Kind == comm.KindSend:
		return slotKey{o.r.rank*n + o.peer, o.seq}
	}
	return slotKey{o.peer*n + o.r.rank, o.seq}
}

// execute meets the other ranks; the last to come does the work for all.
func (r *rank) execute(o *operation) (*rank, error) {
	start := time.Now()
	g := r.g
	if f := g.d.opts.Delay; f != nil {
		f(r.rank, o.seq, o.call.Tag)
	}
	g.mu.Lock()
	r.running++
	s := r.meet(o)
	child := o.child
	f := g.d.failure.Load()
	failed := s == nil || !s.done
	if s != nil {
		g.leaveSlot(s)
	}
	if failed && f == nil { // closed by this rank itself
		f = &failure{call: o.call, seq: o.seq, culprit: g.world[r.rank], cause: comm.ErrClosed}
	}
	if child != nil {
		r.children = append(r.children, child)
	}
	if !failed {
		r.recycleLocked(o) // a failed one may still be looked at
	}
	r.running--
	r.pending.Add(-1)
	if r.closed {
		g.cond.Broadcast()
	}
	g.mu.Unlock()
	if failed {
		return nil, r.opError(f, time.Since(start))
	}
	return child, nil
}

// meet joins o's slot and waits until it is done or the group has failed. It
// returns nil if the group had failed before. The caller holds g.mu.
func (r *rank) meet(o *operation) *slot {
	g := r.g
	if r.closed || g.d.failure.Load() != nil {
		return nil
	}
	s := g.slot(o)
	s.ops[o.index()] = o
	s.arrived++
	if s.arrived == s.need {
		r.complete(s)
		return s
	}
	if gone := g.absentee(s); gone >= 0 {
		f := failure{call: o.call, seq: o.seq, culprit: g.world[gone], cause: comm.ErrClosed}
		g.mu.Unlock()
		g.fail(f)
		g.mu.Lock()
		return s
	}
	r.current = o
	r.timer.Reset(g.d.opts.Timeout)
	for !s.done && (s.running || g.d.failure.Load() == nil) {
		g.cond.Wait()
	}
	r.timer.Stop()
	r.current = nil
	return s
}

// absentee is a rank that s waits for and that has closed, or -1.
func (g *group) absentee(s *slot) int {
	for i, r := range g.ranks {
		if r.closed && s.lacks(i, len(g.ranks)) {
			return i
		}
	}
	return -1
}

// complete compares the calls of a full slot and does the work, outside the
// lock: ranks that wait in s stay there while running is set.
func (r *rank) complete(s *slot) {
	g := r.g
	for g.busy {
		g.cond.Wait()
	}
	g.busy, s.running = true, true
	g.mu.Unlock()
	f := g.disagreement(s)
	if f == nil {
		g.work(s)
	} else {
		g.fail(*f)
	}
	g.mu.Lock()
	g.busy, s.running, s.done = false, false, f == nil
	if f == nil && s.key.pair < 0 {
		g.done = s.key.seq + 1
	}
	g.cond.Broadcast()
}

// disagreement compares all calls with the first rank's.
func (g *group) disagreement(s *slot) *failure {
	a := s.ops[0]
	for _, b := range s.ops[1:s.need] {
		if err := comm.Disagree(a.r.rank, a.call, b.r.rank, b.call); err != nil {
			return &failure{call: a.call, seq: s.key.seq, culprit: g.world[b.r.rank], cause: err}
		}
	}
	return nil
}
