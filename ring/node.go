package ring

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/internal/auth"
	"github.com/tandem-go/tandem/internal/simd"
)

// node is this process's part of the job: its listener, its control
// connections, and everything that fails together, which is the world group
// and all groups split from it.
type node struct {
	o       Options
	self    auth.Hello
	job     uint64
	cards   []card
	lis     *listener
	host    *host // nil when memory is shared with nobody
	kernels *simd.Kernels
	start   time.Time

	suspect atomic.Pointer[failure] // what this rank has told rank 0
	failure atomic.Pointer[failure] // what all ranks were told, or this one gave up waiting for
	failed  chan struct{}           // closed once failure is set
	stop    chan struct{}           // closed by close

	peers []*control // by world rank; all have ranks 0 and 1, which have all
	court court      // of the arbiter and its deputy

	dumped chan struct{} // closed when the flight record is on disk; set once failure is

	mu      sync.Mutex
	groups  []*group // replaced, never changed: readers keep the slice
	closing bool
	wg      sync.WaitGroup
}

const (
	// grace is how long a rank whose connection broke waits for the cause, and
	// patience how long if the arbiter is known to live but short of time.
	grace    = 500 * time.Millisecond
	patience = 3 * time.Second
	// symptomGrace is how long the arbiter waits for a better explanation than a
	// broken connection, and queryGrace for answers of ranks that are silent as
	// well; both end before grace. queryLimit is for ranks that live.
	symptomGrace = 250 * time.Millisecond
	queryGrace   = 300 * time.Millisecond
	queryLimit   = 2 * time.Second
)

// New joins the group of o.Size ranks and returns when this rank is connected
// to all that it needs: its neighbours and ranks 0 and 1. It fails when ctx ends, after
// o.Timeout, or at once when ranks contradict one another. A Store takes one
// group per Generation; give a second group a rendezvous.Prefix of its own.
func New(ctx context.Context, o Options) (comm.Communicator, error) {
	o, err := o.validate()
	if err != nil {
		return nil, err
	}
	k, err := simd.For(simd.Best())
	if err != nil {
		return nil, fmt.Errorf("ring: %w", err)
	}
	n := &node{o: o, job: hash64(o.JobID), kernels: k, start: time.Now(),
		self:   auth.Hello{JobID: o.JobID, Generation: o.Generation, Purpose: purpose, Rank: o.Rank},
		failed: make(chan struct{}), stop: make(chan struct{}), peers: make([]*control, o.Size)}
	world := make([]int, o.Size)
	for i := range world {
		world[i] = i
	}
	g := n.newGroup(nil, hash64("world"), "world", world, o.Rank)
	if o.Size == 1 {
		return g, nil
	}
	ctx, cancel := context.WithTimeout(ctx, o.Timeout+joinGrace)
	defer cancel()
	if err := n.connect(ctx, g); err != nil {
		if n.peers[0] != nil || o.Rank == 0 { // those who are connected need not wait for this rank
			n.settle(&failure{code: codeLost, culprit: o.Rank, reporter: o.Rank, kind: comm.KindBarrier,
				group: g.id, tag: comm.Tag{Name: "connect", Bucket: -1}, cause: err, text: err.Error()})
			err = g.Err()
		}
		_ = g.Close()
		return nil, err
	}
	return g, nil
}

// connect opens the listener, meets the others and starts the clock.
func (n *node) connect(ctx context.Context, g *group) error {
	ips, err := n.o.hostIPs(net.LookupIP)
	if err != nil {
		return err
	}
	if n.lis, err = listen(ips, &n.o, n.self); err != nil {
		return err
	}
	self := n.offer(ctx)
	if n.cards, err = join(ctx, &n.o, self); err != nil {
		return err
	}
	if err := n.keepHost(); err != nil {
		return err
	}
	return together(ctx, &n.o, func(ctx context.Context) error {
		err := n.connectControl(ctx)
		for _, c := range n.peers { // after an error too: the verdict comes this way
			if c != nil {
				n.spawn(func() { n.read(c) })
			}
		}
		if err != nil {
			return err
		}
		n.spawn(n.clock)
		return g.connect(ctx)
	})
}

// connectControl connects every rank with rank 0, which arbitrates, and with
// rank 1, its deputy.
func (n *node) connectControl(ctx context.Context) error {
	self := n.o.Rank
	for r := range min(self, 2) {
		c, err := dial(ctx, n.cards[r].Addrs, &n.o, n.self, connKey{kind: connControl, from: self}, r)
		if err != nil {
			return err
		}
		n.peers[r] = n.newControl(r, c)
	}
	if self > 1 {
		return nil
	}
	for r := self + 1; r < n.o.Size; r++ {
		c, err := n.lis.take(ctx, n.stop, connKey{kind: connControl, from: r})
		if err != nil {
			return err
		}
		n.peers[r] = n.newControl(r, c)
	}
	return nil
}

// now is the time since the node began, in nanoseconds; never 0.
func (n *node) now() int64 { return int64(time.Since(n.start)) + 1 }

// clock sends heartbeats and watches everything that has a deadline: silent
// peers and operations at the head of a queue. It is the node's only timer.
func (n *node) clock() {
	tick := min(n.o.Heartbeat/2, n.o.Timeout/8, n.o.DeadAfter/4)
	tick = max(2*time.Millisecond, min(tick, 250*time.Millisecond))
	t := time.NewTicker(tick)
	defer t.Stop()
	last, beat := n.now(), int64(0)
	for {
		select {
		case <-n.stop:
			return
		case <-t.C:
		}
		now := n.now()
		if now-last > int64(n.o.DeadAfter)/2 { // this process slept, not its peers
			for _, c := range n.peers {
				if c != nil {
					c.heard.Store(now)
				}
			}
		}
		last = now
		if now-beat >= int64(n.o.Heartbeat) {
			beat = now
			n.tellAll(&message{kind: msgHeartbeat})
		}
		n.watch(now)
	}
}

// watch looks for silent peers and late operations.
func (n *node) watch(now int64) {
	if n.failure.Load() != nil {
		return
	}
	for _, c := range n.peers {
		if c == nil || c.gone.Load() {
			continue
		}
		if quiet := time.Duration(now - c.heard.Load()); quiet > n.o.DeadAfter {
			n.lost(c, fmt.Sprintf("rank %d was silent for %v", c.peer, quiet.Round(time.Millisecond)))
		}
	}
	groups := n.allGroups()
	for _, g := range groups {
		if f := g.overdue(now); f != nil {
			n.spawn(func() { n.settle(f) }) // it waits; the clock must not
		}
	}
}

// settle makes f the failure of the group unless the arbiter knows better: f is
// reported, and the verdict awaited for a moment, from the deputy too if rank 0
// is silent. It returns what was decided.
func (n *node) settle(f *failure) *failure {
	if n.failure.Load() == nil && n.suspect.CompareAndSwap(nil, f) {
		n.report(f)
	}
	for begun := time.Now(); ; {
		asked := n.arbiter()
		select {
		case <-n.failed:
			return n.failure.Load()
		case <-time.After(grace):
		}
		// An arbiter that lives, perhaps this rank, will decide.
		alive := asked == nil && n.o.Rank <= 1 || asked != nil && !n.silent(asked)
		switch {
		case alive && time.Since(begun) < patience:
		case asked == nil || alive:
			n.adopt(n.alone(f))
		default:
			n.lost(asked, fmt.Sprintf("rank %d does not answer (seen here: %s)", asked.peer, f.text))
		}
	}
}

// silent is whether c has missed a heartbeat.
func (n *node) silent(c *control) bool {
	return time.Duration(n.now()-c.heard.Load()) > 2*n.o.Heartbeat
}

// arbiter is the connection to the rank that decides which failure came first:
// rank 0, or rank 1 when rank 0 is gone. It is nil on the arbiter itself, and
// when both are gone.
func (n *node) arbiter() *control {
	for r := range min(n.o.Rank, 2) {
		if c := n.peers[r]; c != nil && !c.gone.Load() {
			return c
		}
	}
	return nil
}

// report tells the arbiter, or judges when that is this rank. Without either
// this rank has nobody to agree with.
func (n *node) report(f *failure) {
	for {
		c := n.arbiter()
		switch {
		case c == nil && n.o.Rank <= 1:
			n.accuse(f)
			return
		case c == nil:
			n.adopt(n.alone(f))
			return
		case c.send(&message{kind: msgReport, failure: f}) == nil:
			return
		}
		c.gone.Store(true)
	}
}

// alone is f as a rank tells it that has no arbiter: if one has closed, that is
// where broken connections come from.
func (n *node) alone(f *failure) *failure {
	for r := range min(n.o.Rank, 2) {
		if c := n.peers[r]; c != nil && c.left.Load() && f.weak {
			return n.departed(f, r)
		}
	}
	return f
}

// departed turns a broken connection into the orderly end of rank r.
func (n *node) departed(f *failure, r int) *failure {
	g := *f
	g.code, g.weak, g.culprit, g.cause = codeClosed, false, r, nil
	g.text = fmt.Sprintf("rank %d closed its communicator", r)
	return &g
}

// adopt ends the node's groups with f, once.
func (n *node) adopt(f *failure) {
	if !n.failure.CompareAndSwap(nil, f) {
		return
	}
	close(n.failed)
	n.o.Logger.Error("communicator failed", "rank", n.o.Rank, "culprit", f.culprit, "seq", f.seq,
		"bucket", f.tag.Bucket, "err", f.text)
	n.dumpFlight(f)
	groups := n.allGroups()
	for _, g := range groups {
		g.hangUp()
	}
}

// withOperation completes a failure that has no operation with one that is
// running here.
func (n *node) withOperation(f *failure) *failure {
	if f.kind != 0 {
		return f
	}
	groups := n.allGroups()
	g := *f
	for _, h := range groups {
		if h.describe(&g) {
			break
		}
	}
	return &g
}

func (n *node) allGroups() []*group {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.groups
}

// startedIn is how many collectives of a group began here; the largest number
// when this rank is not in it.
func (n *node) startedIn(id uint64) uint64 {
	for _, g := range n.allGroups() {
		if g.id == id {
			return g.started.Load()
		}
	}
	return math.MaxUint64
}

// abort fails the groups with a cause that arose here, without waiting.
func (n *node) abort(f *failure) {
	if n.failure.Load() != nil || n.suspect.Load() != nil {
		return
	}
	n.spawn(func() { n.settle(f) })
}

// spawn starts a goroutine that close waits for, unless close has begun.
func (n *node) spawn(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.closing {
		n.wg.Go(f)
	}
}

// leave says goodbye. It comes before the data connections are closed, so that
// their end is understood.
func (n *node) leave() {
	n.court.mu.Lock() // a verdict that is being told goes out first
	n.court.closed = true
	if n.court.timer != nil {
		n.court.timer.Stop()
	}
	n.court.mu.Unlock()
	n.mu.Lock()
	n.closing = true
	n.mu.Unlock()
	n.tellAll(&message{kind: msgBye})
}

// close ends the node and leaves nothing behind.
func (n *node) close() {
	close(n.stop)
	for _, c := range n.peers {
		if c != nil {
			c.gone.Store(true)
			_ = c.conn.Close()
		}
	}
	if n.lis != nil {
		n.lis.close()
	}
	n.wg.Wait()
	n.awaitFlight()
}

// abortCause is the error of Abort and of ended contexts.
func abortCause(cause error) error {
	if cause == nil {
		cause = errors.New("no cause given")
	}
	return fmt.Errorf("%w: %w", comm.ErrAborted, cause)
}
