package rendezvous

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/tandem-go/tandem/internal/auth"
)

// ClientOptions configure a store client.
type ClientOptions struct {
	// Addr is the server, "host:port". The name is used verbatim; every
	// address it resolves to is tried.
	Addr string
	// Rank of this process, for the server's log; -1 for a process that is none.
	Rank int
	// Secret, JobID and Generation must equal the server's.
	Secret     auth.Secret
	JobID      string
	Generation int
	// Reconnect is how long a lost connection may take to come back before all
	// operations fail. 0 means 5 s.
	Reconnect time.Duration
	// Logger gets waiting for the server, and lost connections; nil discards.
	Logger *slog.Logger
}

// ErrLost is in the chain of every error after a client has given up on its
// server.
var ErrLost = errors.New("rendezvous: connection to the store lost")

const (
	dialTimeout = 10 * time.Second
	firstPause  = 20 * time.Millisecond
	longestWait = 500 * time.Millisecond
)

// Client is a Store at the other end of a TCP connection. When the connection
// breaks it connects again and repeats what was not answered; a change is made
// exactly once. When the server stays away, every operation fails with ErrLost.
type Client struct {
	o       ClientOptions
	session [16]byte
	cancel  context.CancelCauseFunc // ends the goroutine that owns the connection
	ended   chan struct{}

	mu    sync.Mutex
	err   error // why nothing works any more
	next  uint64
	low   uint64 // every change with a smaller id was answered
	calls map[uint64]*call
	out   *outbox // of the connection; nil between two
}

// call is an operation that was not answered yet.
type call struct {
	op    opcode
	frame []byte
	done  chan reply // buffered, one reply
}

type reply struct {
	status status
	body   []byte
	err    error
}

// Dial connects to the store, trying again until ctx ends while nobody
// listens yet. A server that listens but belongs to another job, or does not
// know the secret, is an error at once.
func Dial(ctx context.Context, o ClientOptions) (*Client, error) {
	if o.Reconnect == 0 {
		o.Reconnect = 5 * time.Second
	}
	if o.Reconnect < 0 {
		return nil, fmt.Errorf("rendezvous: reconnect %v, want at least 0", o.Reconnect)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	c := &Client{o: o, next: 1, low: 1, calls: map[uint64]*call{}, ended: make(chan struct{})}
	_, _ = rand.Read(c.session[:])
	conn, err := c.connect(ctx)
	if err != nil {
		return nil, err
	}
	run, cancel := context.WithCancelCause(context.Background())
	c.cancel = cancel
	out := c.attach(conn)
	go c.own(run, conn, out)
	return c, nil
}

// connect dials and authenticates until it works, ctx ends, or trying again
// can't help.
func (c *Client) connect(ctx context.Context) (net.Conn, error) {
	pause, told, start := firstPause, false, time.Now()
	for {
		conn, err := c.dialOnce(ctx)
		if err == nil {
			return conn, nil
		}
		if errors.Is(err, auth.ErrDenied) || errors.Is(err, auth.ErrForeign) || errors.Is(err, auth.ErrNoSecret) {
			return nil, fmt.Errorf("rendezvous: store at %s: %w", c.o.Addr, err)
		}
		if !told && time.Since(start) > 3*time.Second {
			told = true
			c.o.Logger.Info("waiting for the store", "rank", c.o.Rank, "addr", c.o.Addr, "err", err)
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, longestWait)
		case <-ctx.Done():
			return nil, fmt.Errorf("rendezvous: store at %s not reached in %v: %w (last: %w)",
				c.o.Addr, time.Since(start).Round(time.Millisecond), context.Cause(ctx), err)
		}
	}
}

func (c *Client) dialOnce(ctx context.Context) (net.Conn, error) {
	d := net.Dialer{Timeout: dialTimeout}
	conn, err := d.DialContext(ctx, "tcp", c.o.Addr)
	if err != nil {
		return nil, err
	}
	keepAlive(conn)
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	self := auth.Hello{JobID: c.o.JobID, Generation: c.o.Generation, Purpose: purposeStore, Rank: c.o.Rank}
	_, err = auth.Client(conn, c.o.Secret, self, time.Now().Add(authTimeout))
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

// attach makes conn the connection of new calls and queues the unanswered ones
// again, oldest first.
func (c *Client) attach(conn net.Conn) *outbox {
	out := newOutbox()
	out.push(finish(append(request(opSession, 0, 0), c.session[:]...)))
	c.mu.Lock()
	defer c.mu.Unlock()
	ids := make([]uint64, 0, len(c.calls))
	for id := range c.calls {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	for _, id := range ids {
		out.push(c.calls[id].frame)
	}
	c.out = out
	return out
}

// own reads the answers and replaces the connection when it breaks.
func (c *Client) own(ctx context.Context, conn net.Conn, out *outbox) {
	defer close(c.ended)
	for {
		lost := c.pump(ctx, conn, out)
		if ctx.Err() != nil {
			return
		}
		c.o.Logger.Debug("store connection lost", "rank", c.o.Rank, "addr", c.o.Addr, "err", lost)
		again, cancel := context.WithTimeout(ctx, c.o.Reconnect)
		next, err := c.connect(again)
		cancel()
		if err != nil {
			c.fail(fmt.Errorf("%w: %v; %w", ErrLost, lost, err))
			return
		}
		conn, out = next, c.attach(next)
	}
}

// pump serves one connection until it fails or ctx ends.
func (c *Client) pump(ctx context.Context, conn net.Conn, out *outbox) error {
	done, written := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(written)
		if out.run(conn, done) != nil {
			_ = conn.Close()
		}
	}()
	bye := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(bye)
		_ = conn.SetWriteDeadline(time.Now().Add(time.Second))
		close(done) // flushes the farewell
		<-written
		_ = conn.Close()
	})
	err := c.read(conn)
	c.mu.Lock()
	c.out = nil
	c.mu.Unlock()
	if stop() {
		_ = conn.Close()
		close(done)
		<-written
	} else {
		<-bye
	}
	return err
}

func (c *Client) read(conn net.Conn) error {
	r := bufio.NewReader(conn)
	for {
		b, err := readFrame(conn, r, headResponse)
		if err != nil {
			return err
		}
		c.finish(binary.BigEndian.Uint64(b[1:]), reply{status: status(b[0]), body: b[headResponse:]})
	}
}

// finish hands a reply to the call with this id, if it still waits.
func (c *Client) finish(id uint64, r reply) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if k := c.calls[id]; k != nil {
		c.dropLocked(id)
		k.done <- r
	}
}

// dropLocked forgets a call and moves the mark of answered changes on.
func (c *Client) dropLocked(id uint64) {
	delete(c.calls, id)
	for c.low < c.next {
		if k := c.calls[c.low]; k != nil && k.op.changes() {
			return
		}
		c.low++
	}
}

// fail ends all calls, now and later, with err.
func (c *Client) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.err = err
	}
	for id, k := range c.calls {
		delete(c.calls, id)
		k.done <- reply{err: c.err}
	}
}

// do sends one operation and waits for its answer.
func (c *Client) do(ctx context.Context, op opcode, body func([]byte) []byte) ([]byte, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	k := &call{op: op, done: make(chan reply, 1)}
	c.mu.Lock()
	if c.err != nil {
		defer c.mu.Unlock()
		return nil, c.err
	}
	id := c.next
	k.frame = finish(body(request(op, id, c.low)))
	if len(k.frame) > maxFrame {
		c.mu.Unlock()
		return nil, fmt.Errorf("rendezvous: %v of %d bytes, at most %d fit", op, len(k.frame), maxFrame)
	}
	if c.out != nil && !c.out.push(k.frame) {
		c.mu.Unlock()
		return nil, fmt.Errorf("rendezvous: the store does not read; %d operations are queued", len(c.calls))
	}
	c.next++
	c.calls[id] = k
	c.mu.Unlock()
	select {
	case r := <-k.done:
		return r.result()
	case <-ctx.Done():
		c.mu.Lock()
		defer c.mu.Unlock()
		c.dropLocked(id)
		if op == opWait && c.out != nil {
			c.out.push(finish(request(opCancel, id, c.low)))
		}
		return nil, context.Cause(ctx)
	}
}

func (r reply) result() ([]byte, error) {
	if r.err != nil {
		return nil, r.err
	}
	switch r.status {
	case statusOK:
		return r.body, nil
	case statusNotFound:
		return nil, ErrNotFound
	case statusClosed:
		return nil, ErrClosed
	case statusNotInteger:
		return nil, ErrNotInteger
	}
	return nil, errors.New(string(r.body))
}

// Close implements Store. It says goodbye to the server and ends the
// connection.
func (c *Client) Close() error {
	c.fail(ErrClosed)
	c.mu.Lock()
	if c.out != nil {
		c.out.push(finish(request(opBye, 0, 0)))
	}
	c.mu.Unlock()
	c.cancel(ErrClosed)
	<-c.ended
	return nil
}
