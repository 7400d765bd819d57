package commtest

import (
	"bytes"
	"fmt"
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
