// Package cpu is the host's cores as a device.Device: memory, streams, events
// and kernels for float32.
//
// A stream is a goroutine that runs queued work in order. Kernels of all
// streams of a device exclude one another and run on its pool of compute
// threads, of which the stream's own goroutine is the first; host functions
// and copies run beside them. So a device with one thread keeps one core busy
// with kernels, however many streams it has.
//
// Every kernel gives the same bits for any number of threads: pieces are cut by
// shape, or so that sums keep their order. Updates, norms and sums of squares
// give the same bits on every instruction set, too.
//
// Kernels are assembly, which Go can't preempt. Set GOMAXPROCS to at least
// GOMAXPROCS(threads) before training, or collectives wait for kernels; New
// doesn't change it, since it belongs to the whole process.
package cpu

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/internal/simd"
)

// ErrClosed is returned by everything that a closed device is asked to do.
var ErrClosed = errors.New("cpu: device is closed")

// maxThreads bounds Options.Threads. It is far above any machine's cores and
// keeps a mistyped number from starting a million goroutines.
const maxThreads = 4096

// Options configure a device. The zero value and nil mean the defaults.
type Options struct {
	// Threads is the number of compute threads; 0 means AllowedCores().
	Threads int
	// ISA names the instruction set of the kernels, such as "avx2" or
	// "portable"; "" means the best that this machine has.
	ISA string
	// Logger receives panics of kernels and host functions with their stack;
	// nil discards.
	Logger *slog.Logger
}

// validate fills in the defaults and names what is out of bounds.
func (o *Options) validate() (simd.ISA, error) {
	if o.Threads < 0 || o.Threads > maxThreads {
		return 0, fmt.Errorf("cpu: Threads is %d, want 0 (all allowed cores) to %d", o.Threads, maxThreads)
	}
	if o.Threads == 0 {
		o.Threads = AllowedCores()
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.ISA == "" {
		return simd.Best(), nil
	}
	for _, isa := range simd.Supported() {
		if isa.String() == o.ISA {
			return isa, nil
		}
	}
	return 0, fmt.Errorf("cpu: ISA is %q, this machine supports %v", o.ISA, simd.Supported())
}

// AllowedCores is the number of cores that this process may use: those of its
// affinity mask, or fewer when GOMAXPROCS, which follows a container's CPU
// quota, says so.
func AllowedCores() int { return min(runtime.NumCPU(), runtime.GOMAXPROCS(0)) }

// GOMAXPROCS is the least runtime.GOMAXPROCS for a process whose devices have
// this many compute threads together: one P more for streams that communicate
// and one for the rest of the program, none of which then waits for assembly.
func GOMAXPROCS(threads int) int { return threads + 2 }

// Device implements device.Device on the host's cores.
type Device struct {
	opts Options
	isa  simd.ISA
	simd *simd.Kernels
	pool *pool

	mu      sync.Mutex
	streams []*stream
	closed  bool
	done    chan struct{} // closed when Close has finished
	running sync.WaitGroup
}

var _ device.Device = (*Device)(nil)

// New starts a device. Close it to end its goroutines. nil options mean the
// defaults.
func New(o *Options) (*Device, error) {
	var opts Options
	if o != nil {
		opts = *o
	}
	isa, err := opts.validate()
	if err != nil {
		return nil, err
	}
	k, err := simd.For(isa)
	if err != nil {
		return nil, fmt.Errorf("cpu: %w", err)
	}
	return &Device{opts: opts, isa: isa, simd: k, pool: newPool(opts.Threads, k), done: make(chan struct{})}, nil
}

// Name is for logs: "cpu (2 threads, avx2)".
func (d *Device) Name() string {
	s := "s"
	if d.opts.Threads == 1 {
		s = ""
	}
	return fmt.Sprintf("cpu (%d thread%s, %v)", d.opts.Threads, s, d.isa)
}

// Threads is the number of compute threads.
func (d *Device) Threads() int { return d.opts.Threads }

// Alloc returns zeroed memory, aligned to 64 bytes, whose pages are touched.
// It stays valid for as long as anything refers to it, even after Close.
func (d *Device) Alloc(bytes int) (device.Buffer, error) {
	if bytes < 0 {
		return nil, fmt.Errorf("cpu: alloc of %d bytes", bytes)
	}
	d.mu.Lock()
	closed := d.closed
	d.mu.Unlock()
	if closed {
		return nil, ErrClosed
	}
	return &buffer{b: allocate(bytes)}, nil
}

// NewStream starts a stream. Where kernels of several streams wait for the
// compute threads, those of a higher priority go first. Those of Low run only
// while every other stream is idle or waits for an event or a host function.
func (d *Device) NewStream(p device.Priority) (device.Stream, error) {
	if p < device.Low || p > device.High {
		return nil, fmt.Errorf("cpu: stream priority %d, want Low, Normal or High", p)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, ErrClosed
	}
	s := newStream(d, len(d.streams), p)
	d.streams = append(d.streams, s)
	d.running.Add(1)
	go s.loop()
	return s, nil
}

// NewEvent returns an event that is not recorded yet. It works with the
// streams of every device of this package.
func (d *Device) NewEvent() (device.Event, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, ErrClosed
	}
	return new(event), nil
}

// Close waits until everything enqueued has run and ends the device's
// goroutines. It must not be called from a host function. Buffers stay valid.
func (d *Device) Close() error {
	d.mu.Lock()
	first := !d.closed
	d.closed = true
	d.mu.Unlock()
	if !first {
		<-d.done
		return nil
	}
	for _, s := range d.streams {
		s.stop()
	}
	d.running.Wait()
	d.pool.close()
	close(d.done)
	return nil
}
