package rendezvous

import (
	"bytes"
	"fmt"
	"math"
	"strconv"
	"sync"
)

// table is the state of a store: the values, and who waits for which key. The
// in-process store and the server are both thin layers over it.
type table struct {
	mu      sync.Mutex
	values  map[string][]byte
	waiters map[string]map[*waiter]struct{}
	closed  bool
}

// waiter is one Wait in progress. done is called once, without the lock, when
// the last key was set (nil) or the table closed.
type waiter struct {
	missing map[string]struct{}
	done    func(error)
}

func newTable() *table {
	return &table{values: map[string][]byte{}, waiters: map[string]map[*waiter]struct{}{}}
}

// set stores a copy of value and wakes whoever waited for key.
func (t *table) set(key string, value []byte) error {
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		return ErrClosed
	}
	ready := t.storeLocked(key, bytes.Clone(value))
	t.mu.Unlock()
	wake(ready, nil)
	return nil
}

// storeLocked stores value and returns the waiters that are complete now.
func (t *table) storeLocked(key string, value []byte) []*waiter {
	if value == nil {
		value = []byte{} // nil means absent
	}
	t.values[key] = value
	var ready []*waiter
	for w := range t.waiters[key] {
		delete(w.missing, key)
		if len(w.missing) == 0 {
			ready = append(ready, w)
		}
	}
	delete(t.waiters, key)
	return ready
}

func wake(ready []*waiter, err error) {
	for _, w := range ready {
		w.done(err)
	}
}

func (t *table) get(key string) ([]byte, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, ErrClosed
	}
	v, ok := t.values[key]
	if !ok {
		return nil, fmt.Errorf("%w: %q", ErrNotFound, key)
	}
	return bytes.Clone(v), nil
}

func (t *table) add(key string, delta int64) (int64, error) {
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		return 0, ErrClosed
	}
	var n int64
	if v, ok := t.values[key]; ok {
		var err error
		if n, err = strconv.ParseInt(string(v), 10, 64); err != nil {
			t.mu.Unlock()
			return 0, fmt.Errorf("%w: add to %q, which holds %d bytes", ErrNotInteger, key, len(v))
		}
	}
	if (delta > 0 && n > math.MaxInt64-delta) || (delta < 0 && n < math.MinInt64-delta) {
		t.mu.Unlock()
		return 0, fmt.Errorf("rendezvous: %q overflows: %d + %d", key, n, delta)
	}
	n += delta
	ready := t.storeLocked(key, strconv.AppendInt(nil, n, 10))
	t.mu.Unlock()
	wake(ready, nil)
	return n, nil
}

func (t *table) compareAndSet(key string, old, new []byte) ([]byte, error) {
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		return nil, ErrClosed
	}
	have, ok := t.values[key]
	if ok != (old != nil) || !bytes.Equal(have, old) {
		t.mu.Unlock()
		return bytes.Clone(have), nil
	}
	ready := t.storeLocked(key, bytes.Clone(new))
	t.mu.Unlock()
	wake(ready, nil)
	return bytes.Clone(new), nil
}

func (t *table) delete(key string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return ErrClosed
	}
	delete(t.values, key)
	return nil
}

// wait registers done for when all keys are set, and calls it at once when
// they are. The result undoes the registration; it is nil when done was called.
func (t *table) wait(keys []string, done func(error)) (cancel func()) {
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		done(ErrClosed)
		return nil
	}
	w := &waiter{missing: map[string]struct{}{}, done: done}
	for _, k := range keys {
		if _, ok := t.values[k]; !ok {
			w.missing[k] = struct{}{}
		}
	}
	if len(w.missing) == 0 {
		t.mu.Unlock()
		done(nil)
		return nil
	}
	for k := range w.missing {
		if t.waiters[k] == nil {
			t.waiters[k] = map[*waiter]struct{}{}
		}
		t.waiters[k][w] = struct{}{}
	}
	t.mu.Unlock()
	return func() { t.forget(w) }
}

func (t *table) forget(w *waiter) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for k := range w.missing {
		delete(t.waiters[k], w)
		if len(t.waiters[k]) == 0 {
			delete(t.waiters, k)
		}
	}
}

// waiting is the number of keys that somebody waits for.
func (t *table) waiting() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.waiters)
}

func (t *table) close() {
	t.mu.Lock()
	all := map[*waiter]struct{}{}
	for _, ws := range t.waiters {
		for w := range ws {
			all[w] = struct{}{}
		}
	}
	t.closed, t.values, t.waiters = true, nil, map[string]map[*waiter]struct{}{}
	t.mu.Unlock()
	for w := range all {
		w.done(ErrClosed)
	}
}
