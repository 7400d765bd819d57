// Package rendezvous is how ranks find one another: the environment that says
// who a process is (FromEnv), and a small key-value store at rank 0 or in the
// launcher (Store) through which ranks exchange addresses, count and wait.
package rendezvous

import (
	"context"
	"errors"
	"fmt"
)

// Limits of the store. A larger key, value or list is refused with an error
// that names the limit; nothing is allocated for it.
const (
	MaxKey   = 1 << 10 // bytes in a key, at least 1
	MaxValue = 8 << 20 // bytes in a value
	MaxWait  = 1 << 14 // keys in one Wait
)

var (
	// ErrNotFound is returned (wrapped, with the key) by Get for a key that is
	// not set.
	ErrNotFound = errors.New("rendezvous: key not found")
	// ErrClosed is returned by operations on a closed store.
	ErrClosed = errors.New("rendezvous: store is closed")
	// ErrNotInteger is returned by Add on a value that is not a decimal number.
	ErrNotInteger = errors.New("rendezvous: value is not a decimal integer")
)

// Store is a key-value store shared by all ranks of a job. Every operation is
// atomic, ends when its ctx does, and may be called from several goroutines.
// Values are copied: the caller may reuse what it passed and owns what it got.
// Keys are free-form; by convention parts are separated by slashes and every
// user of a store works under its own Prefix.
type Store interface {
	// Set stores value under key, replacing what was there.
	Set(ctx context.Context, key string, value []byte) error
	// Get returns the value of key, or an error that wraps ErrNotFound.
	Get(ctx context.Context, key string) ([]byte, error)
	// Wait returns when all keys are set. A timeout of ctx satisfies
	// errors.Is(err, context.DeadlineExceeded).
	Wait(ctx context.Context, keys ...string) error
	// Add adds delta to the decimal number stored under key (0 when absent)
	// and returns the sum. Add(ctx, key, 0) reads a counter.
	Add(ctx context.Context, key string, delta int64) (int64, error)
	// CompareAndSet stores new under key when it holds old, and returns what
	// key holds afterwards: new when it succeeded, the other value when not. A
	// nil old means "absent"; nil is returned for an absent key. new must not
	// be nil.
	CompareAndSet(ctx context.Context, key string, old, new []byte) ([]byte, error)
	// Delete removes key; deleting an absent key is no error.
	Delete(ctx context.Context, key string) error
	// Close releases this handle. Operations in progress fail with ErrClosed.
	Close() error
}

// WaitGet waits until key is set and returns its value.
func WaitGet(ctx context.Context, s Store, key string) ([]byte, error) {
	for {
		if err := s.Wait(ctx, key); err != nil {
			return nil, err
		}
		v, err := s.Get(ctx, key)
		if !errors.Is(err, ErrNotFound) { // deleted in between: wait again
			return v, err
		}
	}
}

// Prefix is a view of s in which every key starts with p. Closing the view
// does not close s.
func Prefix(s Store, p string) Store {
	if v, ok := s.(*prefixed); ok {
		return &prefixed{v.s, v.p + p}
	}
	return &prefixed{s, p}
}

type prefixed struct {
	s Store
	p string
}

func (v *prefixed) Set(ctx context.Context, key string, value []byte) error {
	return v.s.Set(ctx, v.key(key), value)
}

func (v *prefixed) Get(ctx context.Context, key string) ([]byte, error) {
	return v.s.Get(ctx, v.key(key))
}

func (v *prefixed) Wait(ctx context.Context, keys ...string) error {
	full := make([]string, len(keys))
	for i, k := range keys {
		full[i] = v.key(k)
	}
	return v.s.Wait(ctx, full...)
}

func (v *prefixed) Add(ctx context.Context, key string, delta int64) (int64, error) {
	return v.s.Add(ctx, v.key(key), delta)
}

func (v *prefixed) CompareAndSet(ctx context.Context, key string, old, new []byte) ([]byte, error) {
	return v.s.CompareAndSet(ctx, v.key(key), old, new)
}

func (v *prefixed) Delete(ctx context.Context, key string) error {
	return v.s.Delete(ctx, v.key(key))
}

// key leaves an empty key empty, so that the store refuses it.
func (v *prefixed) key(k string) string {
	if k == "" {
		return ""
	}
	return v.p + k
}

func (v *prefixed) Close() error { return nil }

// checkKey refuses keys that the wire could not carry, so that all stores
// agree on what is valid.
func checkKey(key string) error {
	if key == "" || len(key) > MaxKey {
		return fmt.Errorf("rendezvous: key of %d bytes, want 1 to %d", len(key), MaxKey)
	}
	return nil
}

func checkValue(key string, value []byte) error {
	if len(value) > MaxValue {
		return fmt.Errorf("rendezvous: value of %q has %d bytes, at most %d fit", key, len(value), MaxValue)
	}
	return nil
}

func checkWait(keys []string) error {
	if len(keys) > MaxWait {
		return fmt.Errorf("rendezvous: wait for %d keys, at most %d at a time", len(keys), MaxWait)
	}
	for _, k := range keys {
		if err := checkKey(k); err != nil {
			return err
		}
	}
	return nil
}
