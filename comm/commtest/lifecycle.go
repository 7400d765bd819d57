package commtest

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/dtype"
)

// Without this a rank could pass a barrier before the others have come.
func testBarrier(s *suite, t *testing.T) {
	for _, size := range s.sizes {
		s.with(t, size, Config{}, func(r *rig) {
			var came atomic.Int64
			r.must("barrier", func(i int) error {
				for round := range int64(20) {
					time.Sleep(time.Duration((i*7+int(round)*3)%5) * 100 * time.Microsecond)
					came.Add(1)
					if err := r.comms[i].Barrier(context.Background()); err != nil {
						return err
					}
					if n := came.Load(); n < (round+1)*int64(size) {
						return fmt.Errorf("round %d: passed after %d of %d arrivals", round, n, (round+1)*int64(size))
					}
				}
				return nil
			})
		})
	}
}

// split makes child groups on all ranks.
func (r *rig) split(color, key func(i int) int) []comm.Communicator {
	r.t.Helper()
	children := make([]comm.Communicator, len(r.comms))
	r.must("split", func(i int) (err error) {
		children[i], err = r.comms[i].Split(context.Background(), color(i), key(i))
		return err
	})
	return children
}

// Without this child groups could have other members or ranks than asked for,
// or get in one another's way.
func testSplit(s *suite, t *testing.T) {
	for _, size := range s.sizes {
		s.with(t, size, Config{}, func(r *rig) {
			// Even ranks in reverse, odd ones in order, rank 5 nowhere.
			color := func(i int) int {
				if i == 5 {
					return -1
				}
				return i % 2
			}
			key := func(i int) int { return []int{-i, i}[i%2] }
			children := r.split(color, key)
			r.must("children", func(i int) error { return useChild(r, children, i, color, key) })
			grand := make([]comm.Communicator, size)
			r.must("grandchildren", func(i int) (err error) {
				if children[i] != nil {
					grand[i], err = children[i].Split(context.Background(), 0, 0)
				}
				return err
			})
			r.must("close", func(i int) error {
				if children[i] == nil {
					return nil
				}
				if g, c := grand[i], children[i]; g.Size() != c.Size() || g.Rank() != c.Rank() {
					return fmt.Errorf("equal keys: rank %d of %d in the child, %d of %d in the grandchild", c.Rank(), c.Size(), g.Rank(), g.Size())
				}
				return grand[i].Close() // the children are closed with their parent
			})
			r.must("parent", func(i int) error { return r.allReduce(i, 5, 0) })
		})
	}
}

// useChild checks the child's place and sums over it, while the parent is
// used as well.
func useChild(r *rig, children []comm.Communicator, i int, color, key func(int) int) error {
	c := children[i]
	if color(i) < 0 {
		if c != nil {
			return fmt.Errorf("a negative colour gave a group of %d", c.Size())
		}
		return r.allReduce(i, 9, 1)
	}
	rank, size, sum := 0, 0, int64(0)
	for j := range r.comms {
		if color(j) != color(i) {
			continue
		}
		size++
		sum += int64(j + 1)
		if key(j) < key(i) {
			rank++
		}
	}
	if c.Rank() != rank || c.Size() != size {
		return fmt.Errorf("rank %d of %d in the child, want %d of %d", c.Rank(), c.Size(), rank, size)
	}
	for _, n := range []int{4, 40_000} {
		buf := r.buffer(i, fill(dtype.Float32, n, func(int) int64 { return int64(i + 1) }))
		if err := c.AllReduce(r.streams[i], buf, buf, dtype.Float32, comm.Sum, tag(n)); err != nil {
			return err
		}
		if err := r.sync(i); err != nil {
			return err
		}
		if err := same(dtype.Float32, host(buf), fill(dtype.Float32, n, func(int) int64 { return sum })); err != nil {
			return err
		}
	}
	return r.allReduce(i, 9, 1)
}

// Without this a mistaken call would reach the other ranks or panic.
func testArguments(s *suite, t *testing.T) {
	s.with(t, 2, Config{}, func(r *rig) {
		r.must("arguments", func(i int) error {
			c, st := r.comms[i], r.streams[i]
			a, b := r.buffer(i, make([]byte, 8)), r.buffer(i, make([]byte, 12))
			odd := b.Slice(0, 7)
			for k, err := range []error{
				c.AllReduce(st, a, b, dtype.Float32, comm.Sum, tag(0)),
				c.AllReduce(st, odd, odd, dtype.Float32, comm.Sum, tag(0)),
				c.AllReduce(st, a, a, dtype.Invalid, comm.Sum, tag(0)),
				c.AllReduce(st, a, a, dtype.Float32, comm.Op(99), tag(0)),
				c.AllReduce(st, nil, a, dtype.Float32, comm.Sum, tag(0)),
				c.ReduceScatter(st, a, b, dtype.Float32, comm.Sum, tag(0)),
				c.AllGather(st, b, a, dtype.Float32, tag(0)),
				c.Broadcast(st, a, dtype.Float32, 2, tag(0)),
				c.Broadcast(st, a, dtype.Float32, -1, tag(0)),
				c.Send(st, a, dtype.Float32, i, tag(0)),
				c.Recv(st, a, dtype.Float32, 2, tag(0)),
			} {
				if err == nil {
					return fmt.Errorf("call %d: no error", k)
				}
			}
			if err := c.Err(); err != nil {
				return fmt.Errorf("a refused call broke the group: %w", err)
			}
			return r.allReduce(i, 10, 0)
		})
	})
}

// Without this a rank that leaves in mid-operation would hang the others.
func testCloseInOperation(s *suite, t *testing.T) {
	for _, size := range []int{2, 3, 4} {
		for _, gone := range []int{0, size - 1} {
			for _, n := range []int{5, 2_000_000} {
				s.with(t, size, Config{}, func(r *rig) {
					r.must("before", func(i int) error { return r.allReduce(i, 3, 0) })
					r.each(func(i int) error {
						if i != gone {
							return r.allReduce(i, n, 1)
						}
						buf := r.buffer(i, make([]byte, 4*n))
						if n > 5 { // begin, then leave
							if err := r.comms[i].AllReduce(r.streams[i], buf, buf, dtype.Float32, comm.Sum, tag(1)); err != nil {
								return err
							}
							time.Sleep(200 * time.Microsecond)
						} else { // the others have begun
							time.Sleep(10 * time.Millisecond)
						}
						return r.comms[i].Close()
					})
					if n > 5 {
						// It may have been done in time, and then nobody is wrong.
						return
					}
					if e := r.agree(comm.ErrClosed, gone); e.Culprit != gone {
						t.Errorf("%v: want culprit %d", e, gone)
					}
				})
			}
		}
	}
}

// Without this the end of a healthy run would look like a failure to the ranks
// that are a little slower.
func testCloseInOrder(s *suite, t *testing.T) {
	for _, size := range []int{2, 3, 4} {
		for first := range size {
			s.with(t, size, Config{}, func(r *rig) {
				r.must("run and close", func(i int) error {
					for k := range 3 {
						if err := r.allReduce(i, 50_000, k); err != nil {
							return err
						}
					}
					buf := r.buffer(i, make([]byte, 400_000))
					if err := r.comms[i].Broadcast(r.streams[i], buf, dtype.Float32, first, tag(9)); err != nil {
						return err
					}
					if err := r.sync(i); err != nil {
						return err
					}
					if i != first {
						time.Sleep(time.Duration(10+5*i) * time.Millisecond)
					}
					if err := r.comms[i].Err(); err != nil {
						return err
					}
					return r.comms[i].Close()
				})
			})
		}
	}
}

// Without this a deferred Close after an explicit one would fail or hang.
func testCloseTwice(s *suite, t *testing.T) {
	s.with(t, 2, Config{}, func(r *rig) {
		r.must("close", func(i int) error {
			if err := r.allReduce(i, 10, 0); err != nil {
				return err
			}
			for range 3 {
				if err := r.comms[i].Close(); err != nil {
					return err
				}
			}
			if err := r.allReduce(i, 10, 0); err == nil {
				return fmt.Errorf("an operation after Close was accepted")
			}
			return nil
		})
	})
}
