package rendezvous

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func startServer(t testing.TB, o ServerOptions) *Server {
	ln, err := Listen(context.Background(), "127.0.0.1:0")
	require.NoError(t, err)
	s := Serve(ln, o)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func dial(t testing.TB, addr string, rank int) *Client {
	c, err := Dial(testContext(t), ClientOptions{Addr: addr, Rank: rank, Secret: "s"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// stores gives two handles on one store, for every implementation.
func stores(t *testing.T, f func(t *testing.T, a, b Store)) {
	t.Run("mem", func(t *testing.T) { m := NewMem(); defer m.Close(); f(t, m, m) })
	t.Run("prefix", func(t *testing.T) {
		m := NewMem()
		f(t, Prefix(Prefix(m, "a/"), "b/"), Prefix(m, "a/b/"))
		require.NoError(t, m.Set(testContext(t), "a/b/c", nil))
	})
	t.Run("tcp", func(t *testing.T) {
		s := startServer(t, ServerOptions{Secret: "s"})
		f(t, dial(t, s.Addr().String(), 0), dial(t, s.Addr().String(), 1))
	})
	t.Run("tcp and local", func(t *testing.T) {
		s := startServer(t, ServerOptions{Secret: "s"})
		f(t, s.Store(), dial(t, s.Addr().String(), 1))
	})
}

// Without it the stores would differ in what a key, a miss or an empty value is.
func TestStore(t *testing.T) {
	stores(t, func(t *testing.T, a, b Store) {
		ctx := testContext(t)
		_, err := a.Get(ctx, "k")
		require.ErrorIs(t, err, ErrNotFound)
		require.ErrorContains(t, err, `k"`)
		v := []byte("one")
		require.NoError(t, a.Set(ctx, "k", v))
		v[0] = 'X'
		got, err := b.Get(ctx, "k")
		require.NoError(t, err)
		require.Equal(t, "one", string(got))
		require.NoError(t, a.Set(ctx, "empty", nil))
		got, err = b.Get(ctx, "empty")
		require.NoError(t, err)
		require.Empty(t, got)

		n, err := a.Add(ctx, "n", 5)
		require.NoError(t, err)
		require.EqualValues(t, 5, n)
		n, err = b.Add(ctx, "n", -7)
		require.NoError(t, err)
		require.EqualValues(t, -2, n)
		got, err = a.Get(ctx, "n")
		require.NoError(t, err)
		require.Equal(t, "-2", string(got))
		_, err = a.Add(ctx, "k", 1)
		require.ErrorIs(t, err, ErrNotInteger)
		require.NoError(t, a.Set(ctx, "max", []byte("9223372036854775807")))
		_, err = a.Add(ctx, "max", 1)
		require.ErrorContains(t, err, "overflows")

		require.NoError(t, b.Delete(ctx, "k"))
		require.NoError(t, b.Delete(ctx, "k"))
		_, err = a.Get(ctx, "k")
		require.ErrorIs(t, err, ErrNotFound)

		require.Error(t, a.Set(ctx, "", nil))
		require.Error(t, a.Set(ctx, strings.Repeat("k", MaxKey+1), nil))
		require.Error(t, a.Set(ctx, "k", make([]byte, MaxValue+1)))
		require.NoError(t, a.Set(ctx, "k", make([]byte, MaxValue)))
		got, err = b.Get(ctx, "k")
		require.NoError(t, err)
		require.Len(t, got, MaxValue)
	})
}

// Without it two ranks could both believe that they own a key.
func TestCompareAndSet(t *testing.T) {
	stores(t, func(t *testing.T, a, b Store) {
		ctx := testContext(t)
		got, err := a.CompareAndSet(ctx, "k", []byte{}, []byte("x"))
		require.NoError(t, err)
		require.Nil(t, got, "an empty value is not an absent one")
		got, err = a.CompareAndSet(ctx, "k", nil, []byte{})
		require.NoError(t, err)
		require.NotNil(t, got)
		got, err = b.CompareAndSet(ctx, "k", nil, []byte("y"))
		require.NoError(t, err)
		require.Equal(t, []byte{}, got)
		got, err = b.CompareAndSet(ctx, "k", []byte{}, []byte("y"))
		require.NoError(t, err)
		require.Equal(t, "y", string(got))
		_, err = b.CompareAndSet(ctx, "k", nil, nil)
		require.Error(t, err)

		var wg sync.WaitGroup
		var winners sync.Map
		for i := range 8 {
			wg.Go(func() {
				s := []Store{a, b}[i%2]
				me := fmt.Appendf(nil, "%d", i)
				got, err := s.CompareAndSet(ctx, "race", nil, me)
				if err == nil && bytes.Equal(got, me) {
					winners.Store(i, true)
				}
			})
		}
		wg.Wait()
		n := 0
		winners.Range(func(any, any) bool { n++; return true })
		require.Equal(t, 1, n)
	})
}

// Without it a rank would start before the keys it needs are there, or never.
func TestWait(t *testing.T) {
	stores(t, func(t *testing.T, a, b Store) {
		ctx := testContext(t)
		require.NoError(t, a.Wait(ctx))
		done := make(chan error, 2)
		go func() { done <- a.Wait(ctx, "x", "y") }()
		go func() {
			v, err := WaitGet(ctx, b, "y")
			if err == nil && string(v) != "v" {
				err = fmt.Errorf("got %q", v)
			}
			done <- err
		}()
		require.NoError(t, b.Set(ctx, "x", nil))
		select {
		case <-done:
			t.Fatal("a wait ended before its key was set")
		case <-time.After(20 * time.Millisecond):
		}
		require.NoError(t, b.Set(ctx, "y", []byte("v")))
		require.NoError(t, <-done)
		require.NoError(t, <-done)

		short, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
		defer cancel()
		err := a.Wait(short, "never")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, `never"`)
		require.ErrorIs(t, a.Set(short, "k", nil), context.DeadlineExceeded)
	})
}

// Without it concurrent counting would lose increments.
func TestAddCounts(t *testing.T) {
	stores(t, func(t *testing.T, a, b Store) {
		ctx := testContext(t)
		var wg sync.WaitGroup
		for i := range 4 {
			wg.Go(func() {
				for range 50 {
					if _, err := []Store{a, b}[i%2].Add(ctx, "n", 1); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		n, err := a.Add(ctx, "n", 0)
		require.NoError(t, err)
		require.EqualValues(t, 200, n)
	})
}
