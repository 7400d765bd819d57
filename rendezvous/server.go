package rendezvous

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/tandem-go/tandem/internal/auth"
)

const (
	authTimeout  = 5 * time.Second
	maxStrangers = 256 // connections that have not authenticated yet
	sessionTTL   = 10 * time.Minute
	purposeStore = "store"
)

// ServerOptions configure a store server. Secret, JobID and Generation must
// equal those of its clients.
type ServerOptions struct {
	// Secret of the job. Empty: only loopback connections are accepted.
	Secret auth.Secret
	// JobID and Generation tell jobs and restarts of a job apart.
	JobID      string
	Generation int
	// Logger gets refused and lost connections; nil discards.
	Logger *slog.Logger
}

// Server serves a store over TCP. The death of a client harms nobody: its
// waits are forgotten and its keys stay.
type Server struct {
	o    ServerOptions
	ln   net.Listener
	t    *table
	stop chan struct{}
	wg   sync.WaitGroup
	sem  chan struct{}

	mu       sync.Mutex
	sessions map[string]*session
	conns    map[net.Conn]bool // true once authenticated
	idle     chan struct{}     // closed and replaced whenever a connection ends
	closed   bool
}

// session is one client across its connections.
type session struct {
	mu      sync.Mutex
	ack     uint64
	answers map[uint64][]byte // responses to changes that the client may not have
	gone    time.Time         // when its last connection ended; zero while connected
	conns   int
}

// Listen opens addr ("host:port") for a Server. Its error names the address;
// errors.Is(err, syscall.EADDRINUSE) says that the port is taken.
func Listen(ctx context.Context, addr string) (net.Listener, error) {
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: store can't listen on %s: %w", addr, err)
	}
	return ln, nil
}

// Serve serves a new, empty store on ln, in the background, until Close. It
// owns ln from here on.
func Serve(ln net.Listener, o ServerOptions) *Server {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Server{
		o: o, ln: ln, t: newTable(), stop: make(chan struct{}), sem: make(chan struct{}, maxStrangers),
		sessions: map[string]*session{}, conns: map[net.Conn]bool{}, idle: make(chan struct{}),
	}
	s.wg.Add(1)
	go s.accept()
	return s
}

// Addr is where the server listens.
func (s *Server) Addr() net.Addr { return s.ln.Addr() }

// Store is a handle on the server's data inside this process, without a
// connection. Closing it does nothing.
func (s *Server) Store() Store { return Prefix(&Mem{s.t}, "") }

// Clients is the number of authenticated connections.
func (s *Server) Clients() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.clientsLocked()
}

func (s *Server) clientsLocked() (n int) {
	for _, known := range s.conns {
		if known {
			n++
		}
	}
	return n
}

// Drain waits until no client is connected, so that the host of the store can
// leave last. The error says how many still were when ctx ended.
func (s *Server) Drain(ctx context.Context) error {
	for {
		s.mu.Lock()
		n, idle := s.clientsLocked(), s.idle
		s.mu.Unlock()
		if n == 0 {
			return nil
		}
		select {
		case <-idle:
		case <-ctx.Done():
			return fmt.Errorf("rendezvous: %d clients still use the store at %s: %w", n, s.Addr(), context.Cause(ctx))
		}
	}
}

// Close stops the server and fails every operation in progress.
func (s *Server) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	close(s.stop)
	err := s.ln.Close()
	s.mu.Unlock()
	s.t.close() // answers the waits; outboxes are flushed before they end
	s.mu.Lock()
	for c := range s.conns {
		hangUp(c)
	}
	s.mu.Unlock()
	s.wg.Wait()
	return err
}

// hangUp ends a connection's reader and gives its writer a second to finish.
func hangUp(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.CloseRead()
		_ = t.SetWriteDeadline(time.Now().Add(time.Second))
		return
	}
	_ = c.Close()
}

func (s *Server) accept() {
	defer s.wg.Done()
	for {
		select {
		case s.sem <- struct{}{}:
		case <-s.stop:
			return
		}
		c, err := s.ln.Accept()
		if err != nil {
			<-s.sem
			if errors.Is(err, net.ErrClosed) {
				return
			}
			s.o.Logger.Warn("store can't accept", "addr", s.Addr().String(), "err", err)
			select { // out of descriptors, most likely: others may close some
			case <-time.After(100 * time.Millisecond):
			case <-s.stop:
				return
			}
			continue
		}
		s.wg.Add(1)
		go s.serve(c)
	}
}

// serve authenticates one connection and answers its requests until it ends.
func (s *Server) serve(c net.Conn) {
	defer s.wg.Done()
	defer c.Close()
	if !s.enter(c) {
		<-s.sem
		return
	}
	defer s.leave(c)
	keepAlive(c)
	self := auth.Hello{JobID: s.o.JobID, Generation: s.o.Generation, Purpose: purposeStore, Rank: -1}
	peer, err := auth.Server(c, s.o.Secret, self, time.Now().Add(authTimeout))
	<-s.sem
	if err != nil {
		if !s.stopped() {
			s.o.Logger.Warn("store refused a connection", "peer", c.RemoteAddr().String(), "err", err)
		}
		return
	}
	s.mu.Lock()
	s.conns[c] = true
	s.mu.Unlock()
	l := &serverLink{s: s, c: c, out: newOutbox(), waits: map[uint64]func(){}}
	done, written := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(written)
		if l.out.run(c, done) != nil {
			_ = c.Close() // ends the reader, too
		}
	}()
	err = l.read()
	for id := range l.waits {
		l.cancel(id)
	}
	close(done)
	<-written
	if err != nil && !s.stopped() {
		s.o.Logger.Debug("store lost a client", "rank", peer.Rank, "peer", c.RemoteAddr().String(), "err", err)
	}
}

func (s *Server) stopped() bool {
	select {
	case <-s.stop:
		return true
	default:
		return false
	}
}

func (s *Server) enter(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.conns[c] = false
	return true
}

func (s *Server) leave(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	close(s.idle)
	s.idle = make(chan struct{})
}

// session finds or makes the session of a connection, and drops those whose
// clients have been gone for long.
func (s *Server) session(id string) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k, x := range s.sessions {
		if x.conns == 0 && time.Since(x.gone) > sessionTTL {
			delete(s.sessions, k)
		}
	}
	x := s.sessions[id]
	if x == nil {
		x = &session{answers: map[uint64][]byte{}}
		s.sessions[id] = x
	}
	x.conns++
	return x
}

func (s *Server) endSession(id string, x *session, bye bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x.conns--
	x.gone = time.Now()
	if bye {
		delete(s.sessions, id)
	}
}

// serverLink is one connection.
type serverLink struct {
	s   *Server
	c   net.Conn
	out *outbox

	waits map[uint64]func() // cancels, by request; the reader's own

	mu    sync.Mutex
	ended []uint64 // waits that were answered, by whoever set their last key
}

// read handles requests until the client leaves (nil) or the connection fails.
func (l *serverLink) read() (err error) {
	r := bufio.NewReader(l.c)
	first, err := readFrame(l.c, r, headRequest)
	if err != nil {
		return err
	}
	if opcode(first[0]) != opSession || len(first) != headRequest+16 {
		return fmt.Errorf("%w: expected a session", errFrame)
	}
	id := string(first[headRequest:])
	x := l.s.session(id)
	bye := false
	defer func() { l.s.endSession(id, x, bye) }()
	for {
		b, err := readFrame(l.c, r, headRequest)
		if err != nil {
			return err
		}
		op, id, ack := opcode(b[0]), binary.BigEndian.Uint64(b[1:]), binary.BigEndian.Uint64(b[9:])
		p := &parser{b: b[headRequest:]}
		switch {
		case op == opBye:
			bye = true
			return nil
		case op == opCancel:
			l.cancel(id)
		case op == opWait:
			err = l.wait(id, p)
		case op.changes():
			err = l.change(x, op, id, ack, p)
		case op == opGet:
			key := string(p.text())
			if err = p.end(); err == nil {
				v, e := l.s.t.get(key)
				err = l.answer(id, v, e)
			}
		default:
			err = fmt.Errorf("%w: operation %d", errFrame, op)
		}
		if err != nil {
			return err
		}
	}
}

func (l *serverLink) answer(id uint64, body []byte, err error) error {
	return l.send(respond(id, body, err))
}

func (l *serverLink) send(frame []byte) error {
	if !l.out.push(frame) {
		return errors.New("rendezvous: the client does not read its answers")
	}
	return nil
}

func respond(id uint64, body []byte, err error) []byte {
	switch {
	case err == nil:
		return response(statusOK, id, body)
	case errors.Is(err, ErrNotFound):
		return response(statusNotFound, id, nil)
	case errors.Is(err, ErrClosed):
		return response(statusClosed, id, nil)
	case errors.Is(err, ErrNotInteger):
		return response(statusNotInteger, id, nil)
	}
	return response(statusError, id, []byte(err.Error()))
}

// change makes a change once, however often the client sends it.
func (l *serverLink) change(x *session, op opcode, id, ack uint64, p *parser) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if ack > x.ack {
		x.ack = ack
		for k := range x.answers {
			if k < ack {
				delete(x.answers, k)
			}
		}
	}
	if id < x.ack {
		return nil // a late copy of a change that was answered long ago
	}
	if a, ok := x.answers[id]; ok {
		return l.send(a)
	}
	a, err := l.s.apply(op, id, p)
	if err != nil {
		return err
	}
	x.answers[id] = a
	return l.send(a)
}

// apply makes a change and returns its response, or an error for a frame that
// makes no sense.
func (s *Server) apply(op opcode, id uint64, p *parser) ([]byte, error) {
	key := string(p.text())
	if err := checkKey(key); err != nil {
		return nil, errFrame
	}
	switch op {
	case opSet:
		v := p.text()
		if err := p.end(); err != nil {
			return nil, err
		}
		return respond(id, nil, s.t.set(key, v)), nil
	case opAdd:
		d := int64(p.u64())
		if err := p.end(); err != nil {
			return nil, err
		}
		n, err := s.t.add(key, d)
		return respond(id, binary.BigEndian.AppendUint64(nil, uint64(n)), err), nil
	case opCAS:
		old, v := optional(p), p.text()
		if err := p.end(); err != nil {
			return nil, err
		}
		got, err := s.t.compareAndSet(key, old, v)
		return respond(id, putOptional(nil, got), err), nil
	}
	if err := p.end(); err != nil {
		return nil, err
	}
	return respond(id, nil, s.t.delete(key)), nil
}

// optional reads a flag and a text: nil when the flag is 0.
func optional(p *parser) []byte {
	present, v := p.u8(), p.text()
	if present == 0 {
		return nil
	}
	return v
}

func putOptional(b, v []byte) []byte {
	if v == nil {
		b = append(b, 0)
	} else {
		b = append(b, 1)
	}
	return putText(b, v)
}

// wait registers a wait whose answer is sent by whoever sets the last key.
func (l *serverLink) wait(id uint64, p *parser) error {
	n := int(p.u32())
	if n > MaxWait {
		return fmt.Errorf("%w: wait for %d keys", errFrame, n)
	}
	keys := make([]string, 0, min(n, len(p.b)/4+1))
	for range n {
		if keys = append(keys, string(p.text())); p.bad {
			return errFrame
		}
	}
	if err := p.end(); err != nil {
		return err
	}
	cancel := l.s.t.wait(keys, func(err error) {
		if !l.out.push(respond(id, nil, err)) {
			_ = l.c.Close()
		}
		l.mu.Lock()
		l.ended = append(l.ended, id)
		l.mu.Unlock()
	})
	if cancel != nil {
		l.waits[id] = cancel
	}
	l.mu.Lock()
	for _, id := range l.ended {
		delete(l.waits, id)
	}
	l.ended = l.ended[:0]
	l.mu.Unlock()
	return nil
}

// cancel forgets a wait; it is a no-op for one that has ended.
func (l *serverLink) cancel(id uint64) {
	if c := l.waits[id]; c != nil {
		delete(l.waits, id)
		c()
	}
}

// keepAlive notices a host that vanished within about 20 seconds.
func keepAlive(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 3 * time.Second, Count: 3})
	}
}
