package commtest

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"testing"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// hugeEnv asks for buffers beyond 2³¹ and 2³² bytes, which need 9 GB of memory.
const hugeEnv = "TANDEM_TEST_HUGE"

// Without this an offset kept in 32 bits would wrap. The backend's arithmetic
// is also tested where it lives, without the memory.
func testHuge(s *suite, t *testing.T) {
	if os.Getenv(hugeEnv) == "" {
		t.Skipf("needs 9 GB of memory: set %s=1", hugeEnv)
	}
	s.with(t, 2, Config{}, func(r *rig) {
		const n = 1<<32 + 12345
		r.must("huge", func(i int) error {
			buf, err := r.comms[i].Alloc(n)
			if err != nil {
				return err
			}
			p := host(buf)
			marks := []int{0, 1<<31 - 1, 1 << 31, 1<<32 - 1, 1 << 32, n - 1}
			for k, m := range marks {
				p[m] = byte(k + 1 + i)
			}
			if err := r.comms[i].AllReduce(r.streams[i], buf, buf, dtype.Uint8, comm.Sum, tag(0)); err != nil {
				return err
			}
			if err := r.sync(i); err != nil {
				return err
			}
			for k, m := range marks {
				if p[m] != byte(2*k+3) {
					return fmt.Errorf("byte %d is %d, want %d", m, p[m], 2*k+3)
				}
			}
			return nil
		})
	})
}

// Without this operations in flight could overtake one another, or a pooled
// operation be reused while it is still queued.
func testThousand(s *suite, t *testing.T) {
	const ops = 1000
	s.with(t, 4, Config{}, func(r *rig) {
		r.must("thousand", func(i int) error {
			bufs, events := make([]device.Buffer, ops), make([]device.Event, ops)
			for k := range ops {
				bufs[k] = r.buffer(i, fill(dtype.Int32, 1+k%97, func(j int) int64 { return int64(k*1000 + i) }))
				if err := r.comms[i].AllReduce(r.streams[i], bufs[k], bufs[k], dtype.Int32, comm.Sum, tag(k)); err != nil {
					return err
				}
				e, err := r.dev.NewEvent()
				if err != nil {
					return err
				}
				if err := r.streams[i].Record(e); err != nil {
					return err
				}
				events[k] = e
			}
			for k := ops - 1; k >= 0; k-- {
				if err := events[k].Sync(context.Background()); err != nil {
					return err
				}
				want := fill(dtype.Int32, 1+k%97, func(int) int64 { return int64(4*k*1000 + 6) })
				if err := same(dtype.Int32, host(bufs[k]), want); err != nil {
					return fmt.Errorf("operation %d: %w", k, err)
				}
			}
			return nil
		})
	})
}

// Without this one kind of collective could leave bytes behind for the next.
func testMixed(s *suite, t *testing.T) {
	const d = dtype.Float32
	for _, size := range s.sizes {
		s.with(t, size, Config{}, func(r *rig) {
			r.must("mixed", func(i int) error {
				if err := mixed(r, i); err != nil {
					return err
				}
				last := r.buffer(i, fill(d, 100, func(j int) int64 { return int64(i) }))
				if err := r.comms[i].AllReduce(r.streams[i], last, last, d, comm.Sum, tag(0)); err != nil {
					return err
				}
				if err := r.sync(i); err != nil {
					return err
				}
				return same(d, host(last), fill(d, 100, func(int) int64 { return int64(size * (size - 1) / 2) }))
			})
		})
	}
}

// mixed runs 60 collectives of rank i, chosen as on all other ranks.
func mixed(r *rig, i int) error {
	const d = dtype.Float32
	size := len(r.comms)
	rnd := rand.New(rand.NewPCG(3, uint64(size)))
	c, st := r.comms[i], r.streams[i]
	for range 60 {
		n := []int{0, 1, 7, 1000, 9000, 70_000}[rnd.IntN(6)]
		one := r.buffer(i, fill(d, n, func(j int) int64 { return int64(i + j%3) }))
		all := r.buffer(i, fill(d, n*size, func(j int) int64 { return int64(i + j%5) }))
		var err error
		switch rnd.IntN(5) {
		case 0:
			err = c.AllReduce(st, one, one, d, comm.Max, tag(0))
		case 1:
			err = c.ReduceScatter(st, one, all, d, comm.Sum, tag(0))
		case 2:
			err = c.AllGather(st, all, one, d, tag(0))
		case 3:
			err = c.Broadcast(st, one, d, rnd.IntN(size), tag(0))
		case 4:
			if err = r.sync(i); err == nil {
				err = c.Barrier(context.Background())
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Without this every collective would leave garbage, and its collection would
// stop training.
func testAllocations(s *suite, t *testing.T) {
	if raced {
		t.Skip("the race detector allocates")
	}
	for _, n := range []int{100, 100_000} {
		s.with(t, 2, Config{}, func(r *rig) {
			bufs := []device.Buffer{r.buffer(0, make([]byte, 4*n)), r.buffer(1, make([]byte, 4*n))}
			round := func(k int) {
				r.must("round", func(i int) error {
					for range k {
						if err := r.comms[i].AllReduce(r.streams[i], bufs[i], bufs[i], dtype.Float32, comm.Avg, tag(0)); err != nil {
							return err
						}
					}
					return r.sync(i)
				})
			}
			const rounds = 200
			round(rounds)
			// Free lists grow whenever the queue is longer than it ever was, which a
			// busy machine brings about: the steady state is the best of some tries.
			got := uint64(math.MaxUint64)
			for range 5 {
				var a, b runtime.MemStats
				runtime.ReadMemStats(&a)
				round(rounds)
				runtime.ReadMemStats(&b)
				got = min(got, b.Mallocs-a.Mallocs)
			}
			if got > rounds/2 { // the test itself needs some
				t.Errorf("%d allocations in %d operations of %d elements on two ranks", got, rounds, n)
			}
		})
	}
}
