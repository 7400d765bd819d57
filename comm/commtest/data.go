package commtest

import (
	"bytes"
	"context"
	"encoding/binary"
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

func tag(bucket int) comm.Tag { return comm.Tag{Name: "test", Bucket: bucket} }

// variants calls f for every size, length, type and place.
func (s *suite) variants(t *testing.T, f func(r *rig, n int, d dtype.Type, inPlace bool)) {
	for _, size := range s.sizes {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			s.with(t, size, Config{}, func(r *rig) {
				for _, n := range lengths(size) {
					for _, d := range dtype.All() {
						f(r, n, d, false)
						f(r, n, d, true)
					}
				}
			})
		})
	}
}

// pair is a source and a destination of given sizes, which are the same memory
// if place says where in the larger one the smaller lies (≥ 0).
func (r *rig) pair(i int, src []byte, dstLen, place int) (dst, from device.Buffer) {
	from = r.buffer(i, src)
	switch {
	case place < 0:
		dst = r.buffer(i, bytes.Repeat([]byte{0xa5}, dstLen))
	case dstLen <= len(src):
		dst = from.Slice(place, dstLen)
	default:
		dst = r.buffer(i, bytes.Repeat([]byte{0xa5}, dstLen))
		from = dst.Slice(place, len(src))
		copy(host(from), src)
	}
	return dst, from
}

// Without this sums, the other operations, odd lengths or types could be wrong
// on some number of ranks, or out-of-place calls write to their input.
func testAllReduce(s *suite, t *testing.T) {
	s.variants(t, func(r *rig, n int, d dtype.Type, inPlace bool) {
		size := len(r.comms)
		for _, op := range allOps {
			want := fill(d, n, func(j int) int64 { return expected(op, d, size, j) })
			r.must(fmt.Sprintf("%v of %d %v, in place %v", op, n, d, inPlace), func(i int) error {
				in := fill(d, n, func(j int) int64 { return value(op, d, i, size, j) })
				dst, src := r.pair(i, in, len(in), placeOf(inPlace, 0))
				if err := r.comms[i].AllReduce(r.streams[i], dst, src, d, op, tag(n)); err != nil {
					return err
				}
				if err := r.sync(i); err != nil {
					return err
				}
				if !inPlace && !bytes.Equal(host(src), in) {
					return fmt.Errorf("the input was changed")
				}
				return same(d, host(dst), want)
			})
		}
	})
}

func placeOf(inPlace bool, at int) int {
	if inPlace {
		return at
	}
	return -1
}

// Without this a rank could get another rank's block, or a wrong sum.
func testReduceScatter(s *suite, t *testing.T) {
	s.variants(t, func(r *rig, n int, d dtype.Type, inPlace bool) {
		size := len(r.comms)
		for _, op := range allOps {
			want := fill(d, n*size, func(j int) int64 { return expected(op, d, size, j) })
			r.must(fmt.Sprintf("%v of %d %v, in place %v", op, n, d, inPlace), func(i int) error {
				in := fill(d, n*size, func(j int) int64 { return value(op, d, i, size, j) })
				dst, src := r.pair(i, in, n*d.Size(), placeOf(inPlace, i*n*d.Size()))
				if err := r.comms[i].ReduceScatter(r.streams[i], dst, src, d, op, tag(-1)); err != nil {
					return err
				}
				if err := r.sync(i); err != nil {
					return err
				}
				if !inPlace && !bytes.Equal(host(src), in) {
					return fmt.Errorf("the input was changed")
				}
				return same(d, host(dst), want[i*n*d.Size():(i+1)*n*d.Size()])
			})
		}
	})
}

// Without this blocks could end up in another order.
func testAllGather(s *suite, t *testing.T) {
	s.variants(t, func(r *rig, n int, d dtype.Type, inPlace bool) {
		size := len(r.comms)
		var want []byte
		for k := range size {
			want = append(want, fill(d, n, func(j int) int64 { return value(comm.Sum, d, k, size, j) })...)
		}
		r.must(fmt.Sprintf("%d %v, in place %v", n, d, inPlace), func(i int) error {
			in := fill(d, n, func(j int) int64 { return value(comm.Sum, d, i, size, j) })
			dst, src := r.pair(i, in, len(in)*size, placeOf(inPlace, i*len(in)))
			if err := r.comms[i].AllGather(r.streams[i], dst, src, d, tag(0)); err != nil {
				return err
			}
			if err := r.sync(i); err != nil {
				return err
			}
			return same(d, host(dst), want)
		})
	})
}

// Without this a broadcast could come from the wrong rank or stop on its way.
func testBroadcast(s *suite, t *testing.T) {
	s.variants(t, func(r *rig, n int, d dtype.Type, _ bool) {
		size := len(r.comms)
		for root := range size {
			want := fill(d, n, func(j int) int64 { return value(comm.Sum, d, root, size, j) })
			r.must(fmt.Sprintf("%d %v from %d", n, d, root), func(i int) error {
				buf := r.buffer(i, fill(d, n, func(j int) int64 { return value(comm.Sum, d, i, size, j) }))
				if err := r.comms[i].Broadcast(r.streams[i], buf, d, root, tag(-1)); err != nil {
					return err
				}
				if err := r.sync(i); err != nil {
					return err
				}
				return same(d, host(buf), want)
			})
		}
	})
}

// Without this messages could be mixed up between pairs, directions or in order.
func testSendRecv(s *suite, t *testing.T) {
	s.variants(t, func(r *rig, n int, d dtype.Type, again bool) {
		size := len(r.comms)
		if size == 1 {
			return
		}
		r.must(fmt.Sprintf("%d %v", n, d), func(i int) error {
			left, right := (i+size-1)%size, (i+1)%size
			out := r.buffer(i, fill(d, n, func(j int) int64 { return value(comm.Sum, d, i, size, j) }))
			in := r.buffer(i, make([]byte, n*d.Size()))
			send := func() error { return r.comms[i].Send(r.streams[i], out, d, right, tag(-1)) }
			recv := func() error { return r.comms[i].Recv(r.streams[i], in, d, left, tag(-1)) }
			first, second := send, recv
			if i == 0 { // Send may wait for its receiver: somebody must begin with Recv
				first, second = recv, send
			}
			if err := first(); err != nil {
				return err
			}
			if err := second(); err != nil {
				return err
			}
			if err := r.sync(i); err != nil {
				return err
			}
			return same(d, host(in), fill(d, n, func(j int) int64 { return value(comm.Sum, d, left, size, j) }))
		})
	})
}

// Without this integers could round, or a float average differ from the
// division of the sum.
func testAverage(s *suite, t *testing.T) {
	s.with(t, 2, Config{}, func(r *rig) {
		for _, c := range []struct {
			d       dtype.Type
			a, b, w int64
		}{
			{dtype.Int32, -3, -4, -3}, {dtype.Int64, 3, 4, 3}, {dtype.Int32, 1, -2, 0}, {dtype.Uint8, 100, 101, 100},
			{dtype.Float16, 3, 5, 4}, {dtype.BFloat16, -3, -5, -4},
		} {
			r.must(fmt.Sprint(c), func(i int) error {
				buf := r.buffer(i, fill(c.d, 3, func(int) int64 { return []int64{c.a, c.b}[i] }))
				if err := r.comms[i].AllReduce(r.streams[i], buf, buf, c.d, comm.Avg, tag(1)); err != nil {
					return err
				}
				if err := r.sync(i); err != nil {
					return err
				}
				return same(c.d, host(buf), fill(c.d, 3, func(int) int64 { return c.w }))
			})
		}
	})
}

// noise is n elements of a float type whose sums must be rounded.
func noise(t dtype.Type, n, seed int) []byte {
	rnd := rand.New(rand.NewPCG(uint64(seed), 7))
	le := binary.LittleEndian
	var b []byte
	for range n {
		f := rnd.NormFloat64()
		switch t {
		case dtype.Float32:
			b = le.AppendUint32(b, math.Float32bits(float32(f)))
		case dtype.Float64:
			b = le.AppendUint64(b, math.Float64bits(f))
		case dtype.Float16:
			b = le.AppendUint16(b, uint16(rnd.IntN(2)<<15|(12+rnd.IntN(5))<<10|rnd.IntN(1<<10)))
		default:
			b = le.AppendUint16(b, uint16(math.Float32bits(float32(f))>>16))
		}
	}
	return b
}

// Without this ranks could hold sums that differ in the last bit, after which
// their parameters drift apart; or a run could not be repeated.
func testIdentical(s *suite, t *testing.T) {
	for _, size := range s.sizes {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			s.with(t, size, Config{}, func(r *rig) {
				for _, d := range []dtype.Type{dtype.Float32, dtype.Float64, dtype.Float16, dtype.BFloat16} {
					for _, n := range []int{37, 100_003} {
						identical(r, d, n)
					}
				}
			})
		})
	}
}

func identical(r *rig, d dtype.Type, n int) {
	runs := [2][][]byte{make([][]byte, len(r.comms)), make([][]byte, len(r.comms))}
	for k := range runs {
		r.must(fmt.Sprint(d, n), func(i int) error {
			buf := r.buffer(i, noise(d, n, i))
			if err := r.comms[i].AllReduce(r.streams[i], buf, buf, d, comm.Avg, tag(k)); err != nil {
				return err
			}
			err := r.sync(i)
			runs[k][i] = bytes.Clone(host(buf))
			return err
		})
	}
	for i := range r.comms {
		for k := range runs {
			if err := same(d, runs[k][i], runs[0][0]); err != nil {
				r.t.Fatalf("rank %d, run %d, against rank 0: %v", i, k, err)
			}
		}
	}
	if d == dtype.Float32 {
		near(r, n, runs[0][0])
	}
}

// near compares float32 averages with float64 arithmetic.
func near(r *rig, n int, got []byte) {
	size := len(r.comms)
	sum, norm := make([]float64, n), make([]float64, n)
	for i := range size {
		b := noise(dtype.Float32, n, i)
		for j := range sum {
			v := float64(math.Float32frombits(binary.LittleEndian.Uint32(b[4*j:])))
			sum[j] += v / float64(size)
			norm[j] += math.Abs(v)
		}
	}
	for j := range sum {
		v := float64(math.Float32frombits(binary.LittleEndian.Uint32(got[4*j:])))
		if math.Abs(v-sum[j]) > 1e-7*norm[j]*float64(size) {
			r.t.Fatalf("element %d of %d is %v, want %v", j, n, v, sum[j])
		}
	}
}

// Without this a NaN on one rank could vanish in a minimum, or reach only some.
func testNaN(s *suite, t *testing.T) {
	nan := map[dtype.Type][]byte{dtype.Float32: {0, 0, 0xc0, 0x7f}, dtype.Float64: {0, 0, 0, 0, 0, 0, 0xf8, 0x7f},
		dtype.Float16: {0, 0x7e}, dtype.BFloat16: {0xc0, 0x7f}}
	s.with(t, 3, Config{}, func(r *rig) {
		for d, bits := range nan {
			for _, op := range allOps {
				for _, n := range []int{5, 20_000} {
					out := make([][]byte, 3)
					r.must(fmt.Sprint(d, op, n), func(i int) error {
						buf := r.buffer(i, fill(d, n, func(j int) int64 { return 1 }))
						if i == 1 {
							copy(host(buf)[(n-2)*d.Size():], bits)
						}
						out[i] = host(buf)
						if err := r.comms[i].AllReduce(r.streams[i], buf, buf, d, op, tag(0)); err != nil {
							return err
						}
						return r.sync(i)
					})
					for i := range out {
						if !isNaN(d, out[i][(n-2)*d.Size():]) || isNaN(d, out[i]) || isNaN(d, out[i][(n-1)*d.Size():]) {
							r.t.Fatalf("%v %v of %d: NaN is not where it was on rank %d", op, d, n, i)
						}
						if err := same(d, out[i], out[0]); err != nil {
							r.t.Fatalf("%v: rank %d against 0: %v", op, i, err)
						}
					}
				}
			}
		}
	})
}

func isNaN(d dtype.Type, b []byte) bool {
	le := binary.LittleEndian
	switch d {
	case dtype.Float32:
		return math.IsNaN(float64(math.Float32frombits(le.Uint32(b))))
	case dtype.Float64:
		return math.IsNaN(math.Float64frombits(le.Uint64(b)))
	case dtype.Float16:
		return le.Uint16(b)&0x7fff > 0x7c00
	}
	return le.Uint16(b)&0x7fff > 0x7f80
}

// Without this float16 gradients of 30000 would sum to infinity before they
// are divided.
func testHalfAverage(s *suite, t *testing.T) {
	s.with(t, 4, Config{}, func(r *rig) {
		for _, n := range []int{9, 50_000} {
			r.must(fmt.Sprint(n), func(i int) error {
				in := fill(dtype.Float16, 4*n, func(int) int64 { return 30000 })
				buf, part := r.buffer(i, in), r.buffer(i, in[:2*n])
				if err := r.comms[i].AllReduce(r.streams[i], buf, buf, dtype.Float16, comm.Avg, tag(0)); err != nil {
					return err
				}
				if err := r.comms[i].ReduceScatter(r.streams[i], part, buf, dtype.Float16, comm.Avg, tag(0)); err != nil {
					return err
				}
				if err := r.sync(i); err != nil {
					return err
				}
				if err := same(dtype.Float16, host(buf), in); err != nil {
					return err
				}
				return same(dtype.Float16, host(part), in[:2*n])
			})
		}
	})
}

// Without this a bucket that begins at an odd byte could be refused or misread.
func testMisaligned(s *suite, t *testing.T) {
	s.with(t, 3, Config{}, func(r *rig) {
		for _, d := range dtype.All() {
			for _, off := range []int{1, 3, 7} {
				for _, n := range []int{11, 30_001} {
					r.must(fmt.Sprint(d, off, n), func(i int) error {
						in := fill(d, n, func(j int) int64 { return value(comm.Sum, d, i, 3, j) })
						src := r.buffer(i, make([]byte, len(in)+16)).Slice(off, len(in))
						dst := r.buffer(i, make([]byte, len(in)+16)).Slice(off+2, len(in))
						copy(host(src), in)
						if err := r.comms[i].AllReduce(r.streams[i], dst, src, d, comm.Sum, tag(0)); err != nil {
							return err
						}
						if err := r.sync(i); err != nil {
							return err
						}
						return same(d, host(dst), fill(d, n, func(j int) int64 { return expected(comm.Sum, d, 3, j) }))
					})
				}
			}
		}
	})
}

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
				rnd := rand.New(rand.NewPCG(3, uint64(size))) // the same on all ranks
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
				last := r.buffer(i, fill(d, 100, func(j int) int64 { return int64(i) }))
				if err := c.AllReduce(st, last, last, d, comm.Sum, tag(0)); err != nil {
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
			var a, b runtime.MemStats
			runtime.ReadMemStats(&a)
			round(rounds)
			runtime.ReadMemStats(&b)
			if got := b.Mallocs - a.Mallocs; got > rounds/2 { // the test itself needs some
				t.Errorf("%d allocations in %d operations of %d elements on two ranks", got, rounds, n)
			}
		})
	}
}
