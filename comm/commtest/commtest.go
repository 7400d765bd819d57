// Package commtest is the conformance suite for implementations of
// comm.Communicator. A backend passes Run, or it isn't one.
package commtest

import (
	"context"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/device"
)

// Config is what a test asks of a group.
type Config struct {
	// Timeout is the arrival deadline of operations; 0 means the default.
	Timeout time.Duration
}

// Spawn makes a new group of n ranks, all in this process, over the memory of
// dev, and fails t if it can't. Element i is rank i. Run closes them.
type Spawn func(t testing.TB, dev device.Device, n int, c Config) []comm.Communicator

// Run holds the backend behind spawn against the promises of comm.Communicator,
// for 1 to 8 ranks and the further numbers of ranks given.
func Run(t *testing.T, spawn Spawn, more ...int) {
	// The runtime opens descriptors of its own with the first socket.
	if l, err := net.Listen("tcp", "127.0.0.1:0"); err == nil {
		_ = l.Close()
	}
	s := &suite{spawn: spawn, sizes: append([]int{1, 2, 3, 4, 5, 6, 7, 8}, more...)}
	if raced {
		s.sizes = []int{1, 2, 3, 5}
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) { c.test(s, t) })
	}
}

var tests = []struct {
	name string
	test func(*suite, *testing.T)
}{
	{"AllReduce", testAllReduce},
	{"ReduceScatter", testReduceScatter},
	{"AllGather", testAllGather},
	{"Broadcast", testBroadcast},
	{"SendRecv", testSendRecv},
	{"Average", testAverage},
	{"Identical", testIdentical},
	{"NaN", testNaN},
	{"HalfAverage", testHalfAverage},
	{"Misaligned", testMisaligned},
	{"Huge", testHuge},
	{"Thousand", testThousand},
	{"Mixed", testMixed},
	{"Barrier", testBarrier},
	{"Split", testSplit},
	{"Arguments", testArguments},
	{"Allocations", testAllocations},
	{"Mismatch", testMismatch},
	{"MessageMismatch", testMessageMismatch},
	{"Absent", testAbsent},
	{"Abort", testAbort},
	{"AbortIdle", testAbortIdle},
	{"Cancel", testCancel},
	{"CloseInOperation", testCloseInOperation},
	{"CloseInOrder", testCloseInOrder},
	{"CloseTwice", testCloseTwice},
	{"FailFast", testFailFast},
	{"SplitFails", testSplitFails},
}

type suite struct {
	spawn Spawn
	sizes []int
}

// hangAfter is when a test that should have ended is called hung. It is far
// above anything a loaded machine needs.
const hangAfter = 60 * time.Second

// rig is a group under test.
type rig struct {
	t       *testing.T
	dev     device.Device
	comms   []comm.Communicator
	streams []device.Stream
	arenas  []arena
}

// arena reuses one rank's buffers from one round to the next, since a device
// keeps what it has allocated.
type arena struct {
	free, used []device.Buffer
}

// get is a buffer of n bytes that nobody uses in this round.
func (a *arena) get(c comm.Communicator, n int) (device.Buffer, error) {
	for i, b := range a.free {
		if b.Len() >= n && b.Len() <= 4*n+4096 {
			a.free = slices.Delete(a.free, i, i+1)
			a.used = append(a.used, b)
			return b.Slice(0, n), nil
		}
	}
	b, err := c.Alloc(n)
	if err == nil {
		a.used = append(a.used, b)
	}
	return b, err
}

// with runs f on a new group of n ranks, closes it and checks that no
// goroutine and no descriptor is left.
func (s *suite) with(t *testing.T, n int, c Config, f func(r *rig)) {
	t.Helper()
	before, files := goleak.IgnoreCurrent(), openFiles()
	dev, err := cpu.New(&cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, dev: dev, comms: s.spawn(t, dev, n, c), arenas: make([]arena, n)}
	for range n {
		st, err := dev.NewStream(device.High)
		if err != nil {
			t.Fatal(err)
		}
		r.streams = append(r.streams, st)
	}
	f(r)
	for i, err := range r.each(func(k int) error { return r.comms[k].Close() }) {
		if err != nil {
			t.Errorf("close of rank %d: %v", i, err)
		}
	}
	if err := dev.Close(); err != nil {
		t.Errorf("close of the device: %v", err)
	}
	goleak.VerifyNone(t, before)
	if now := openFiles(); now > files {
		t.Errorf("%d file descriptors are open, %d were before", now, files)
	}
}

// openFiles counts this process's descriptors where the system says, else 0.
func openFiles() int {
	if runtime.GOOS != "linux" {
		return 0
	}
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(d)
}

// each runs f for every rank at once and returns their errors.
func (r *rig) each(f func(rank int) error) []error {
	r.t.Helper()
	errs := make([]error, len(r.comms))
	var wg sync.WaitGroup
	for i := range r.comms {
		wg.Go(func() { errs[i] = f(i) })
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(hangAfter):
		buf := make([]byte, 1<<20)
		r.t.Fatalf("ranks hang\n%s", buf[:runtime.Stack(buf, true)])
	}
	return errs
}

// must is each where every error fails the test. Buffers of earlier rounds are
// used again.
func (r *rig) must(what string, f func(rank int) error) {
	r.t.Helper()
	for i := range r.arenas {
		a := &r.arenas[i]
		a.free, a.used = append(a.free, a.used...), a.used[:0]
	}
	for i, err := range r.each(f) {
		if err != nil {
			r.t.Fatalf("%s: rank %d: %v", what, i, err)
		}
	}
}

// sync waits for rank i's stream.
func (r *rig) sync(i int) error {
	ctx, cancel := context.WithTimeout(context.Background(), hangAfter)
	defer cancel()
	return r.streams[i].Sync(ctx)
}

// buffer is memory from rank i's communicator holding b, for this round. Only
// rank i's goroutine calls it.
func (r *rig) buffer(i int, b []byte) device.Buffer {
	r.t.Helper()
	buf, err := r.arenas[i].get(r.comms[i], len(b))
	if err != nil {
		r.t.Errorf("rank %d: alloc: %v", i, err)
		return nil
	}
	copy(host(buf), b)
	return buf
}

func host(b device.Buffer) []byte {
	p, _ := b.HostBytes()
	return p
}

// waitErr waits until rank i knows of the failure.
func (r *rig) waitErr(i int) error {
	for start := time.Now(); time.Since(start) < hangAfter; time.Sleep(time.Millisecond) {
		if err := r.comms[i].Err(); err != nil {
			return err
		}
	}
	return fmt.Errorf("rank %d never heard of the failure", i)
}
