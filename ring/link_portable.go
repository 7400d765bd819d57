package ring

import (
	"net"
	"sync"
)

// goLink is the link for every system. It writes on a goroutine of its own, so
// that a rank sends and receives at the same time.
type goLink struct {
	in, out     net.Conn
	left, right int         // ranks, for errors
	fail        func(error) // called when a write fails that nobody waits for

	inline  bool // the operation's goroutine writes
	buffers net.Buffers
	vec     [2][]byte

	mu      sync.Mutex
	work    sync.Cond // the goroutine may have something to do
	moved   sync.Cond // outgoing or err changed
	o       outgoing
	idle    bool
	stopped bool
	err     error
}

func newGoLink(in, out net.Conn, left, right int, spawn func(func()), fail func(error)) link {
	l := &goLink{in: in, out: out, left: left, right: right, fail: fail}
	l.work.L, l.moved.L = &l.mu, &l.mu
	spawn(l.run)
	return l
}

func (l *goLink) frame() []byte        { return l.o.head[:] }
func (l *goLink) queue(segment []byte) { l.o.segs = append(l.o.segs, segment) }

func (l *goLink) start(limit int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return l.err
	}
	l.o.begin(limit)
	l.inline = l.o.total <= inlineBytes // waking the goroutine would take longer
	return l.kick()
}

func (l *goLink) allow(n int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.o.limit += n
	return l.kick()
}

// kick gets what may go on its way. The caller holds mu.
func (l *goLink) kick() error {
	if !l.inline {
		if l.idle {
			l.work.Signal()
		}
		return l.err
	}
	for l.err == nil && l.o.pending() {
		l.send()
	}
	return l.err
}

func (l *goLink) read(p []byte) (int, error) {
	n, err := l.in.Read(p)
	if n > 0 || err == nil {
		return n, nil
	}
	return 0, &peerError{l.left, err}
}

func (l *goLink) waitSent(n int) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.err == nil && (l.o.sent < n || l.o.headLeft > 0) {
		l.moved.Wait()
	}
	return l.o.sent, l.err
}

func (l *goLink) finish() error {
	_, err := l.waitSent(l.o.total)
	l.o.end()
	return err
}

// run is the goroutine.
func (l *goLink) run() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for !l.stopped {
		if l.inline || l.err != nil || !l.o.pending() {
			l.idle = true
			l.work.Wait()
			l.idle = false
			continue
		}
		l.send()
		l.moved.Signal()
		if l.err != nil && !l.stopped {
			l.mu.Unlock()
			l.fail(l.err)
			l.mu.Lock()
		}
	}
	if l.err == nil {
		l.err = net.ErrClosed
	}
	l.moved.Broadcast()
}

// send writes the next piece. The goroutine gives the lock away meanwhile; an
// inline operation keeps it, since nobody else wants it.
func (l *goLink) send() {
	head, piece := l.o.next()
	if !l.inline {
		l.mu.Unlock()
	}
	var err error
	if len(head) > 0 {
		l.vec = [2][]byte{head, piece}
		l.buffers = l.vec[:]
		_, err = l.buffers.WriteTo(l.out)
		l.vec = [2][]byte{}
	} else {
		_, err = l.out.Write(piece)
	}
	if !l.inline {
		l.mu.Lock()
	}
	l.o.took(len(head) + len(piece))
	if err != nil {
		l.err = &peerError{l.right, err}
	}
}

func (l *goLink) close() {
	_ = l.in.Close()
	_ = l.out.Close()
	l.mu.Lock()
	l.stopped = true
	l.work.Signal()
	l.moved.Broadcast()
	l.mu.Unlock()
}
