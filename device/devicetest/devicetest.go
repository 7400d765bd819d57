// Package devicetest proves that an implementation of device.Device keeps the
// promises of package device: streams, events, failures, memory and copies.
// What kernels compute is tested by each device itself.
package devicetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// Run runs the suite. open starts a device of the kind under test; the suite
// closes it. Tests of host functions are skipped where streams have none.
func Run(t *testing.T, open func(t *testing.T) device.Device) {
	for _, c := range []struct {
		name string
		f    func(t *testing.T, d device.Device)
	}{
		{"memory", testMemory},
		{"copy", testCopy},
		{"order", testOrder},
		{"wait", testWait},
		{"wait refers to the latest record", testLatestRecord},
		{"not recorded", testNotRecorded},
		{"events over many steps", testSteps},
		{"records of one event on two streams", testTwoRecorders},
		{"since", testSince},
		{"failure", testFailure},
		{"failure crosses streams", testFailureCrosses},
		{"failure comes after what was recorded before", testFailureOrder},
		{"panic", testPanic},
		{"sync ends with its context", testSyncContext},
		{"many producers", testProducers},
		{"compile", testCompile},
		{"close", testClose},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := open(t)
			defer func() { require.NoError(t, d.Close()) }()
			c.f(t, d)
		})
	}
}

// limited is a context that ends a hanging test.
func limited(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeoutCause(t.Context(), 20*time.Second, errors.New("devicetest: the device hangs"))
	t.Cleanup(cancel)
	return ctx
}

func streams(t *testing.T, d device.Device, n int) []device.Stream {
	t.Helper()
	s := make([]device.Stream, n)
	for i := range s {
		var err error
		s[i], err = d.NewStream(device.Normal)
		require.NoError(t, err)
	}
	return s
}

func newEvent(t *testing.T, d device.Device) device.Event {
	t.Helper()
	e, err := d.NewEvent()
	require.NoError(t, err)
	return e
}

// host enqueues a host function or skips the test where there are none.
func host(t *testing.T, s device.Stream, f func() error) {
	t.Helper()
	err := s.HostFunc(f)
	if errors.Is(err, device.ErrUnsupported) {
		t.Skip("the device's streams have no host functions")
	}
	require.NoError(t, err)
}

// gate enqueues a host function that blocks until the returned func is called,
// and makes sure that it ends with the test.
func gate(t *testing.T, s device.Stream) (open func()) {
	t.Helper()
	ch := make(chan struct{})
	open = sync.OnceFunc(func() { close(ch) })
	t.Cleanup(open)
	host(t, s, func() error { <-ch; return nil })
	return open
}

// testMemory: buffers of the wrong size, dirty or shared memory would corrupt
// whatever is planned into them; a silent slice outside its buffer would too.
func testMemory(t *testing.T, d device.Device) {
	for _, n := range []int{0, 1, 63, 64, 4096, 5 << 20} {
		b, err := d.Alloc(n)
		require.NoError(t, err)
		require.Equal(t, n, b.Len())
		if h, ok := b.HostBytes(); ok {
			require.Len(t, h, n)
			require.Equal(t, make([]byte, n), h, "not zeroed")
			for i := range h {
				h[i] = 0xff
			}
		}
	}
	_, err := d.Alloc(-1)
	require.Error(t, err)

	b, err := d.Alloc(100)
	require.NoError(t, err)
	part := b.Slice(60, 40)
	require.Equal(t, 40, part.Len())
	require.Equal(t, 0, b.Slice(100, 0).Len())
	if h, ok := part.HostBytes(); ok {
		h[0] = 7
		all, _ := b.HostBytes()
		require.Equal(t, byte(7), all[60], "a slice doesn't share memory")
	}
	for _, r := range [][2]int{{-1, 1}, {0, 101}, {61, 40}, {0, -1}, {101, 0}} {
		require.Panics(t, func() { b.Slice(r[0], r[1]) }, "slice %v", r)
	}
	require.Panics(t, func() { part.Slice(0, 41) }, "a slice of a slice reaches beyond it")
}

// testCopy: a copy that is cut short or misplaced loses parameters.
func testCopy(t *testing.T, d device.Device) {
	s := streams(t, d, 1)[0]
	for _, n := range []int{0, 1, 4096, 3<<20 + 5} {
		a, err := d.Alloc(n)
		require.NoError(t, err)
		b, err := d.Alloc(n)
		require.NoError(t, err)
		src, ok := a.HostBytes()
		if !ok {
			t.Skip("memory is not on the host")
		}
		for i := range src {
			src[i] = byte(i*31 + i>>8)
		}
		require.NoError(t, s.Copy(b, a))
		require.NoError(t, s.Sync(limited(t)))
		dst, _ := b.HostBytes()
		require.True(t, bytes.Equal(src, dst))
	}
	a, err := d.Alloc(8)
	require.NoError(t, err)
	require.Error(t, s.Copy(a, a.Slice(0, 4)), "lengths differ")
	require.NoError(t, s.Sync(limited(t)), "a refused call must not fail the stream")
}

// testOrder: work of one stream that overtakes is a data race.
func testOrder(t *testing.T, d device.Device) {
	s := streams(t, d, 1)[0]
	var got []int
	for i := range 5000 {
		host(t, s, func() error { got = append(got, i); return nil })
	}
	require.NoError(t, s.Sync(limited(t)))
	require.Len(t, got, 5000)
	for i, g := range got {
		require.Equal(t, i, g)
	}
}

// testWait: a wait that lets later work through is a data race between streams.
func testWait(t *testing.T, d device.Device) {
	s := streams(t, d, 2)
	e := newEvent(t, d)
	var flag atomic.Bool
	open := gate(t, s[0])
	host(t, s[0], func() error { flag.Store(true); return nil })
	require.NoError(t, s[0].Record(e))
	require.NoError(t, s[1].Wait(e))
	var seen bool
	host(t, s[1], func() error { seen = flag.Load(); return nil })
	time.Sleep(time.Millisecond) // gives a stream that doesn't wait the time to run
	open()
	require.NoError(t, s[1].Sync(limited(t)))
	require.True(t, seen)
	require.NoError(t, e.Sync(limited(t)))
}

// testLatestRecord: a wait must neither be satisfied by an older record nor
// hold out for a newer one, and Reset must leave it alone.
func testLatestRecord(t *testing.T, d device.Device) {
	s := streams(t, d, 2)
	e := newEvent(t, d)
	require.NoError(t, s[0].Record(e)) // old
	require.NoError(t, s[0].Sync(limited(t)))
	open1 := gate(t, s[0])
	var first atomic.Bool
	host(t, s[0], func() error { first.Store(true); return nil })
	require.NoError(t, s[0].Record(e)) // the one that is waited for
	require.NoError(t, s[1].Wait(e))
	e.Reset()
	open2 := gate(t, s[0])
	require.NoError(t, s[0].Record(e)) // newer, stays pending
	var seen bool
	host(t, s[1], func() error { seen = first.Load(); return nil })
	time.Sleep(time.Millisecond)
	open1()
	require.NoError(t, s[1].Sync(limited(t)), "the wait held out for a newer record")
	require.True(t, seen, "the wait was satisfied by an older record")
	open2()
	require.NoError(t, s[0].Sync(limited(t)))
}

// testNotRecorded: a wait that is silently a no-op is a race that shows on
// some runs only.
func testNotRecorded(t *testing.T, d device.Device) {
	s := streams(t, d, 1)[0]
	e := newEvent(t, d)
	require.ErrorIs(t, s.Wait(e), device.ErrNotRecorded)
	require.ErrorIs(t, e.Sync(limited(t)), device.ErrNotRecorded)
	_, err := e.Since(e)
	require.ErrorIs(t, err, device.ErrNotRecorded)
	require.NoError(t, s.Record(e))
	require.NoError(t, s.Wait(e))
	require.NoError(t, e.Sync(limited(t)))
	e.Reset()
	require.ErrorIs(t, s.Wait(e), device.ErrNotRecorded)
	require.ErrorIs(t, e.Sync(limited(t)), device.ErrNotRecorded)
	require.NoError(t, s.Sync(limited(t)), "a refused wait must not fail the stream")
}

// testSteps: the two events of a bucket are used again in every step; a step
// that is let through by the previous one's record reads gradients too early.
func testSteps(t *testing.T, d device.Device) {
	s := streams(t, d, 2)
	ready, done := newEvent(t, d), newEvent(t, d)
	var bucket int
	for step := range 3000 {
		host(t, s[0], func() error { bucket = step; return nil })
		require.NoError(t, s[0].Record(ready))
		require.NoError(t, s[1].Wait(ready))
		host(t, s[1], func() error {
			if bucket != step {
				return fmt.Errorf("step %d: bucket holds %d", step, bucket)
			}
			bucket = -step
			return nil
		})
		require.NoError(t, s[1].Record(done))
		require.NoError(t, s[0].Wait(done))
		host(t, s[0], func() error {
			if bucket != -step {
				return fmt.Errorf("step %d: update sees %d", step, bucket)
			}
			return nil
		})
		ready.Reset()
		done.Reset()
	}
	require.NoError(t, s[0].Sync(limited(t)))
	require.NoError(t, s[1].Sync(limited(t)))
}

// testTwoRecorders: records of one event on two streams may complete in any
// order; the later one must not release who waits for the earlier one.
func testTwoRecorders(t *testing.T, d device.Device) {
	s := streams(t, d, 3)
	e := newEvent(t, d)
	var first atomic.Bool
	open := gate(t, s[0])
	host(t, s[0], func() error { first.Store(true); return nil })
	require.NoError(t, s[0].Record(e))
	require.NoError(t, s[2].Wait(e))
	require.NoError(t, s[1].Record(e))
	require.NoError(t, e.Sync(limited(t)), "the latest record is that of the idle stream")
	var seen bool
	host(t, s[2], func() error { seen = first.Load(); return nil })
	time.Sleep(time.Millisecond)
	open()
	require.NoError(t, s[2].Sync(limited(t)))
	require.True(t, seen)
}

// testSince: the times of a step's parts come from events.
func testSince(t *testing.T, d device.Device) {
	s := streams(t, d, 1)[0]
	a, b := newEvent(t, d), newEvent(t, d)
	require.NoError(t, s.Record(a))
	open := gate(t, s)
	require.NoError(t, s.Record(b))
	require.NoError(t, a.Sync(limited(t)))
	_, err := b.Since(a)
	require.Error(t, err, "b is pending")
	time.Sleep(2 * time.Millisecond)
	open()
	require.NoError(t, s.Sync(limited(t)))
	dt, err := b.Since(a)
	require.NoError(t, err)
	require.GreaterOrEqual(t, dt, time.Millisecond)
	back, err := a.Since(b)
	require.NoError(t, err)
	require.Equal(t, -dt, back)
}

var errPlanted = errors.New("planted")

// testFailure: work after a failure runs on garbage; an event that never
// completes hangs the other streams.
func testFailure(t *testing.T, d device.Device) {
	s := streams(t, d, 1)[0]
	e := newEvent(t, d)
	open := gate(t, s)
	host(t, s, func() error { return errPlanted })
	ran := false
	host(t, s, func() error { ran = true; return errors.New("second") })
	require.NoError(t, s.Record(e))
	open()
	require.ErrorIs(t, s.Sync(limited(t)), errPlanted)
	require.False(t, ran, "work after the failure ran")
	require.ErrorIs(t, e.Sync(limited(t)), errPlanted)

	buf, err := d.Alloc(4)
	require.NoError(t, err)
	require.ErrorIs(t, s.HostFunc(func() error { return nil }), errPlanted)
	require.ErrorIs(t, s.Copy(buf, buf), errPlanted)
	require.ErrorIs(t, s.Wait(e), errPlanted)
	late := newEvent(t, d)
	require.ErrorIs(t, s.Record(late), errPlanted)
	require.ErrorIs(t, late.Sync(limited(t)), errPlanted, "an event recorded after the failure doesn't carry it")
	require.ErrorIs(t, s.Sync(limited(t)), errPlanted)
}

// testFailureCrosses: a stream that waits for a failed one must not go on.
func testFailureCrosses(t *testing.T, d device.Device) {
	s := streams(t, d, 3)
	a, b := newEvent(t, d), newEvent(t, d)
	open := gate(t, s[0])
	host(t, s[0], func() error { return errPlanted })
	require.NoError(t, s[0].Record(a))
	require.NoError(t, s[1].Wait(a))
	ran := false
	host(t, s[1], func() error { ran = true; return nil })
	require.NoError(t, s[1].Record(b))
	require.NoError(t, s[2].Wait(b))
	open()
	require.ErrorIs(t, s[2].Sync(limited(t)), errPlanted)
	require.ErrorIs(t, s[1].Sync(limited(t)), errPlanted)
	require.False(t, ran)
	// A wait for an event that has failed already fails the stream, too.
	other := streams(t, d, 1)[0]
	_ = other.Wait(b)
	require.ErrorIs(t, other.Sync(limited(t)), errPlanted)
}

// testFailureOrder: what was recorded before the failure is whole, and who
// waits for it must not be dragged down.
func testFailureOrder(t *testing.T, d device.Device) {
	s := streams(t, d, 2)
	e := newEvent(t, d)
	require.NoError(t, s[0].Record(e))
	host(t, s[0], func() error { return errPlanted })
	require.ErrorIs(t, s[0].Sync(limited(t)), errPlanted)
	require.NoError(t, e.Sync(limited(t)))
	require.NoError(t, s[1].Wait(e))
	require.NoError(t, s[1].Sync(limited(t)))
}

// testPanic: a panic on a stream's goroutine would take the process with it,
// and a runtime.Goexit would lose the queue.
func testPanic(t *testing.T, d device.Device) {
	for name, f := range map[string]func() error{
		"planted panic": func() error { panic("planted panic") },
		"goroutine":     func() error { runtime.Goexit(); return nil },
	} {
		s := streams(t, d, 1)[0]
		e := newEvent(t, d)
		open := gate(t, s)
		host(t, s, f)
		require.NoError(t, s.Record(e))
		open()
		require.ErrorContains(t, s.Sync(limited(t)), name)
		require.ErrorContains(t, e.Sync(limited(t)), name)
	}
}

// testSyncContext: Sync must not outlive its caller's patience, nor forget
// about the work.
func testSyncContext(t *testing.T, d device.Device) {
	s := streams(t, d, 1)[0]
	e := newEvent(t, d)
	open := gate(t, s)
	ran := false
	host(t, s, func() error { ran = true; return nil })
	require.NoError(t, s.Record(e))
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	require.ErrorIs(t, s.Sync(ctx), cause)
	require.ErrorIs(t, e.Sync(ctx), cause)
	open()
	require.NoError(t, s.Sync(limited(t)))
	require.True(t, ran)
}

// testProducers: streams fed from several goroutines must lose nothing.
func testProducers(t *testing.T, d device.Device) {
	s := streams(t, d, 1)[0]
	host(t, s, func() error { return nil })
	var wg sync.WaitGroup
	n := 0
	for range 8 {
		wg.Go(func() {
			for range 500 {
				if s.HostFunc(func() error { n++; return nil }) != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	require.NoError(t, s.Sync(limited(t)))
	require.Equal(t, 4000, n)
}

// testCompile: an unknown kind must be told from a broken one, since the
// engine falls back on the first only.
func testCompile(t *testing.T, d device.Device) {
	_, err := d.Compile(device.Op{Kind: "no such kind"})
	require.ErrorIs(t, err, device.ErrUnsupported)
	require.ErrorContains(t, err, "no such kind")

	y := device.Tensor{Shape: []int{3}, Type: dtype.Float32}
	k, err := d.Compile(device.Op{Kind: device.Fill, Attr: device.Attr{Alpha: 2}, Out: []device.Tensor{y}})
	require.NoError(t, err)
	require.Equal(t, device.Fill, k.Op().Kind)
	buf, err := d.Alloc(12)
	require.NoError(t, err)
	s := streams(t, d, 1)[0]
	require.Error(t, s.Launch(k, nil))
	require.Error(t, s.Launch(k, []device.Buffer{buf.Slice(0, 8)}))
	require.NoError(t, s.Launch(k, []device.Buffer{buf}))
	require.NoError(t, s.Sync(limited(t)))
}

// testClose: Close must let queued work end, may be called again, and what is
// closed must refuse work instead of swallowing it.
func testClose(t *testing.T, d device.Device) {
	s := streams(t, d, 1)[0]
	e := newEvent(t, d)
	ran := 0
	for range 100 {
		host(t, s, func() error { ran++; return nil })
	}
	require.NoError(t, s.Record(e))
	require.NoError(t, d.Close())
	require.Equal(t, 100, ran)
	require.NoError(t, e.Sync(limited(t)))
	require.NoError(t, d.Close())
	require.Error(t, s.HostFunc(func() error { return nil }))
	require.Error(t, s.Record(e))
	_, err := d.NewStream(device.Normal)
	require.Error(t, err)
	_, err = d.Alloc(1)
	require.Error(t, err)
}
