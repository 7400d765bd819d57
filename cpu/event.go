package cpu

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tandem-go/tandem/device"
)

// mark is a place in a stream: the end of its seq-th item. A record is a mark
// and a wait is for one, so several records of one event on several streams,
// completing in any order, can't be mistaken for one another.
type mark struct {
	s   *stream
	seq uint64
}

// reached reports whether the stream is past the mark.
func (m mark) reached() bool { return m.s.done.Load() >= m.seq }

// failure is what the stream had failed with when it passed the mark.
func (m mark) failure() error {
	if f := m.s.fail.Load(); f != nil && f.seq < m.seq {
		return f.err
	}
	return nil
}

// event implements device.Event.
type event struct {
	mu   sync.Mutex
	at   mark          // the latest record; at.s is nil when there is none
	when time.Duration // completion of that record since epoch, 0 while it is pending
}

var _ device.Event = (*event)(nil)

// epoch is an origin for monotonic times, which fit into a word then.
var epoch = time.Now()

func (e *event) Reset() {
	e.mu.Lock()
	e.at, e.when = mark{}, 0
	e.mu.Unlock()
}

// record makes m the latest record.
func (e *event) record(m mark) {
	e.mu.Lock()
	e.at, e.when = m, 0
	e.mu.Unlock()
}

// complete notes the time if m is still the latest record.
func (e *event) complete(m mark) {
	e.mu.Lock()
	if e.at == m {
		e.when = max(1, time.Since(epoch))
	}
	e.mu.Unlock()
}

// latest is the latest record, or ErrNotRecorded.
func (e *event) latest() (mark, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.at.s == nil {
		return mark{}, device.ErrNotRecorded
	}
	return e.at, nil
}

func (e *event) Sync(ctx context.Context) error {
	m, err := e.latest()
	if err != nil {
		return err
	}
	if err := m.s.await(ctx, m.seq); err != nil {
		return err
	}
	return m.failure()
}

func (e *event) Since(earlier device.Event) (time.Duration, error) {
	f, ok := earlier.(*event)
	if !ok {
		return 0, foreignEvent(earlier)
	}
	b, err := e.completed()
	if err != nil {
		return 0, err
	}
	a, err := f.completed()
	if err != nil {
		return 0, err
	}
	return b - a, nil
}

var errPending = errors.New("cpu: event has not completed yet: Sync it first")

func (e *event) completed() (time.Duration, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.at.s == nil:
		return 0, device.ErrNotRecorded
	case e.when == 0:
		return 0, errPending
	}
	return e.when, nil
}

func foreignEvent(e device.Event) error {
	return fmt.Errorf("cpu: event of type %T belongs to another kind of device", e)
}
