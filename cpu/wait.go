package cpu

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
)

// Before it parks, a goroutine looks spinRounds times, with spinLoads loads
// each, and yields its P in between: about two microseconds when nobody else
// wants to run. A parked goroutine costs several to wake, but spinning longer
// takes a core from those who compute on it.
const (
	spinRounds = 8
	spinLoads  = 100
)

// spinUntil reports whether v reached seq within a short while.
func spinUntil(v *atomic.Uint64, seq uint64) bool {
	for range spinRounds {
		for range spinLoads {
			if v.Load() >= seq {
				return true
			}
		}
		runtime.Gosched()
	}
	return v.Load() >= seq
}

// waitList holds who waits for a stream to reach some number.
type waitList struct {
	n    atomic.Int32 // len(list), to be looked at without the lock
	mu   sync.Mutex
	list []waiter
	free []chan struct{} // channels for goroutines that have none of their own
}

// waiter gets one token on ch when the stream has done seq.
type waiter struct {
	seq uint64
	ch  chan struct{}
}

// notify wakes everybody who waits for seq or less.
func (l *waitList) notify(seq uint64) {
	if l.n.Load() == 0 {
		return
	}
	l.mu.Lock()
	kept := l.list[:0]
	for _, w := range l.list {
		if w.seq <= seq {
			w.ch <- struct{}{}
		} else {
			kept = append(kept, w)
		}
	}
	clear(l.list[len(kept):])
	l.list = kept
	l.n.Store(int32(len(kept)))
	l.mu.Unlock()
}

// add appends a waiter unless done is there already. notify reads n after done
// was stored; this stores n before done is read: one of the two sees the other.
func (l *waitList) add(done *atomic.Uint64, seq uint64, ch chan struct{}) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.n.Store(int32(len(l.list) + 1))
	if done.Load() >= seq {
		l.n.Store(int32(len(l.list)))
		return false
	}
	l.list = append(l.list, waiter{seq, ch})
	return true
}

// remove takes a waiter out again and reports whether it was still there; if
// not, its token has been sent.
func (l *waitList) remove(ch chan struct{}) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, w := range l.list {
		if w.ch == ch {
			last := len(l.list) - 1
			l.list[i] = l.list[last]
			l.list[last] = waiter{}
			l.list = l.list[:last]
			l.n.Store(int32(last))
			return true
		}
	}
	return false
}

// channel borrows a channel; giveBack returns it, empty.
func (l *waitList) channel() chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := len(l.free); n > 0 {
		ch := l.free[n-1]
		l.free = l.free[:n-1]
		return ch
	}
	return make(chan struct{}, 1)
}

func (l *waitList) giveBack(ch chan struct{}) {
	l.mu.Lock()
	l.free = append(l.free, ch)
	l.mu.Unlock()
}

// awaitOn blocks until item seq has run. ch is the caller's own.
func (s *stream) awaitOn(seq uint64, ch chan struct{}) {
	if spinUntil(&s.done, seq) || !s.waiters.add(&s.done, seq, ch) {
		return
	}
	<-ch
}

// await blocks until item seq has run or ctx ends, and then returns its cause.
func (s *stream) await(ctx context.Context, seq uint64) error {
	if spinUntil(&s.done, seq) {
		return nil
	}
	ch := s.waiters.channel()
	defer s.waiters.giveBack(ch)
	if !s.waiters.add(&s.done, seq, ch) {
		return nil
	}
	select {
	case <-ch:
		return nil
	case <-ctx.Done():
		if !s.waiters.remove(ch) {
			<-ch
		}
		return context.Cause(ctx)
	}
}
