package rendezvous

import (
	"context"
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
	seen     int               // sessions so far
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
func (s *Server) Drain(ctx context.Context) error { return s.drain(ctx, 0) }

// drain also waits until at least this many clients have come at all.
func (s *Server) drain(ctx context.Context, least int) error {
	for {
		s.mu.Lock()
		n, seen, idle := s.clientsLocked(), s.seen, s.idle
		s.mu.Unlock()
		if n == 0 && seen >= least {
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
		s.seen++
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

// keepAlive notices a host that vanished within about 20 seconds.
func keepAlive(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 3 * time.Second, Count: 3})
	}
}
