package commtest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/dtype"
)

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
