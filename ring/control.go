package ring

import (
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-go/tandem/comm"
)

// sendTime bounds a write of a control message. The socket's buffer is empty
// unless the peer has been stopped for hours.
const sendTime = 200 * time.Millisecond

// control is the connection between rank 0 and another rank on which they tell
// one another that they live and why they stop.
type control struct {
	peer  int
	conn  net.Conn
	heard atomic.Int64 // when the last message came
	gone  atomic.Bool  // nothing more will come
	left  atomic.Bool  // because of an orderly end

	mu  sync.Mutex
	buf []byte
}

func (n *node) newControl(peer int, c net.Conn) *control {
	k := &control{peer: peer, conn: c, buf: make([]byte, 0, maxMessage)}
	k.heard.Store(n.now())
	return k
}

func (c *control) send(m *message) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.buf = m.append(c.buf[:0])
	_ = c.conn.SetWriteDeadline(time.Now().Add(sendTime))
	_, err := c.conn.Write(c.buf)
	return err
}

// tellAll sends m to everybody that this node has a control connection to. A
// failed write shows as a failed read, where it is dealt with.
func (n *node) tellAll(m *message) {
	for _, c := range n.peers {
		if c != nil && !c.gone.Load() {
			_ = c.send(m)
		}
	}
}

// read handles what comes from one peer until the connection ends.
func (n *node) read(c *control) {
	buf := make([]byte, maxMessage)
	for {
		m, err := readMessage(c.conn, buf)
		if err != nil {
			why := fmt.Sprintf("rank %d died: its control connection broke", c.peer)
			if err != io.EOF {
				why += ": " + err.Error()
			}
			n.lost(c, why)
			return
		}
		c.heard.Store(n.now())
		n.handle(c, &m)
	}
}

func (n *node) handle(c *control, m *message) {
	switch m.kind {
	case msgReport:
		if n.o.Rank <= 1 && m.failure.culprit < n.o.Size {
			n.accuse(m.failure)
		}
	case msgVerdict:
		if c.peer <= 1 && m.failure.culprit < n.o.Size {
			n.adopt(n.own(m.failure))
		}
	case msgQuery:
		_ = c.send(&message{kind: msgStatus, group: m.group, started: n.startedIn(m.group)})
	case msgStatus:
		n.answer(c.peer, m)
	case msgBye:
		was := n.arbiter()
		c.left.Store(true)
		c.gone.Store(true)
		if f := n.suspect.Load(); f != nil && was == c { // it will not judge
			n.report(f)
		}
	}
}

// own gives a verdict that this rank had asked for its own cause back, which
// errors.Is knows more of than the wording.
func (n *node) own(f *failure) *failure {
	if s := n.suspect.Load(); s != nil && f.reporter == n.o.Rank && s.text == f.text {
		f.cause = s.cause
	}
	return f
}

// lost handles the end of a control connection, or its silence. Ranks 0 and 1
// see the end of all others, and rank 0 decides while it is there.
func (n *node) lost(c *control, why string) {
	judge := n.arbiter()
	if c.gone.Swap(true) {
		return
	}
	f := &failure{code: codeLost, culprit: c.peer, reporter: n.o.Rank, tag: comm.Tag{Bucket: -1}, text: why}
	switch {
	case judge != nil && judge != c:
		return // the arbiter sees it too
	case n.o.Rank <= 1:
		n.accuse(f)
	default: // the deputy decides in which operation
		f = n.withOperation(f)
		n.suspect.Store(f)
		n.report(f)
		n.spawn(func() { n.settle(f) })
	}
}

// court is where the arbiter decides which failure was the first cause.
type court struct {
	mu      sync.Mutex
	closed  bool     // decided, or the node is closing
	best    *failure // candidate, decided upon when timer ends
	timer   *time.Timer
	asked   *failure // a timeout whose culprit is being looked for
	since   time.Time
	answers map[int]uint64
}

// accuse brings a failure before the arbiter, which is this rank. A definite cause wins at once; a
// broken connection waits for a better explanation, a dead rank for the
// operation that it died in, a timeout for how far everybody is.
func (n *node) accuse(f *failure) {
	c := &n.court
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || n.failure.Load() != nil { // rank 0 may have decided, told us, and left
		return
	}
	switch {
	case f.code == codeTimeout && f.kind != comm.KindSend && f.kind != comm.KindRecv:
		n.ask(f)
	case f.weak:
		if c.best != nil && !c.best.weak { // the dead rank's operation
			n.decide(c.best.during(f))
		} else if c.best == nil {
			c.best = f
			c.arm(n, symptomGrace, func() { n.decide(c.best) })
		}
	case f.code == codeLost:
		f = n.withOperation(f)
		if f.kind == 0 && c.best != nil {
			f = f.during(c.best)
		}
		if f.kind != 0 {
			n.decide(f)
			return
		}
		c.best = f
		c.arm(n, symptomGrace, func() { n.decide(n.withOperation(c.best)) }) // it may wait for that rank by now
	default:
		n.decide(n.withOperation(f))
	}
}

// arm calls then after d, under the lock, unless the case is closed.
func (c *court) arm(n *node, d time.Duration, then func()) {
	if c.timer != nil {
		c.timer.Stop()
	}
	c.timer = time.AfterFunc(d, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if !c.closed {
			then()
		}
	})
}

// during is f with the operation of g.
func (f *failure) during(g *failure) *failure {
	h := *f
	h.kind, h.group, h.seq, h.tag = g.kind, g.group, g.seq, g.tag
	return &h
}

// decide tells everybody, then this rank: the other way round it might be gone
// before it has told. The caller holds the court's lock.
func (n *node) decide(f *failure) {
	n.court.closed = true
	if n.court.timer != nil {
		n.court.timer.Stop()
	}
	if c := n.peerOf(f.culprit); f.weak && c != nil && c.left.Load() {
		f = n.departed(f, f.culprit)
	}
	n.tellAll(&message{kind: msgVerdict, failure: f})
	n.adopt(n.own(f))
}

// peerOf is the control connection to a rank, nil if there is none.
func (n *node) peerOf(rank int) *control {
	if rank < 0 {
		return nil
	}
	return n.peers[rank]
}

// ask finds out who is late. The caller holds the court's lock.
func (n *node) ask(f *failure) {
	c := &n.court
	if c.asked != nil {
		return
	}
	c.asked, c.answers = f, map[int]uint64{n.o.Rank: n.startedIn(f.group)}
	n.tellAll(&message{kind: msgQuery, group: f.group})
	c.since = time.Now()
	c.arm(n, queryGrace, n.recess)
}

// recess concludes unless a rank that did not answer is alive: it is slow.
func (n *node) recess() {
	c := &n.court
	for r, p := range n.peers {
		if _, ok := c.answers[r]; p == nil || ok || p.gone.Load() || n.silent(p) {
			continue
		}
		if time.Since(c.since) < queryLimit {
			c.arm(n, queryGrace/3, n.recess)
			return
		}
	}
	n.conclude()
}

func (n *node) answer(peer int, m *message) {
	c := &n.court
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.asked == nil || m.group != c.asked.group {
		return
	}
	c.answers[peer] = m.started
	for _, p := range n.peers {
		if p == nil || p.gone.Load() {
			continue
		}
		if _, ok := c.answers[p.peer]; !ok {
			return
		}
	}
	n.conclude()
}

// conclude blames whoever did not answer or never began the operation.
func (n *node) conclude() {
	f := *n.court.asked
	f.cause = nil
	var silent, late []string
	for r := range n.o.Size {
		started, ok := n.court.answers[r]
		if !ok {
			silent = append(silent, strconv.Itoa(r))
		} else if started <= f.seq {
			late = append(late, strconv.Itoa(r))
		}
	}
	what := fmt.Sprintf("%v (seq %d)", f.kind, f.seq)
	switch {
	case len(silent) > 0:
		f.culprit, _ = strconv.Atoi(silent[0])
		f.text = fmt.Sprintf("rank %s does not answer; the others have waited %v for %s", strings.Join(silent, ", "), n.o.Timeout, what)
	case len(late) > 0:
		f.culprit, _ = strconv.Atoi(late[0])
		f.text = fmt.Sprintf("rank %s never launched %s; the others have waited %v", strings.Join(late, ", "), what, n.o.Timeout)
	default:
		f.text = fmt.Sprintf("all ranks are in %s, but nothing came from rank %d to rank %d for %v", what, f.culprit, f.reporter, n.o.Timeout)
	}
	n.decide(&f)
}
