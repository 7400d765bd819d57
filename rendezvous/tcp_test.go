package rendezvous

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tandem-go/tandem/internal/auth"
	"pgregory.net/rapid"
)

// Without it a wait would outlive its store.
func TestCloseEndsWaits(t *testing.T) {
	ctx := testContext(t)
	m := NewMem()
	s := startServer(t, ServerOptions{Secret: "s"})
	c, d := dial(t, s.Addr().String(), 0), dial(t, s.Addr().String(), 1)
	done := make(chan error, 3)
	go func() { done <- m.Wait(ctx, "x") }()
	go func() { done <- c.Wait(ctx, "x") }()
	go func() { done <- d.Wait(ctx, "x") }()
	require.Eventually(t, func() bool { return m.t.waiting() == 1 && s.t.waiting() == 1 }, 10*time.Second, time.Millisecond)
	_ = m.Close()
	_ = c.Close()
	_ = s.Close()
	for range 3 {
		require.ErrorIs(t, <-done, ErrClosed)
	}
	require.ErrorIs(t, c.Set(ctx, "k", nil), ErrClosed)
	require.ErrorIs(t, m.Set(ctx, "k", nil), ErrClosed)
}

// Without it waits of dead or impatient clients would pile up in the server.
func TestServerForgetsWaits(t *testing.T) {
	s := startServer(t, ServerOptions{Secret: "s"})
	c, d := dial(t, s.Addr().String(), 0), dial(t, s.Addr().String(), 1)
	short, cancel := context.WithTimeout(testContext(t), 10*time.Millisecond)
	defer cancel()
	require.Error(t, c.Wait(short, "a", "b"))
	require.NoError(t, c.Set(testContext(t), "k", nil)) // after the cancel, in order
	require.Zero(t, s.t.waiting())

	go func() { _ = d.Wait(context.Background(), "x") }()
	require.Eventually(t, func() bool { return s.t.waiting() == 1 }, 10*time.Second, time.Millisecond)
	_ = d.Close()
	require.Eventually(t, func() bool { return s.t.waiting() == 0 }, 10*time.Second, time.Millisecond)
	require.NoError(t, c.Set(testContext(t), "x", nil))
}

// flaky is a proxy that can cut all its connections, before or after a
// request reached the server.
type flaky struct {
	ln   net.Listener
	to   string
	mu   sync.Mutex
	open []net.Conn
	mute bool // swallow what the server says
	wg   sync.WaitGroup
}

func newFlaky(t *testing.T, to string) *flaky {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	f := &flaky{ln: ln, to: to}
	f.wg.Go(f.run)
	t.Cleanup(func() { _ = ln.Close(); f.cut(); f.wg.Wait() })
	return f
}

func (f *flaky) run() {
	for {
		a, err := f.ln.Accept()
		if err != nil {
			return
		}
		b, err := net.Dial("tcp", f.to)
		if err != nil {
			_ = a.Close()
			continue
		}
		f.mu.Lock()
		f.open = append(f.open, a, b)
		f.mu.Unlock()
		f.wg.Go(func() { _, _ = io.Copy(b, a); _ = b.Close() })
		f.wg.Go(func() { _, _ = io.Copy(gate{f, a}, b); _ = a.Close() })
	}
}

type gate struct {
	f *flaky
	w io.Writer
}

func (g gate) Write(p []byte) (int, error) {
	g.f.mu.Lock()
	mute := g.f.mute
	g.f.mu.Unlock()
	if mute {
		return len(p), nil
	}
	return g.w.Write(p)
}

func (f *flaky) cut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.open {
		_ = c.Close()
	}
	f.open, f.mute = nil, false
}

func (f *flaky) setMute() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mute = true
}

// Without it a broken connection would lose a wait, or count a change twice.
func TestReconnect(t *testing.T) {
	s := startServer(t, ServerOptions{Secret: "s"})
	f := newFlaky(t, s.Addr().String())
	c := dial(t, f.ln.Addr().String(), 0)
	ctx := testContext(t)
	done := make(chan error, 1)
	go func() { done <- c.Wait(ctx, "x") }()
	require.Eventually(t, func() bool { return s.t.waiting() == 1 }, 10*time.Second, time.Millisecond)

	for i := range 5 {
		f.setMute() // the server will count, its answer will not arrive
		sum := make(chan int64, 1)
		go func() {
			n, err := c.Add(ctx, "n", 1)
			if err != nil {
				t.Error(err)
			}
			sum <- n
		}()
		require.Eventually(t, func() bool {
			v, err := s.Store().Get(ctx, "n")
			return err == nil && string(v) == fmt.Sprint(i+1)
		}, 10*time.Second, time.Millisecond)
		f.cut()
		require.EqualValues(t, i+1, <-sum)
	}
	require.NoError(t, s.Store().Set(ctx, "x", nil))
	require.NoError(t, <-done)
}

// Without it the copy of a change that was still on its way in a broken
// connection would be made again.
func TestLateCopyIsIgnored(t *testing.T) {
	add := func(id, ack uint64) []byte {
		return finish(binary.BigEndian.AppendUint64(putText(request(opAdd, id, ack), "n"), 1))
	}
	b := finish(append(request(opSession, 0, 0), make([]byte, 16)...))
	b = append(b, bytes.Join([][]byte{add(1, 1), add(1, 1), add(2, 2), add(1, 1), finish(request(opBye, 0, 0))}, nil)...)
	s := &Server{t: newTable(), stop: make(chan struct{}), sessions: map[string]*session{}}
	l := &serverLink{s: s, c: fakeConn{nil, bytes.NewReader(b)}, out: newOutbox(), waits: map[uint64]func(){}}
	require.NoError(t, l.read())
	n, err := s.t.add("n", 0)
	require.NoError(t, err)
	require.EqualValues(t, 2, n)
	require.Empty(t, s.sessions, "a client that says goodbye is forgotten")
}

// Without it a rank would hang when the host of the store dies.
func TestServerGone(t *testing.T) {
	s := startServer(t, ServerOptions{Secret: "s"})
	addr := s.Addr().String()
	c, err := Dial(testContext(t), ClientOptions{Addr: addr, Secret: "s", Reconnect: 50 * time.Millisecond})
	require.NoError(t, err)
	defer c.Close()
	_ = s.Close()
	require.Eventually(t, func() bool { return errors.Is(c.Set(context.Background(), "k", nil), ErrLost) }, 10*time.Second, time.Millisecond)
	err = c.Wait(context.Background(), "k")
	require.ErrorContains(t, err, addr)
}

// Without it strangers, other jobs and ranks of an earlier try could write here.
func TestStrangers(t *testing.T) {
	s := startServer(t, ServerOptions{Secret: "s", JobID: "job", Generation: 2})
	for name, tc := range map[string]struct {
		o    ClientOptions
		want error
	}{
		"secret":     {ClientOptions{Secret: "t", JobID: "job", Generation: 2}, auth.ErrDenied},
		"job":        {ClientOptions{Secret: "s", JobID: "jab", Generation: 2}, auth.ErrForeign},
		"generation": {ClientOptions{Secret: "s", JobID: "job", Generation: 1}, auth.ErrForeign},
	} {
		t.Run(name, func(t *testing.T) {
			tc.o.Addr = s.Addr().String()
			_, err := Dial(testContext(t), tc.o)
			require.ErrorIs(t, err, tc.want)
			require.ErrorContains(t, err, tc.o.Addr)
		})
	}
	c, err := net.Dial("tcp", s.Addr().String())
	require.NoError(t, err)
	defer c.Close()
	_, _ = c.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	_, err = io.ReadAll(c)
	require.NotErrorIs(t, err, context.DeadlineExceeded, "a stranger must be cut off")
}

// Without it nobody would know which address is taken, or that ctx ended.
func TestAddresses(t *testing.T) {
	s := startServer(t, ServerOptions{Secret: "s"})
	_, err := Listen(context.Background(), s.Addr().String())
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	require.ErrorContains(t, err, s.Addr().String())

	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := ln.Addr().String()
	_ = ln.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	_, err = Dial(ctx, ClientOptions{Addr: addr, Secret: "s"})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	require.ErrorContains(t, err, addr)
}

// Without it a rank that starts before the host of the store would fail.
func TestDialWaitsForServer(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := ln.Addr().String()
	_ = ln.Close()
	got := make(chan error, 1)
	go func() {
		c, err := Dial(testContext(t), ClientOptions{Addr: addr, Secret: "s"})
		if err == nil {
			_ = c.Close()
		}
		got <- err
	}()
	time.Sleep(30 * time.Millisecond)
	ln, err = Listen(context.Background(), addr)
	require.NoError(t, err)
	s := Serve(ln, ServerOptions{Secret: "s"})
	defer s.Close()
	require.NoError(t, <-got)
	require.NoError(t, s.Drain(testContext(t)))
}

// Without it the host of the store could leave while others still ask.
func TestDrain(t *testing.T) {
	s := startServer(t, ServerOptions{Secret: "s"})
	c := dial(t, s.Addr().String(), 3)
	short, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	require.ErrorContains(t, s.Drain(short), "1 clients")
	go func() { _ = c.Close() }()
	require.NoError(t, s.Drain(testContext(t)))
}

// Without it a table that drifts from a plain map would go unnoticed.
func TestTableIsAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tab, model := newTable(), map[string]string{}
		for range rapid.IntRange(1, 60).Draw(t, "n") {
			k := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "key")
			v := rapid.SampledFrom([]string{"", "1", "x"}).Draw(t, "value")
			switch rapid.IntRange(0, 3).Draw(t, "op") {
			case 0:
				require.NoError(t, tab.set(k, []byte(v)))
				model[k] = v
			case 1:
				require.NoError(t, tab.delete(k))
				delete(model, k)
			case 2:
				old, ok := model[k]
				var want []byte
				if ok {
					want = []byte(old)
				}
				guess := want
				if rapid.Bool().Draw(t, "wrong") {
					guess = []byte("wrong")
				}
				_, err := tab.compareAndSet(k, guess, []byte(v))
				require.NoError(t, err)
				if string(guess) != "wrong" {
					model[k] = v
				}
			}
			have, ok := model[k]
			got, err := tab.get(k)
			require.Equal(t, ok, err == nil)
			require.Equal(t, have, string(got))
		}
	})
}

// fakeConn feeds a fuzzer's bytes to a reader.
type fakeConn struct {
	net.Conn
	io.Reader
}

func (c fakeConn) Read(p []byte) (int, error)     { return c.Reader.Read(p) }
func (fakeConn) SetReadDeadline(time.Time) error  { return nil }
func (fakeConn) SetWriteDeadline(time.Time) error { return nil }
func (fakeConn) Close() error                     { return nil }

// Without it a broken peer could crash the server or make it allocate.
func FuzzServer(f *testing.F) {
	sess := finish(append(request(opSession, 0, 0), make([]byte, 16)...))
	join := func(fs ...[]byte) []byte { return bytes.Join(append([][]byte{sess}, fs...), nil) }
	f.Add(join(finish(putText(putText(request(opSet, 1, 1), "k"), "v")), finish(putText(request(opGet, 2, 1), "k"))))
	f.Add(join(finish(putText(binary32(request(opWait, 1, 1), 1), "k")), finish(request(opCancel, 1, 1))))
	f.Add(join(finish(putText(putOptional(putText(request(opCAS, 1, 1), "k"), nil), "v")), finish(request(opBye, 0, 0))))
	f.Add(join([]byte{0xff, 0xff, 0xff, 0xff}))
	f.Fuzz(func(t *testing.T, b []byte) {
		s := &Server{t: newTable(), stop: make(chan struct{}), sessions: map[string]*session{}}
		l := &serverLink{s: s, c: fakeConn{nil, bytes.NewReader(b)}, out: newOutbox(), waits: map[uint64]func(){}}
		_ = l.read()
		for id := range l.waits {
			l.cancel(id)
		}
		if s.t.waiting() != 0 {
			t.Fatal("a wait outlives its connection")
		}
	})
}

func binary32(b []byte, n uint32) []byte {
	return append(b, byte(n>>24), byte(n>>16), byte(n>>8), byte(n))
}

// BenchmarkRoundTrip is one Set over loopback.
func BenchmarkRoundTrip(b *testing.B) {
	s := startServer(b, ServerOptions{Secret: "s"})
	c := dial(b, s.Addr().String(), 0)
	v := make([]byte, 64)
	for b.Loop() {
		if err := c.Set(context.Background(), "k", v); err != nil {
			b.Fatal(err)
		}
	}
}
