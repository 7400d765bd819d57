package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"math"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// collCall is one collective with its buffers.
type collCall struct {
	b        *collBench
	name     string
	t        dtype.Type
	count    int // elements, as the call counts them
	bytes    int // of the larger buffer
	src, dst device.Buffer
}

// newCall lays a collective out. In place, as with NCCL, a rank's block of
// ReduceScatter and AllGather lies where it belongs in the larger buffer.
func (b *collBench) newCall(name string, t dtype.Type, bytes int) *collCall {
	n, size := b.g.Size(), t.Size()
	k := &collCall{b: b, name: name, t: t, count: bytes / size}
	k.bytes = k.count * size
	k.src, k.dst = b.src.Slice(0, k.bytes), b.dst.Slice(0, k.bytes)
	if name == ReduceScatter || name == AllGather {
		k.count /= n
		block := k.count * size
		k.bytes = block * n
		at := 0
		if !b.c.OutOfPlace {
			at = b.g.Rank() * block
		}
		if name == AllGather {
			k.src, k.dst = b.src.Slice(at, block), b.dst.Slice(0, k.bytes)
		} else {
			k.src, k.dst = b.src.Slice(0, k.bytes), b.dst.Slice(at, block)
		}
	}
	if name == SendRecv && !b.c.OutOfPlace { // what is received may not overwrite what is sent
		half := k.count / 2
		k.count, k.bytes = half, half*size
		k.src, k.dst = b.src.Slice(0, k.bytes), b.dst.Slice(k.bytes, k.bytes)
	}
	return k
}

// run does the call and waits for it.
func (k *collCall) run(ctx context.Context) error {
	g, s, tag := k.b.g, k.b.s, comm.Tag{Name: "bench", Bucket: -1}
	var err error
	switch k.name {
	case AllReduce:
		err = g.AllReduce(s, k.dst, k.src, k.t, k.b.c.Op, tag)
	case ReduceScatter:
		err = g.ReduceScatter(s, k.dst, k.src, k.t, k.b.c.Op, tag)
	case AllGather:
		err = g.AllGather(s, k.dst, k.src, k.t, tag)
	case Broadcast:
		err = g.Broadcast(s, k.dst, k.t, 0, tag)
	default:
		err = k.sendRecv(tag)
	}
	if err != nil {
		return err
	}
	return s.Sync(ctx)
}

// sendRecv passes a buffer around: even ranks send first, so that not all wait
// for a receiver.
func (k *collCall) sendRecv(tag comm.Tag) error {
	g, s, n := k.b.g, k.b.s, k.b.g.Size()
	if n == 1 {
		return s.Copy(k.dst, k.src)
	}
	send := func() error { return g.Send(s, k.src, k.t, (g.Rank()+1)%n, tag) }
	recv := func() error { return g.Recv(s, k.dst, k.t, (g.Rank()+n-1)%n, tag) }
	if g.Rank()%2 == 1 {
		send, recv = recv, send
	}
	if err := send(); err != nil {
		return err
	}
	return recv()
}

// clear zeroes the buffers, so that repeated sums stay finite.
func (k *collCall) clear() {
	for _, b := range []device.Buffer{k.b.src, k.b.dst} {
		if mem, ok := b.HostBytes(); ok {
			clear(mem[:min(len(mem), max(k.bytes, k.src.Len(), k.dst.Len()))])
		}
	}
}

// given is element i of rank r's contribution: small enough that every result
// is exact in every type.
func (k *collCall) given(r, i int) float64 {
	if k.b.c.Op == comm.Avg && (k.name == AllReduce || k.name == ReduceScatter) {
		return float64(i % 3) // the same everywhere, so that the average is too
	}
	return float64((r + i) % 3)
}

// want is element i of this rank's result.
func (k *collCall) want(i int) float64 {
	g := k.b.g
	switch k.name {
	case AllGather:
		return k.given(i/max(k.count, 1), i%max(k.count, 1))
	case Broadcast:
		return k.given(0, i)
	case SendRecv:
		return k.given((g.Rank()+g.Size()-1)%g.Size(), i)
	case ReduceScatter:
		i += g.Rank() * k.count
	}
	v := k.given(0, i)
	for r := 1; r < g.Size(); r++ {
		x := k.given(r, i)
		switch k.b.c.Op {
		case comm.Sum:
			v += x
		case comm.Min:
			v = min(v, x)
		case comm.Max:
			v = max(v, x)
		case comm.Prod:
			v *= x
		}
	}
	return v
}

// check does one call with known values and counts what came out wrong here.
func (k *collCall) check(ctx context.Context) (wrong int, err error) {
	src, err := comm.HostBytes(comm.KindAllReduce, k.src)
	if err != nil {
		return 0, err
	}
	dst, err := comm.HostBytes(comm.KindAllReduce, k.dst)
	if err != nil {
		return 0, err
	}
	if k.name == Broadcast { // it has one buffer
		src = dst
	}
	copyPattern(src, k.pattern(func(i int) float64 { return k.given(k.b.g.Rank(), i) }))
	if err := k.run(ctx); err != nil {
		return 0, err
	}
	block := len(dst)
	if k.name == AllGather {
		block = k.count * k.t.Size()
	}
	for at := 0; at < len(dst); at += block {
		first := at / k.t.Size()
		wrong += k.compare(dst[at:at+block], k.pattern(func(i int) float64 { return k.want(first + i) }))
	}
	return wrong, nil
}

// period is how many elements a pattern has; all values repeat after 3.
const period = 3 << 10

// pattern is the beginning of a buffer whose elements f gives.
func (k *collCall) pattern(f func(i int) float64) []byte {
	size := k.t.Size()
	p := make([]byte, period*size)
	for i := range period {
		putElem(k.t, p[i*size:], f(i%3))
	}
	return p
}

// copyPattern repeats p over dst.
func copyPattern(dst, p []byte) {
	for len(dst) > 0 {
		dst = dst[copy(dst, p):]
	}
}

// compare counts the elements of got that aren't p's; averages may be rounded.
func (k *collCall) compare(got, p []byte) (wrong int) {
	tol, size := 0.0, k.t.Size()
	if k.b.c.Op == comm.Avg {
		tol = 0.02
	}
	for len(got) > 0 {
		n := min(len(got), len(p))
		if !bytes.Equal(got[:n], p[:n]) {
			for i := 0; i < n; i += size {
				x, want := elem(k.t, got[i:]), elem(k.t, p[i:])
				if !(math.Abs(x-want) <= tol*want) {
					wrong++
				}
			}
		}
		got = got[n:]
	}
	return wrong
}

// putElem writes v, a small integer.
func putElem(t dtype.Type, b []byte, v float64) {
	le := binary.LittleEndian
	f := math.Float32bits(float32(v))
	switch t {
	case dtype.Float32:
		le.PutUint32(b, f)
	case dtype.Float64:
		le.PutUint64(b, math.Float64bits(v))
	case dtype.BFloat16:
		le.PutUint16(b, uint16(f>>16))
	case dtype.Float16:
		h := uint16(0)
		if v != 0 { // normal: the exponent's bias is 127 there and 15 here
			h = uint16((f>>23&0xff)-112)<<10 | uint16(f>>13&0x3ff)
		}
		le.PutUint16(b, h)
	case dtype.Int32:
		le.PutUint32(b, uint32(int64(v)))
	case dtype.Int64:
		le.PutUint64(b, uint64(int64(v)))
	case dtype.Uint8:
		b[0] = byte(int64(v))
	}
}

// elem is the inverse of putElem.
func elem(t dtype.Type, b []byte) float64 {
	le := binary.LittleEndian
	switch t {
	case dtype.Float32:
		return float64(math.Float32frombits(le.Uint32(b)))
	case dtype.Float64:
		return math.Float64frombits(le.Uint64(b))
	case dtype.BFloat16:
		return float64(math.Float32frombits(uint32(le.Uint16(b)) << 16))
	case dtype.Float16:
		h := uint32(le.Uint16(b))
		e, m := h>>10&31, h&0x3ff
		sign := 1 - 2*float64(h>>15)
		switch e {
		case 0:
			return sign * math.Ldexp(float64(m), -24)
		case 31:
			return sign * math.Inf(1)
		}
		return sign * math.Ldexp(float64(m|0x400), int(e)-25)
	case dtype.Int32:
		return float64(int32(le.Uint32(b)))
	case dtype.Int64:
		return float64(int64(le.Uint64(b)))
	}
	return float64(b[0])
}
