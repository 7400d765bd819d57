package ring

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/tandem-go/tandem/internal/auth"
)

const (
	purpose            = "ring"
	handshakeTime      = 5 * time.Second // for a stranger to prove himself
	maxStrangers       = 64              // connections that have not proved themselves
	maxUnclaimed       = 4096            // proven connections that nobody asked for yet
	attachSize         = 24
	attachMagic        = 0x54415452 // "RTAT"
	attachOK      byte = 1
)

// The kinds of connection.
const (
	connControl = 1 // to rank 0, for the life of the node
	connData    = 2 // to the right neighbour in a group
	connDirect  = 3 // from one rank to another in a group, for Send
)

// connKey says what a connection is for. from is a world rank.
type connKey struct {
	kind  uint8
	group uint64
	from  int
}

func (k connKey) String() string {
	name := map[uint8]string{connControl: "control", connData: "data", connDirect: "direct"}[k.kind]
	return fmt.Sprintf("%s connection from rank %d", name, k.from)
}

// listener accepts connections, lets them prove themselves, and hands each to
// whoever waits for it.
type listener struct {
	socks []net.Listener
	self  auth.Hello
	sec   auth.Secret
	cong  string
	log   *slog.Logger
	wg    sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	strangers []net.Conn // oldest first
	arrived   map[connKey]net.Conn
	waiting   map[connKey]chan net.Conn
}

// listen opens a socket on every address. Port 0 of each.
func listen(ips []net.IP, o *Options, self auth.Hello) (*listener, error) {
	l := &listener{self: self, sec: o.Secret, cong: o.Congestion, log: o.Logger,
		arrived: map[connKey]net.Conn{}, waiting: map[connKey]chan net.Conn{}}
	for _, ip := range ips {
		addr := net.JoinHostPort(ip.String(), "0")
		s, err := net.Listen("tcp", addr)
		if err != nil {
			l.close()
			return nil, fmt.Errorf("ring: rank %d: listen on %s: %w", o.Rank, addr, err)
		}
		l.socks = append(l.socks, s)
		if t, ok := s.(*net.TCPListener); ok {
			if err := setCongestion(t, o.Congestion); err != nil {
				l.close()
				return nil, fmt.Errorf("ring: rank %d: %w", o.Rank, err)
			}
		}
	}
	for _, s := range l.socks {
		l.wg.Go(func() { l.accept(s) })
	}
	return l, nil
}

// addrs are what other ranks may dial.
func (l *listener) addrs() []string {
	var all []string
	for _, s := range l.socks {
		all = append(all, s.Addr().String())
	}
	return all
}

func (l *listener) accept(s net.Listener) {
	for {
		c, err := s.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors: those in use are worth more than a busy loop
			l.log.Warn("accept", "addr", s.Addr(), "err", err)
			time.Sleep(10 * time.Millisecond)
			continue
		}
		if l.admit(c) {
			l.wg.Go(func() { l.handshake(c) })
		}
	}
}

// admit counts c among the strangers. When there are too many the oldest goes:
// a rank proves itself in milliseconds, so the oldest is no rank.
func (l *listener) admit(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		_ = c.Close()
		return false
	}
	if len(l.strangers) >= maxStrangers {
		_ = l.strangers[0].Close()
		l.strangers = append(l.strangers[:0], l.strangers[1:]...)
	}
	l.strangers = append(l.strangers, c)
	return true
}

func (l *listener) handshake(c net.Conn) {
	key, err := l.prove(c)
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, s := range l.strangers {
		if s == c {
			l.strangers = append(l.strangers[:i], l.strangers[i+1:]...)
			break
		}
	}
	switch {
	case l.closed: // this rank has left: nothing to tell
	case err != nil:
		l.log.Warn("refused a connection", "peer", c.RemoteAddr(), "err", err)
	case l.waiting[key] != nil:
		l.waiting[key] <- c // has room for one
		delete(l.waiting, key)
		return
	case len(l.arrived) >= maxUnclaimed:
		l.log.Warn("refused a connection", "peer", c.RemoteAddr(), "rank", key.from,
			"err", fmt.Errorf("%d connections wait to be used", len(l.arrived)))
	default:
		if old := l.arrived[key]; old != nil { // its dialler gave up and came again
			_ = old.Close()
		}
		l.arrived[key] = c
		return
	}
	_ = c.Close()
}

// prove authenticates c and reads what it is for.
func (l *listener) prove(c net.Conn) (connKey, error) {
	deadline := time.Now().Add(handshakeTime)
	peer, err := auth.Server(c, l.sec, l.self, deadline)
	if err != nil {
		return connKey{}, err
	}
	tune(c, l.cong)
	_ = c.SetDeadline(deadline)
	var b [attachSize]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return connKey{}, err
	}
	key, to, err := parseAttach(b[:])
	switch {
	case err != nil:
		return key, err
	case key.from != peer.Rank:
		return key, fmt.Errorf("rank %d says it is rank %d", peer.Rank, key.from)
	case to != l.self.Rank:
		return key, fmt.Errorf("rank %d wants rank %d, this is rank %d", key.from, to, l.self.Rank)
	}
	if _, err := c.Write([]byte{attachOK}); err != nil {
		return key, err
	}
	return key, c.SetDeadline(time.Time{})
}

// Attach, little endian: magic 4, version 2, kind 1, zero 1, group 8, from 4, to 4.
func appendAttach(b []byte, k connKey, to int) []byte {
	le := binary.LittleEndian
	b = le.AppendUint32(b, attachMagic)
	b = le.AppendUint16(b, wireVersion)
	b = append(b, k.kind, 0)
	b = le.AppendUint64(b, k.group)
	b = le.AppendUint32(b, uint32(k.from))
	return le.AppendUint32(b, uint32(to))
}

func parseAttach(b []byte) (k connKey, to int, err error) {
	le := binary.LittleEndian
	switch {
	case len(b) != attachSize || le.Uint32(b) != attachMagic:
		return k, 0, errors.New("no attach message")
	case le.Uint16(b[4:]) != wireVersion:
		return k, 0, fmt.Errorf("peer speaks version %d, this rank %d", le.Uint16(b[4:]), wireVersion)
	}
	k = connKey{kind: b[6], group: le.Uint64(b[8:]), from: int(le.Uint32(b[16:]))}
	to = int(le.Uint32(b[20:]))
	if k.kind < connControl || k.kind > connDirect || b[7] != 0 || k.from >= maxWorld || to >= maxWorld {
		return k, to, fmt.Errorf("malformed attach message % x", b)
	}
	return k, to, nil
}

// take waits for the connection of a key until ctx ends or stop is closed.
func (l *listener) take(ctx context.Context, stop <-chan struct{}, k connKey) (net.Conn, error) {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil, net.ErrClosed
	}
	if c := l.arrived[k]; c != nil {
		delete(l.arrived, k)
		l.mu.Unlock()
		return c, nil
	}
	ch := make(chan net.Conn, 1)
	l.waiting[k] = ch
	l.mu.Unlock()
	var err error
	select {
	case c := <-ch:
		return c, nil
	case <-ctx.Done():
		err = fmt.Errorf("ring: rank %d waits for the %v: %w", l.self.Rank, k, context.Cause(ctx))
	case <-stop:
		err = net.ErrClosed
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.waiting, k)
	select {
	case c := <-ch: // it came at the last moment
		return c, nil
	default:
		return nil, err
	}
}

// close stops accepting and drops what nobody asked for.
func (l *listener) close() {
	l.mu.Lock()
	l.closed = true
	for _, s := range l.socks {
		_ = s.Close()
	}
	for _, c := range l.strangers {
		_ = c.Close()
	}
	for k, c := range l.arrived {
		_ = c.Close()
		delete(l.arrived, k)
	}
	l.mu.Unlock()
	l.wg.Wait()
}

// dial connects to rank to, which listens on addrs, for what k says. It tries
// every address, again and again until ctx ends.
func dial(ctx context.Context, addrs []string, o *Options, self auth.Hello, k connKey, to int) (net.Conn, error) {
	for wait := 5 * time.Millisecond; ; wait = min(2*wait, 500*time.Millisecond) {
		var errs []error
		final := 0
		for _, a := range addrs {
			c, err := dialOne(ctx, a, o, self, k, to)
			if err == nil {
				return c, nil
			}
			errs = append(errs, err)
			if errors.Is(err, auth.ErrDenied) || errors.Is(err, auth.ErrForeign) || errors.Is(err, auth.ErrNoSecret) {
				final++
			}
		}
		err := fmt.Errorf("ring: rank %d can't connect to rank %d: %w", self.Rank, to, errors.Join(errs...))
		if final == len(addrs) {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w (%w)", err, context.Cause(ctx))
		case <-time.After(wait):
		}
	}
}

func dialOne(ctx context.Context, addr string, o *Options, self auth.Hello, k connKey, to int) (net.Conn, error) {
	d := net.Dialer{Timeout: 3 * time.Second}
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err // names the address
	}
	deadline := time.Now().Add(handshakeTime)
	if t, ok := ctx.Deadline(); ok && t.Before(deadline) {
		deadline = t
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	peer, err := auth.Client(c, o.Secret, self, deadline)
	if err == nil && peer.Rank != to {
		err = fmt.Errorf("%s is rank %d, not rank %d", addr, peer.Rank, to)
	}
	if err == nil {
		err = attach(c, k, to, deadline)
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	tune(c, o.Congestion)
	return c, c.SetDeadline(time.Time{})
}

func attach(c net.Conn, k connKey, to int, deadline time.Time) error {
	_ = c.SetDeadline(deadline)
	var b [attachSize]byte
	if _, err := c.Write(appendAttach(b[:0], k, to)); err != nil {
		return err
	}
	if _, err := io.ReadFull(c, b[:1]); err != nil || b[0] != attachOK {
		return fmt.Errorf("%s refused the connection after it had authenticated: %w", c.RemoteAddr(), errors.Join(err, io.ErrUnexpectedEOF))
	}
	return nil
}
