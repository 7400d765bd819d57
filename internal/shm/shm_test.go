//go:build linux && (amd64 || arm64)

package shm

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/tandem-go/tandem/internal/auth"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func here(t *testing.T) {
	t.Helper()
	if _, err := Here(t.Context()); err != nil {
		t.Skip(err)
	}
}

func hello(rank int) auth.Hello { return auth.Hello{JobID: "job", Purpose: "shm", Rank: rank} }

// serve offers segments by number; what is not there comes never.
func serve(t *testing.T, secret auth.Secret, segs map[uint64]*Segment) *Server {
	t.Helper()
	s, err := Serve(hello(1), secret, func(ctx context.Context, id uint64) (*Segment, error) {
		if s := segs[id]; s != nil {
			return s, nil
		}
		<-ctx.Done()
		return nil, ctx.Err()
	}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// Without this a peer could see other bytes than were written, or a segment
// lose its content, leak its file or come back dirty when it is closed.
func TestSegment(t *testing.T) {
	here(t)
	rapid.Check(t, func(r *rapid.T) {
		n := rapid.OneOf(rapid.IntRange(1, 20_000), rapid.IntRange(hugeSize-1, hugeSize+1)).Draw(r, "bytes")
		s, err := Create(n)
		if err != nil {
			r.Fatal(err)
		}
		b := s.Bytes()
		if len(b) < n || len(bytes.Trim(b, "\x00")) != 0 || uintptr(unsafe.Pointer(unsafe.SliceData(b)))%pageSize != 0 {
			r.Fatalf("%d bytes of %d, not zero or not aligned", len(b), n)
		}
		fd, err := passToSelf(s.fd)
		if err != nil {
			r.Fatal(err)
		}
		m, err := mapFile(fd)
		_ = unix.Close(fd)
		if err != nil {
			r.Fatal(err)
		}
		for _, i := range []int{0, n / 2, n - 1, len(b) - 1} {
			b[i] = byte(i) | 1
			if m.Bytes()[i] != byte(i)|1 {
				r.Fatalf("byte %d of %d differs", i, n)
			}
		}
		before := bytes.Clone(b)
		if err := errors.Join(s.Close(), s.Close()); err != nil {
			r.Fatal(err)
		}
		if !bytes.Equal(b, before) || !bytes.Equal(m.Bytes(), before) {
			r.Fatal("closing changed the content")
		}
		if b[0]++; m.Bytes()[0] == b[0] {
			r.Fatal("a closed segment is still shared")
		}
		if err := m.Close(); err != nil {
			r.Fatal(err)
		}
	})
	if maps, err := os.ReadFile("/proc/self/maps"); err != nil || strings.Contains(string(maps), "memfd:tandem") {
		t.Errorf("a segment is still mapped (%v)", err)
	}
}

// Without this the collector could hand out the memory of a segment, open or
// closed, to somebody else.
func TestCollected(t *testing.T) {
	here(t)
	var bufs [][]byte
	var open []*Segment
	for i := range 20 {
		s, err := Create(300_000)
		if err != nil {
			t.Fatal(err)
		}
		b := s.Bytes()
		for j := range b {
			b[j] = byte(i)
		}
		bufs = append(bufs, b)
		if i%2 == 0 {
			open = append(open, s)
		} else if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for range 5 {
		runtime.GC()
		for range 50 {
			if g := make([]byte, 300_000); len(bytes.Trim(g, "\x00")) != 0 {
				t.Fatal("new memory is not zero")
			}
		}
	}
	for i, b := range bufs {
		if len(bytes.Trim(b, string([]byte{byte(i)}))) != 0 {
			t.Errorf("segment %d changed", i)
		}
	}
	for _, s := range open {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Without this a process without the secret, of another job, or one that only
// pretends to be the rank that was asked for could read or plant gradients.
func TestOpen(t *testing.T) {
	here(t)
	s, err := Create(5000)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	srv := serve(t, "right", map[uint64]*Segment{7: s})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	m, err := Open(ctx, srv.Addr(), hello(0), "right", 1, 7)
	if err != nil {
		t.Fatal(err)
	}
	s.Bytes()[4999] = 9
	if m.Bytes()[4999] != 9 {
		t.Error("not the segment that was asked for")
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	other := hello(0)
	other.JobID = "another"
	for name, open := range map[string]func() (*Mapping, error){
		"secret": func() (*Mapping, error) { return Open(ctx, srv.Addr(), hello(0), "wrong", 1, 7) },
		"job":    func() (*Mapping, error) { return Open(ctx, srv.Addr(), other, "right", 1, 7) },
		"rank":   func() (*Mapping, error) { return Open(ctx, srv.Addr(), hello(0), "right", 2, 7) },
	} {
		if _, err := open(); err == nil {
			t.Errorf("%s: let in", name)
		}
	}
	short, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	if _, err := Open(short, srv.Addr(), hello(0), "right", 1, 8); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a segment that never comes: %v", err)
	}
}

// Without this a stranger who connects and says nothing could keep Close from
// ending.
func TestStrangers(t *testing.T) {
	here(t)
	srv := serve(t, "right", nil)
	for range 10 {
		c, err := net.Dial("unix", srv.Addr())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	if err := srv.Close(); err != nil {
		t.Error(err)
	}
}

// Without this a peer could pass a file that it shortens later, and kill the
// ranks that read it.
func TestUnsealed(t *testing.T) {
	here(t)
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, pageSize); err != nil {
		t.Fatal(err)
	}
	if m, err := mapFile(fd); err == nil {
		_ = m.Close()
		t.Error("a file without seals was mapped")
	}
	s, err := Create(pageSize)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := unix.Ftruncate(s.fd, 0); err == nil {
		t.Error("a segment can be shortened")
	}
}

// Without this a wake could be lost, or a waiter sleep for longer than it said.
func TestWait(t *testing.T) {
	here(t)
	var w, turns atomic.Uint32
	done := make(chan struct{})
	go func() {
		defer close(done)
		for v := uint32(0); v < 1000; v++ {
			for w.Load() == v {
				Wait(&w, v, time.Minute)
			}
			turns.Add(1)
		}
	}()
	for v := uint32(1); v <= 1000; v++ {
		w.Store(v)
		Wake(&w)
		for turns.Load() < v {
			Yield()
		}
	}
	<-done
	Wait(&w, w.Load(), time.Millisecond) // returns by itself
	Wait(&w, w.Load()+1, time.Minute)    // holds another value already
}

// Without this the size of a segment could overflow, or be nothing.
func TestSizes(t *testing.T) {
	for _, n := range []int{0, -1, int(MaxSegment) + 1} {
		if s, err := Create(n); err == nil {
			_ = s.Close()
			t.Errorf("%d bytes: no error", n)
		}
	}
}
