package ring

import (
	"net"
	"sync"
)

const (
	// inlineBytes is how much an operation writes on its own goroutine: it fits
	// the socket's buffer, and waking the sender would take longer.
	inlineBytes = 16 << 10
	// pieceBytes bounds one write of the sender, so that others hear of its
	// progress.
	pieceBytes = 1 << 20
)

// sender writes to the right neighbour on a goroutine of its own, so that a
// rank sends and receives at the same time. What it sends in an operation is a
// list of segments; how far it may go is raised while data come in.
type sender struct {
	conn net.Conn
	peer int
	fail func(error) // called once, by the goroutine, when a write fails

	head    [headerSize]byte
	segs    [][]byte // filled in by the operation before start
	vec     [2][]byte
	buffers net.Buffers
	inline  bool // the operation's goroutine writes

	mu       sync.Mutex
	work     sync.Cond // the goroutine may have something to do
	moved    sync.Cond // sent, idle or err changed
	headSent bool
	at, off  int // next byte: segs[at][off]
	sent     int // bytes of segments
	limit    int
	total    int
	idle     bool
	stopped  bool
	err      error
}

func newSender(c net.Conn, peer int, fail func(error)) *sender {
	s := &sender{conn: c, peer: peer, fail: fail, idle: true, headSent: true}
	s.work.L, s.moved.L = &s.mu, &s.mu
	return s
}

// start begins an operation: the header is in head, what to send in segs, and
// the first limit bytes of that may go.
func (s *sender) start(limit int) error {
	total := 0
	for _, b := range s.segs {
		total += len(b)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return s.err
	}
	s.headSent, s.at, s.off, s.sent, s.limit, s.total = false, 0, 0, 0, limit, total
	s.inline = total <= inlineBytes
	if s.inline {
		return s.writeInline()
	}
	s.work.Signal()
	return nil
}

// allow lets n more bytes go.
func (s *sender) allow(n int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit += n
	if s.inline {
		return s.writeInline()
	}
	if s.idle {
		s.work.Signal()
	}
	return s.err
}

// waitSent waits until n bytes of the operation were handed to the kernel, and
// returns how many were.
func (s *sender) waitSent(n int) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.err == nil && (s.sent < n || !s.headSent) {
		s.moved.Wait()
	}
	return s.sent, s.err
}

// finish waits until everything was sent; the buffers are the caller's again.
func (s *sender) finish() error {
	_, err := s.waitSent(s.total)
	clear(s.segs)
	s.segs = s.segs[:0]
	return err
}

// ready is whether there is something to write. The caller holds mu.
func (s *sender) ready() bool {
	return s.err == nil && (!s.headSent || s.sent < min(s.limit, s.total))
}

func (s *sender) writeInline() error {
	for s.ready() {
		if err := s.write(); err != nil {
			s.err = &peerError{s.peer, err}
		}
	}
	return s.err
}

// run is the goroutine.
func (s *sender) run() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		for !s.stopped && (s.inline || !s.ready()) {
			s.idle = true
			s.work.Wait()
			s.idle = false
		}
		if s.stopped {
			if s.err == nil {
				s.err = net.ErrClosed
			}
			s.moved.Broadcast()
			return
		}
		if err := s.write(); err != nil {
			s.err = &peerError{s.peer, err}
			s.moved.Broadcast()
			if !s.stopped {
				s.mu.Unlock()
				s.fail(s.err)
				s.mu.Lock()
			}
			continue
		}
		s.moved.Signal()
	}
}

// write sends the next piece. The goroutine's lock is released meanwhile; an
// inline operation keeps it, since nobody else wants it.
func (s *sender) write() error {
	for s.at < len(s.segs) && s.off == len(s.segs[s.at]) {
		s.at, s.off = s.at+1, 0
	}
	var p []byte
	if s.at < len(s.segs) {
		p = s.segs[s.at][s.off:]
		p = p[:min(len(p), s.limit-s.sent, pieceBytes)]
	}
	head := !s.headSent
	if !s.inline {
		s.mu.Unlock()
	}
	var err error
	if head {
		s.vec = [2][]byte{s.head[:], p}
		s.buffers = s.vec[:]
		_, err = s.buffers.WriteTo(s.conn)
		s.vec = [2][]byte{}
	} else {
		_, err = s.conn.Write(p)
	}
	if !s.inline {
		s.mu.Lock()
	}
	s.headSent = true
	s.off += len(p)
	s.sent += len(p)
	return err
}

// stop ends the goroutine; the connection must be closed first.
func (s *sender) stop() {
	s.mu.Lock()
	s.stopped = true
	s.work.Signal()
	s.moved.Broadcast()
	s.mu.Unlock()
}
