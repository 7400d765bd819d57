package cpu

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"github.com/tandem-go/tandem/device"
)

// stream implements device.Stream with one goroutine.
//
// Items are numbered from 1 in the order in which they were enqueued. done is
// the number of the last one that has run or was skipped; everything that
// waits, waits for done to reach a number.
type stream struct {
	dev  *Device
	id   int
	prio device.Priority

	mu     sync.Mutex // guards q, the order of pushes, stopped
	q      ring
	closed bool

	pushed atomic.Uint64 // number of the last item in the queue
	done   atomic.Uint64
	fail   atomic.Pointer[failure] // the first failure; written by the loop only

	parked atomic.Bool   // the loop sleeps, or is about to, until wake
	wake   chan struct{} // one token: there is work
	ready  chan struct{} // one token for the loop: the mark or the pool it waits for is there
	ended  bool          // the loop has run itemStop
	coming bool          // counted as a stream with kernels coming, see fifo

	waiters waitList // others that wait for done
}

// failure is the first error of a stream and the item that had it.
type failure struct {
	seq uint64
	err error
}

var _ device.Stream = (*stream)(nil)

func newStream(d *Device, id int, p device.Priority) *stream {
	return &stream{
		dev: d, id: id, prio: p,
		wake:  make(chan struct{}, 1),
		ready: make(chan struct{}, 1),
	}
}

// failed is the stream's first failure so far.
func (s *stream) failed() error {
	if f := s.fail.Load(); f != nil {
		return f.err
	}
	return nil
}

func (s *stream) Launch(k device.Kernel, args []device.Buffer) error {
	if err := s.failed(); err != nil {
		return err
	}
	kn, ok := k.(*kernel)
	if !ok || kn.dev != s.dev {
		return fmt.Errorf("cpu: launch of a kernel (%T) that was not compiled by this device", k)
	}
	if err := kn.check(args); err != nil {
		return err
	}
	return s.push(item{kind: itemLaunch, k: kn, args: args})
}

func (s *stream) HostFunc(f func() error) error {
	if err := s.failed(); err != nil {
		return err
	}
	return s.push(item{kind: itemHost, host: f})
}

func (s *stream) Copy(dst, src device.Buffer) error {
	if err := s.failed(); err != nil {
		return err
	}
	d, ok1 := dst.HostBytes()
	b, ok2 := src.HostBytes()
	switch {
	case !ok1 || !ok2:
		return fmt.Errorf("cpu: copy: buffers of type %T and %T are not both in host memory", dst, src)
	case len(d) != len(b):
		return fmt.Errorf("cpu: copy of %d bytes to a buffer of %d bytes", len(b), len(d))
	}
	return s.push(item{kind: itemCopy, dst: d, src: b})
}

// Record enqueues its mark on a failed stream too, so that whoever waits for
// the event hears of the failure.
func (s *stream) Record(e device.Event) error {
	ev, ok := e.(*event)
	if !ok {
		return foreignEvent(e)
	}
	if err := s.push(item{kind: itemRecord, ev: ev}); err != nil {
		return err
	}
	return s.failed()
}

func (s *stream) Wait(e device.Event) error {
	if err := s.failed(); err != nil {
		return err
	}
	ev, ok := e.(*event)
	if !ok {
		return foreignEvent(e)
	}
	m, err := ev.latest()
	if err != nil {
		return err
	}
	if m.reached() && m.failure() == nil {
		return nil
	}
	return s.push(item{kind: itemWait, on: m})
}

func (s *stream) Sync(ctx context.Context) error {
	if err := s.await(ctx, s.pushed.Load()); err != nil {
		return err
	}
	return s.failed()
}

// stop ends the stream once what is enqueued has run.
func (s *stream) stop() {
	_ = s.push(item{kind: itemStop}) // the only error is that it is stopped already
}

// push appends one item and wakes the loop.
func (s *stream) push(it item) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return ErrClosed
	}
	seq := s.pushed.Load() + 1
	s.q.push(it)
	switch it.kind {
	case itemRecord:
		it.ev.record(mark{s, seq})
	case itemStop:
		s.closed = true
	}
	s.pushed.Store(seq)
	s.mu.Unlock()
	// The loop sets parked and then looks at pushed; this stores pushed and
	// then looks at parked: one of the two sees the other.
	if s.parked.Load() && s.parked.CompareAndSwap(true, false) {
		s.wake <- struct{}{}
	}
	return nil
}

// loop runs the queue until itemStop.
func (s *stream) loop() {
	defer func() {
		if s.ended {
			s.dev.running.Done()
			return
		}
		// A host function called runtime.Goexit, as a test's FailNow does. The
		// goroutine is lost but the queue must not be.
		seq := s.done.Load() + 1
		s.setFailure(seq, fmt.Errorf("cpu: stream %d: a host function ended its goroutine", s.id))
		s.complete(seq)
		go s.loop()
	}()
	for !s.ended {
		seq := s.done.Load() + 1
		it := s.next(seq)
		if s.fail.Load() == nil {
			if err := s.exec(&it); err != nil {
				s.setFailure(seq, err)
			}
		}
		if it.kind == itemRecord {
			it.ev.complete(mark{s, seq})
		}
		if it.kind == itemStop {
			s.ended = true
			s.expect(false)
		}
		s.complete(seq)
	}
}

// expect tells the pool whether the stream goes on to kernels, or to something
// that may have to wait for a stream of low priority.
func (s *stream) expect(kernels bool) {
	if s.coming == kernels || s.prio == device.Low {
		return
	}
	s.coming = kernels
	if kernels {
		s.dev.pool.lock.come(1)
	} else {
		s.dev.pool.lock.come(-1)
	}
}

// next blocks until item seq is in the queue and takes it.
func (s *stream) next(seq uint64) item {
	if s.pushed.Load() < seq {
		s.expect(false)
	}
	for !spinUntil(&s.pushed, seq) {
		s.parked.Store(true)
		if s.pushed.Load() >= seq && s.parked.CompareAndSwap(true, false) {
			break
		}
		<-s.wake
	}
	s.mu.Lock()
	it := s.q.pop()
	s.mu.Unlock()
	return it
}

// exec runs one item and turns a panic into an error.
func (s *stream) exec(it *item) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = s.panicked(it, v)
		}
	}()
	switch it.kind {
	case itemLaunch:
		s.expect(true)
		s.dev.pool.acquire(s)
		defer s.dev.pool.release()
		return it.k.run(it.args)
	case itemHost:
		s.expect(false)
		return it.host()
	case itemCopy:
		copyBytes(it.dst, it.src)
	case itemWait:
		m := it.on
		if !m.reached() {
			s.expect(false)
		}
		m.s.awaitOn(m.seq, s.ready)
		if err := m.failure(); err != nil {
			return fmt.Errorf("cpu: stream %d waited for an event of failed stream %d: %w", s.id, m.s.id, err)
		}
	}
	return nil
}

func (s *stream) panicked(it *item, v any) error {
	what := "a host function"
	if it.kind == itemLaunch {
		what = "kernel " + it.k.Name()
	}
	stack := debug.Stack()
	if p, ok := v.(partPanic); ok {
		v, stack = p.value, p.stack
	}
	err := fmt.Errorf("cpu: stream %d: %s panicked: %v", s.id, what, v)
	s.dev.opts.Logger.Error("panic on a stream", "stream", s.id, "what", what, "panic", v, "stack", string(stack))
	return err
}

func (s *stream) setFailure(seq uint64, err error) {
	if s.fail.Load() == nil {
		s.fail.Store(&failure{seq, err})
	}
}

// complete publishes that item seq has run and wakes who waits for it.
func (s *stream) complete(seq uint64) {
	s.done.Store(seq)
	s.waiters.notify(seq)
}
