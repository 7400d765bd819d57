package ddp

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// fingerprinted is a communicator that compares, before each collective, what
// all ranks are about to call, for backends that would hang or add up unlike
// things where ranks disagree. It waits for the stream, so nothing overlaps.
type fingerprinted struct {
	comm.Communicator
	ctx       func() context.Context // bounds the comparison
	seq       uint64
	mine, all device.Buffer
	out, in   []byte
}

// printBytes is the length of what a rank says of a collective: six numbers and
// as much of the name as fits.
const printBytes = 64

func newFingerprinted(c comm.Communicator, ctx func() context.Context) (*fingerprinted, error) {
	f := &fingerprinted{Communicator: c, ctx: ctx}
	var err error
	if f.mine, f.out, err = hostMemory(c, printBytes); err != nil {
		return nil, err
	}
	f.all, f.in, err = hostMemory(c, printBytes*c.Size())
	return f, err
}

// compare fails, on all ranks alike, unless all of them call the same.
func (f *fingerprinted) compare(s device.Stream, c comm.Call) error {
	b := f.out[:0]
	for _, v := range []uint64{
		f.seq, uint64(c.Kind)<<16 | uint64(c.Op)<<8 | uint64(c.Type), uint64(c.Count), uint64(c.Root), uint64(c.Tag.Bucket),
	} {
		b = binary.NativeEndian.AppendUint64(b, v)
	}
	f.seq++
	clear(f.out[len(b):])
	copy(f.out[len(b):], c.Tag.Name)
	if err := f.Communicator.AllGather(s, f.all, f.mine, dtype.Uint8, comm.Tag{Name: "fingerprint", Bucket: -1}); err != nil {
		return err
	}
	if err := s.Sync(f.ctx()); err != nil {
		return err
	}
	first := f.in[:printBytes]
	for r := range f.Size() {
		if p := f.in[r*printBytes:][:printBytes]; !bytes.Equal(p, first) {
			return fmt.Errorf("%w: rank 0 calls %s, rank %d calls %s", comm.ErrMismatch, describePrint(first), r, describePrint(p))
		}
	}
	return nil
}

func describePrint(b []byte) string {
	v := func(i int) uint64 { return binary.NativeEndian.Uint64(b[8*i:]) }
	kind, op, t := comm.Kind(v(1)>>16), comm.Op(v(1)>>8), dtype.Type(v(1))
	return fmt.Sprintf("%v %v of %d %v, root %d (seq %d, %s %d)", kind, op, v(2), t, v(3), v(0),
		bytes.TrimRight(b[40:], "\x00"), int64(v(4)))
}

func (f *fingerprinted) AllReduce(s device.Stream, dst, src device.Buffer, t dtype.Type, op comm.Op, tag comm.Tag) error {
	if err := f.compare(s, comm.Call{Kind: comm.KindAllReduce, Op: op, Type: t, Count: count(src, t), Tag: tag}); err != nil {
		return err
	}
	return f.Communicator.AllReduce(s, dst, src, t, op, tag)
}

func (f *fingerprinted) ReduceScatter(s device.Stream, dst, src device.Buffer, t dtype.Type, op comm.Op, tag comm.Tag) error {
	if err := f.compare(s, comm.Call{Kind: comm.KindReduceScatter, Op: op, Type: t, Count: count(dst, t), Tag: tag}); err != nil {
		return err
	}
	return f.Communicator.ReduceScatter(s, dst, src, t, op, tag)
}

func (f *fingerprinted) AllGather(s device.Stream, dst, src device.Buffer, t dtype.Type, tag comm.Tag) error {
	if err := f.compare(s, comm.Call{Kind: comm.KindAllGather, Type: t, Count: count(src, t), Tag: tag}); err != nil {
		return err
	}
	return f.Communicator.AllGather(s, dst, src, t, tag)
}

func (f *fingerprinted) Broadcast(s device.Stream, buf device.Buffer, t dtype.Type, root int, tag comm.Tag) error {
	if err := f.compare(s, comm.Call{Kind: comm.KindBroadcast, Type: t, Count: count(buf, t), Root: root, Tag: tag}); err != nil {
		return err
	}
	return f.Communicator.Broadcast(s, buf, t, root, tag)
}

func count(b device.Buffer, t dtype.Type) int { return b.Len() / max(1, t.Size()) }
