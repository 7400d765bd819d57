package ddp

import (
	"context"
	"fmt"
	"time"
)

// watchdog bounds steps in time without a context, a timer or a goroutine for
// each: it is the one context that everything waits with. Its goroutine looks
// at the caller's context and at the clock while a step runs, and when either
// ends it aborts the group, which ends whatever a step could be blocked in.
//
// It fires at most once; a DDP is not used after an error.
type watchdog struct {
	steps chan watched
	ends  chan struct{}
	quit  chan struct{}
	gone  chan struct{} // closed when the goroutine has ended
	fired chan struct{} // closed when a step is to end
	cause error         // set before fired is closed
	abort func(error)
}

// watched is a step: its context, and its time where that has no deadline.
type watched struct {
	ctx     context.Context
	timeout time.Duration
}

var _ context.Context = (*watchdog)(nil)

func newWatchdog(abort func(error)) *watchdog {
	w := &watchdog{
		steps: make(chan watched), ends: make(chan struct{}), quit: make(chan struct{}),
		gone: make(chan struct{}), fired: make(chan struct{}), abort: abort,
	}
	go w.run()
	return w
}

func (w *watchdog) start(ctx context.Context, timeout time.Duration) {
	if _, has := ctx.Deadline(); has {
		timeout = 0
	}
	select {
	case w.steps <- watched{ctx, timeout}:
	case <-w.gone:
	}
}

// stop ends what start began. A context that ends later is no longer looked at.
func (w *watchdog) stop() {
	select {
	case w.ends <- struct{}{}:
	case <-w.gone:
	}
}

func (w *watchdog) close() {
	close(w.quit)
	<-w.gone
}

func (w *watchdog) run() {
	defer close(w.gone)
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	for {
		select {
		case <-w.quit:
			return
		case s := <-w.steps:
			w.watch(s, timer)
		}
	}
}

func (w *watchdog) watch(s watched, timer *time.Timer) {
	if s.timeout > 0 {
		timer.Reset(s.timeout)
		defer timer.Stop()
	}
	select {
	case <-w.ends:
		return
	case <-s.ctx.Done():
		w.fire(context.Cause(s.ctx))
	case <-timer.C:
		w.fire(fmt.Errorf("ddp: not done after %v: %w", s.timeout, context.DeadlineExceeded))
	}
	<-w.ends
}

func (w *watchdog) fire(cause error) {
	select {
	case <-w.fired:
		return
	default:
	}
	w.cause = cause
	close(w.fired)
	w.abort(cause)
}

// Deadline, Done, Err and Value make it a context.Context.
func (w *watchdog) Deadline() (time.Time, bool) { return time.Time{}, false }

func (w *watchdog) Done() <-chan struct{} { return w.fired }

func (w *watchdog) Err() error {
	select {
	case <-w.fired:
		return w.cause
	default:
		return nil
	}
}

func (w *watchdog) Value(any) any { return nil }
