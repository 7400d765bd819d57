package commtest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/dtype"
)

// allReduce is one operation of n float32 on rank i, waited for.
func (r *rig) allReduce(i, n, bucket int) error {
	buf := r.buffer(i, make([]byte, 4*n))
	if err := r.comms[i].AllReduce(r.streams[i], buf, buf, dtype.Float32, comm.Sum, tag(bucket)); err != nil {
		return err
	}
	return r.sync(i)
}

// agree checks that every rank but those excepted has failed, that the errors
// are OpErrors in whose chain target is, and that they name one culprit,
// sequence number and bucket. It returns one of them.
func (r *rig) agree(target error, except ...int) *comm.OpError {
	r.t.Helper()
	var first *comm.OpError
	for i := range r.comms {
		err := r.waitErr(i)
		var e *comm.OpError
		switch {
		case len(except) > 0 && except[0] == i:
			continue
		case !errors.As(err, &e):
			r.t.Fatalf("rank %d: %v is no OpError", i, err)
		case !errors.Is(err, target):
			r.t.Fatalf("rank %d: %v does not wrap %v", i, err, target)
		case e.Rank != i:
			r.t.Fatalf("rank %d: the error says it is rank %d", i, e.Rank)
		case first == nil:
			first = e
		case e.Culprit != first.Culprit || e.Seq != first.Seq || e.Tag.Bucket != first.Tag.Bucket || e.Op != first.Op:
			r.t.Fatalf("ranks disagree: %v / %v", first, e)
		}
	}
	return first
}

// odd is a call that one rank makes instead of the others'.
type odd func(r *rig, i, n int) error

func oddReduce(d dtype.Type, op comm.Op, bucket int) odd {
	return func(r *rig, i, n int) error {
		buf := r.buffer(i, make([]byte, n*d.Size()))
		return r.comms[i].AllReduce(r.streams[i], buf, buf, d, op, tag(bucket))
	}
}

func oddBroadcast(root int) odd {
	return func(r *rig, i, n int) error {
		return r.comms[i].Broadcast(r.streams[i], r.buffer(i, make([]byte, 4*n)), dtype.Float32, root, tag(3))
	}
}

func oddScatter(r *rig, i, n int) error {
	one, all := r.buffer(i, make([]byte, 4*n)), r.buffer(i, make([]byte, 4*n*len(r.comms)))
	return r.comms[i].ReduceScatter(r.streams[i], one, all, dtype.Float32, comm.Sum, tag(3))
}

func oddGather(r *rig, i, n int) error {
	one, all := r.buffer(i, make([]byte, 4*n)), r.buffer(i, make([]byte, 4*n*len(r.comms)))
	return r.comms[i].AllGather(r.streams[i], all, one, dtype.Float32, tag(3))
}

// Without this ranks that call different things would add garbage, or wait for
// ever for bytes that don't come.
func testMismatch(s *suite, t *testing.T) {
	base := oddReduce(dtype.Float32, comm.Sum, 3)
	for _, c := range []struct {
		what   string
		a, b   odd
		nA, nB int
		names  []string // what every rank's error must contain
	}{
		{"length", base, base, 10, 12, []string{"10", "12"}},
		{"long", base, base, 100_000, 100_001, []string{"100000", "100001"}},
		{"short and long", base, base, 5, 90_000, []string{"5", "90000"}},
		{"empty", base, base, 0, 7, []string{"0", "7"}},
		{"filled", base, base, 7, 0, []string{"0", "7"}},
		{"type", base, oddReduce(dtype.Int32, comm.Sum, 3), 50, 50, []string{"float32", "int32"}},
		{"size", base, oddReduce(dtype.Float64, comm.Sum, 3), 50_000, 50_000, []string{"float32", "float64"}},
		{"operation", base, oddReduce(dtype.Float32, comm.Max, 3), 50, 50, []string{"sum", "max"}},
		{"bucket", base, oddReduce(dtype.Float32, comm.Sum, 4), 50, 50, []string{"3", "4"}},
		{"collective", base, oddBroadcast(0), 50, 50, []string{"allreduce", "broadcast"}},
		{"scatter length", oddScatter, oddScatter, 10_000, 10_010, []string{"10000", "10010"}},
		{"gather length", oddGather, oddGather, 10_000, 10_010, []string{"10000", "10010"}},
		{"broadcast length", oddBroadcast(0), oddBroadcast(0), 70_000, 70_010, []string{"70000", "70010"}},
		{"root", oddBroadcast(0), oddBroadcast(1), 50, 50, []string{"from rank 0", "from rank 1"}},
		{"scatter and gather", oddScatter, oddGather, 500, 500, []string{"reduce-scatter", "all-gather"}},
	} {
		for _, size := range []int{2, 3, 4} {
			t.Run(fmt.Sprintf("%s/%d", c.what, size), func(t *testing.T) {
				s.with(t, size, Config{}, func(r *rig) {
					mismatch(r, func(i int) error {
						if i == size-1 {
							return c.b(r, i, c.nB)
						}
						return c.a(r, i, c.nA)
					}, c.names)
				})
			})
		}
	}
}

func mismatch(r *rig, call func(i int) error, names []string) {
	r.must("before", func(i int) error { return r.allReduce(i, 3, 0) })
	r.each(func(i int) error {
		if err := call(i); err != nil {
			return err
		}
		return r.sync(i)
	})
	if e := r.agree(comm.ErrMismatch); e.Seq != 1 {
		r.t.Errorf("seq is %d, want 1", e.Seq)
	}
	for i := range r.comms {
		for _, name := range names {
			if msg := r.comms[i].Err().Error(); !strings.Contains(msg, name) {
				r.t.Errorf("rank %d: %q does not name %s", i, msg, name)
			}
		}
	}
}

// Without this a message of another length or type would be read as if it fit.
func testMessageMismatch(s *suite, t *testing.T) {
	s.with(t, 3, Config{}, func(r *rig) {
		r.each(func(i int) error {
			switch i {
			case 0:
				if err := r.comms[0].Send(r.streams[0], r.buffer(0, make([]byte, 40)), dtype.Float32, 2, tag(-1)); err != nil {
					return err
				}
			case 2:
				if err := r.comms[2].Recv(r.streams[2], r.buffer(2, make([]byte, 44)), dtype.Float32, 0, tag(-1)); err != nil {
					return err
				}
			}
			return r.sync(i)
		})
		e := r.agree(comm.ErrMismatch)
		for _, n := range []string{"10", "11"} {
			if !strings.Contains(e.Error(), n) {
				t.Errorf("%q does not name %s", e, n)
			}
		}
	})
}

// Without this a rank that never comes would hang the others, or they would
// blame one another.
func testAbsent(s *suite, t *testing.T) {
	for _, size := range []int{2, 4} {
		for _, gone := range []int{0, size - 1, size / 2} {
			for _, n := range []int{5, 100_000} {
				t.Run(fmt.Sprintf("%d of %d, %d", gone, size, n), func(t *testing.T) {
					s.with(t, size, Config{Timeout: 300 * time.Millisecond}, func(r *rig) {
						r.must("before", func(i int) error { return r.allReduce(i, 3, 0) })
						r.each(func(i int) error {
							if i == gone {
								return nil
							}
							return r.allReduce(i, n, 5)
						})
						e := r.agree(context.DeadlineExceeded)
						if e.Culprit != gone || e.Seq != 1 || e.Tag.Bucket != 5 {
							t.Errorf("%v: want culprit %d, seq 1, bucket 5", e, gone)
						}
					})
				})
			}
		}
	}
}

var errWhim = errors.New("a whim")

// Without this a rank that gives up would leave the others waiting, and nobody
// would know why.
func testAbort(s *suite, t *testing.T) {
	for _, size := range []int{1, 2, 4} {
		for _, n := range []int{5, 100_000} {
			wait := 20 * time.Millisecond
			for !abortOne(s, t, size, n, wait) {
				if wait *= 2; wait > hangAfter/4 {
					t.Fatalf("%d ranks, %d elements: none says what it waited for", size, n)
				}
			}
		}
	}
}

// abortOne aborts on the last rank while the others wait for it. On a machine
// short of time they may not have begun when it does: then the error of the last
// rank names no operation, each of the others names its own or none, and
// abortOne is false.
func abortOne(s *suite, t *testing.T, size, n int, wait time.Duration) (named bool) {
	s.with(t, size, Config{}, func(r *rig) {
		last := size - 1
		r.each(func(i int) error {
			if i == last {
				time.Sleep(wait)
				r.comms[i].Abort(errWhim)
				return nil
			}
			return r.allReduce(i, n, 2)
		})
		var e *comm.OpError
		if !errors.As(r.waitErr(last), &e) || !errors.Is(e, errWhim) {
			t.Fatalf("%v is no OpError that wraps the cause", r.comms[last].Err())
		}
		if named = size == 1 || e.Op == comm.KindAllReduce.String(); named {
			r.agree(comm.ErrAborted)
		}
		for i := range r.comms {
			err := r.waitErr(i)
			if !errors.As(err, &e) || !errors.Is(err, comm.ErrAborted) || size > 1 && e.Culprit != last {
				t.Errorf("rank %d: %v: want culprit %d", i, err, last)
			}
			if !strings.Contains(err.Error(), errWhim.Error()) {
				t.Errorf("rank %d: %v does not give the cause", i, err)
			}
		}
	})
	return named
}

// Without this Abort between operations would be forgotten, or two ranks that
// abort at once be remembered differently.
func testAbortIdle(s *suite, t *testing.T) {
	s.with(t, 3, Config{}, func(r *rig) {
		r.must("before", func(i int) error { return r.allReduce(i, 3, 0) })
		r.each(func(i int) error {
			if i > 0 {
				r.comms[i].Abort(fmt.Errorf("rank %d: %w", i, errWhim))
			}
			return nil
		})
		for i := range r.comms {
			if err := r.waitErr(i); !errors.Is(err, comm.ErrAborted) {
				t.Errorf("rank %d: %v", i, err)
			}
		}
		if a, b := r.agree(comm.ErrAborted), r.comms[2].Err(); !strings.Contains(b.Error(), a.Err.Error()) {
			t.Errorf("causes differ: %v / %v", a, b)
		}
	})
}

// Without this a cancelled Barrier or Split would go on waiting.
func testCancel(s *suite, t *testing.T) {
	for _, call := range []func(c comm.Communicator, ctx context.Context) error{
		func(c comm.Communicator, ctx context.Context) error { return c.Barrier(ctx) },
		func(c comm.Communicator, ctx context.Context) error { _, err := c.Split(ctx, 0, 0); return err },
	} {
		s.with(t, 3, Config{}, func(r *rig) {
			errs := r.each(func(i int) error {
				if i == 1 {
					return nil // never comes
				}
				ctx, cancel := context.WithCancelCause(context.Background())
				time.AfterFunc(20*time.Millisecond, func() { cancel(errWhim) })
				return call(r.comms[i], ctx)
			})
			for _, i := range []int{0, 2} {
				if errs[i] == nil {
					t.Errorf("rank %d: no error", i)
				}
			}
			if err := r.waitErr(1); err == nil || !strings.Contains(err.Error(), errWhim.Error()) {
				t.Errorf("rank 1: %v", err)
			}
		})
	}
}

// Without this later calls after a failure could wait, or report another one;
// and an application could not start afresh.
func testFailFast(s *suite, t *testing.T) {
	s.with(t, 2, Config{}, func(r *rig) {
		r.comms[1].Abort(errWhim)
		first := []error{r.waitErr(0), r.waitErr(1)}
		r.each(func(i int) error {
			c, st, ctx := r.comms[i], r.streams[i], context.Background()
			buf := r.buffer(i, make([]byte, 8))
			_, split := c.Split(ctx, 0, 0)
			for k, err := range []error{
				c.AllReduce(st, buf, buf, dtype.Float32, comm.Sum, tag(0)),
				c.ReduceScatter(st, buf.Slice(0, 4), buf, dtype.Float32, comm.Sum, tag(0)),
				c.AllGather(st, buf, buf.Slice(0, 4), dtype.Float32, tag(0)),
				c.Broadcast(st, buf, dtype.Float32, 0, tag(0)),
				c.Send(st, buf, dtype.Float32, 1-i, tag(0)),
				c.Recv(st, buf, dtype.Float32, 1-i, tag(0)),
				c.Barrier(ctx), split, c.Err(),
			} {
				if err == nil || err.Error() != first[i].Error() {
					t.Errorf("rank %d, call %d: %v, want %v", i, k, err, first[i])
				}
			}
			return nil
		})
		s.with(t, 2, Config{}, func(q *rig) {
			q.must("new group", func(i int) error { return q.allReduce(i, 10, 0) })
		})
	})
}

// Without this a failure would leave half of the job running.
func testSplitFails(s *suite, t *testing.T) {
	for _, inChild := range []bool{true, false} {
		s.with(t, 4, Config{}, func(r *rig) {
			children := r.split(func(i int) int { return i / 2 }, func(i int) int { return i })
			if inChild {
				children[3].Abort(errWhim)
			} else {
				r.comms[3].Abort(errWhim)
			}
			r.agree(comm.ErrAborted)
			for i, c := range children {
				for start := time.Now(); c.Err() == nil; time.Sleep(time.Millisecond) {
					if time.Since(start) > hangAfter {
						t.Fatalf("the child on rank %d never heard", i)
					}
				}
				var e *comm.OpError
				if err := c.Err(); !errors.As(err, &e) || !errors.Is(err, comm.ErrAborted) {
					t.Errorf("child on rank %d: %v", i, err)
				} else if want := []int{-1, -1, 1, 1}[i]; e.Culprit != want {
					t.Errorf("child on rank %d: culprit %d, want %d: %v", i, e.Culprit, want, e)
				}
			}
		})
	}
}
