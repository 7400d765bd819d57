package rendezvous

import (
	"context"
	"fmt"
)

// Mem is a store inside this process, for ranks that are goroutines and for
// tests. All users share one Mem; closing it closes it for all.
type Mem struct{ t *table }

// NewMem returns an empty in-process store.
func NewMem() *Mem { return &Mem{newTable()} }

// Set implements Store.
func (m *Mem) Set(ctx context.Context, key string, value []byte) error {
	if err := check(ctx, checkKey(key), checkValue(key, value)); err != nil {
		return err
	}
	return m.t.set(key, value)
}

// Get implements Store.
func (m *Mem) Get(ctx context.Context, key string) ([]byte, error) {
	if err := check(ctx, checkKey(key)); err != nil {
		return nil, err
	}
	return m.t.get(key)
}

// Wait implements Store.
func (m *Mem) Wait(ctx context.Context, keys ...string) error {
	if err := check(ctx, checkWait(keys)); err != nil {
		return err
	}
	done := make(chan error, 1)
	cancel := m.t.wait(keys, func(err error) { done <- err })
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		if cancel != nil {
			cancel()
		}
		return waitError(ctx, keys)
	}
}

// Add implements Store.
func (m *Mem) Add(ctx context.Context, key string, delta int64) (int64, error) {
	if err := check(ctx, checkKey(key)); err != nil {
		return 0, err
	}
	return m.t.add(key, delta)
}

// CompareAndSet implements Store.
func (m *Mem) CompareAndSet(ctx context.Context, key string, old, new []byte) ([]byte, error) {
	if err := check(ctx, checkKey(key), checkSwap(key, old, new)); err != nil {
		return nil, err
	}
	return m.t.compareAndSet(key, old, new)
}

// Delete implements Store.
func (m *Mem) Delete(ctx context.Context, key string) error {
	if err := check(ctx, checkKey(key)); err != nil {
		return err
	}
	return m.t.delete(key)
}

// Close implements Store.
func (m *Mem) Close() error {
	m.t.close()
	return nil
}

func checkSwap(key string, old, new []byte) error {
	if new == nil {
		return fmt.Errorf("rendezvous: compare-and-set of %q to nil; use Delete, or an empty value", key)
	}
	if err := checkValue(key, old); err != nil {
		return err
	}
	return checkValue(key, new)
}

// check returns the context's cause or the first argument error.
func check(ctx context.Context, errs ...error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// waitError says what was waited for when ctx ended.
func waitError(ctx context.Context, keys []string) error {
	if len(keys) == 1 {
		return fmt.Errorf("rendezvous: wait for %q: %w", keys[0], context.Cause(ctx))
	}
	return fmt.Errorf("rendezvous: wait for %d keys, first %q: %w", len(keys), keys[0], context.Cause(ctx))
}
