// Package device is all that the floors above know of hardware: memory,
// streams of work, events between streams, and kernels compiled from
// descriptions of operations.
//
// The model is CUDA's. Work enqueued on one stream runs in order; two streams
// run side by side and are ordered only by events. Nothing here blocks the
// caller but Stream.Sync and Event.Sync. The cpu package implements the same
// model with goroutines, so the protocol that runs on GPUs is the one that
// every CPU test exercises.
package device

import (
	"context"
	"errors"
	"time"
)

// ErrNotRecorded is returned by Stream.Wait and Event.Sync for an event that
// was not recorded since it was created or last Reset. On CUDA such a wait is
// silently a no-op, which is a race; here it is an error everywhere.
var ErrNotRecorded = errors.New("device: event was not recorded in this step")

// ErrUnsupported is returned (wrapped, with the operation's name) by
// Device.Compile for an operation that the device has no kernel for.
var ErrUnsupported = errors.New("device: operation not supported")

// Priority orders streams that compete for the same hardware.
type Priority int

// Stream priorities. Communication runs at High so that a ready bucket does
// not queue behind kernels of the backward pass.
const (
	Low Priority = iota
	Normal
	High
)

// Device is one accelerator, or the host's cores seen as one.
// All methods may be called from several goroutines.
type Device interface {
	// Name is for logs, e.g. "cpu (2 threads, avx2)".
	Name() string
	// Alloc returns zeroed memory, aligned to at least 64 bytes, whose pages
	// are already touched. It lives until the device is closed.
	Alloc(bytes int) (Buffer, error)
	NewStream(Priority) (Stream, error)
	NewEvent() (Event, error)
	// Compile returns a kernel for op, or an error that wraps ErrUnsupported.
	Compile(op Op) (Kernel, error)
	// Close waits for enqueued work to end and releases everything.
	Close() error
}

// Buffer is a piece of device memory.
type Buffer interface {
	// Len is the size in bytes.
	Len() int
	// Slice is the part [off, off+n) in bytes; it shares memory. It panics
	// when the range lies outside, like a slice expression.
	Slice(off, n int) Buffer
	// HostBytes is the memory itself where the host can address it, as on a
	// CPU; otherwise false.
	HostBytes() ([]byte, bool)
}

// Kernel is a compiled Op. It may own scratch memory, so one kernel must not
// run on two streams at the same time.
type Kernel interface {
	Name() string
	// Op is the description it was compiled from.
	Op() Op
}

// Stream is a queue of work. Its methods enqueue and return; args and buffers
// are retained until the work has run and must not be changed before.
//
// The first failure (a kernel's error, a HostFunc's error, a wait for an event
// of a failed stream) makes the stream failed: what follows is skipped, events
// recorded later carry the failure on, and every method returns it.
type Stream interface {
	// Launch enqueues k. The arguments are, in this order, op.In, op.State, op.Out.
	Launch(k Kernel, args []Buffer) error
	// HostFunc enqueues a call on the host. Only CPU streams have it; a CUDA
	// stream returns ErrUnsupported. f may block (a collective does); it must
	// then have its own way to be told to stop.
	HostFunc(f func() error) error
	// Copy enqueues a copy of src to dst, which have the same length.
	Copy(dst, src Buffer) error
	// Record enqueues a mark that completes e when all earlier work has run.
	Record(e Event) error
	// Wait makes later work wait for the latest Record of e, or returns
	// ErrNotRecorded when there is none since e was created or Reset.
	Wait(e Event) error
	// Sync blocks until everything enqueued so far has run or was skipped and
	// returns the stream's first failure. When ctx ends first it returns the
	// context's cause; the work goes on.
	Sync(ctx context.Context) error
}

// Event is a point in a stream that others can wait for. One event may be
// recorded again and again; a wait refers to the latest record at its call.
type Event interface {
	// Reset forgets earlier records. It does not disturb waits already enqueued.
	Reset()
	// Sync blocks until the latest record has completed, and returns the
	// failure of the stream it was recorded on, if there was one.
	Sync(ctx context.Context) error
	// Since is the time between the completions of earlier and of this event.
	// Both must have completed.
	Since(earlier Event) (time.Duration, error)
}
