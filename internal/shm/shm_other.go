//go:build !linux || !(amd64 || arm64)

package shm

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/tandem-go/tandem/internal/auth"
)

// Segment is memory that other processes may map; on this system there is none.
type Segment struct{}

// Create returns ErrUnsupported.
func Create(int) (*Segment, error) { return nil, ErrUnsupported }

// Bytes is no memory.
func (*Segment) Bytes() []byte { return nil }

// Close does nothing.
func (*Segment) Close() error { return nil }

// Mapping is another process's segment; on this system there is none.
type Mapping struct{}

// Bytes is no memory.
func (*Mapping) Bytes() []byte { return nil }

// Close does nothing.
func (*Mapping) Close() error { return nil }

// Find returns the segment of an id.
type Find func(ctx context.Context, id uint64) (*Segment, error)

// Server hands segments to peers; on this system there is none.
type Server struct{}

// Serve returns ErrUnsupported.
func Serve(auth.Hello, auth.Secret, Find, *slog.Logger) (*Server, error) { return nil, ErrUnsupported }

// Addr is no address.
func (*Server) Addr() string { return "" }

// Close does nothing.
func (*Server) Close() error { return nil }

// Open returns ErrUnsupported.
func Open(context.Context, string, auth.Hello, auth.Secret, int, uint64) (*Mapping, error) {
	return nil, ErrUnsupported
}

// Here returns ErrUnsupported.
func Here(context.Context) (Place, error) { return Place{}, ErrUnsupported }

// Word is the word at byte off of b, which only Linux shares.
func Word([]byte, int) *atomic.Uint32 { return new(atomic.Uint32) }

// Wait returns at once: nobody shares the word.
func Wait(*atomic.Uint32, uint32, time.Duration) {}

// Wake does nothing: nobody waits.
func Wake(*atomic.Uint32) {}

// Yield does nothing.
func Yield() {}
