package ddp

import (
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/ddp/hook"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// openHook prepares Options.Hook for the buckets.
func (d *DDP) openHook() (err error) {
	env := hook.Env{Device: d.dev, Comm: d.meter}
	for k, b := range d.layout.Buckets {
		h := hook.Bucket{Grad: d.grads[k], Type: b.Type}
		for _, p := range b.Params {
			q, slot := d.layout.Params[p], d.layout.Slots[p]
			h.Params = append(h.Params, hook.Param{Name: q.Name, Shape: q.Shape, Offset: slot.Offset, Bytes: slot.Bytes})
		}
		env.Buckets = append(env.Buckets, h)
	}
	d.hook, err = d.opts.Hook.Open(env)
	return err
}

// reduceByHook takes the place of a bucket's all-reduce.
func (d *DDP) reduceByHook(s device.Stream, k int, _ comm.Op) error {
	return d.hook.Reduce(s, k, hook.Step{Number: d.step, Scale: d.scale, LossScale: d.lossScale.scale})
}

// HookStates is what the hook would have to get back for a resumed run to go on
// alike: nil without one. It belongs to this rank, and may be read and written
// after Sync.
func (d *DDP) HookStates() []hook.State {
	if d.hook == nil {
		return nil
	}
	return d.hook.States()
}

// meter counts the bytes that the collectives of buckets make this rank send.
// It counts those of algorithms that send no more than they must; headers and
// acknowledgements come on top.
type meter struct {
	comm.Communicator
	bytes int
}

func (m *meter) AllReduce(s device.Stream, dst, src device.Buffer, t dtype.Type, op comm.Op, tag comm.Tag) error {
	m.bytes += 2 * src.Len() * (m.Size() - 1) / m.Size()
	return m.Communicator.AllReduce(s, dst, src, t, op, tag)
}

func (m *meter) ReduceScatter(s device.Stream, dst, src device.Buffer, t dtype.Type, op comm.Op, tag comm.Tag) error {
	m.bytes += src.Len() * (m.Size() - 1) / m.Size()
	return m.Communicator.ReduceScatter(s, dst, src, t, op, tag)
}

func (m *meter) AllGather(s device.Stream, dst, src device.Buffer, t dtype.Type, tag comm.Tag) error {
	m.bytes += src.Len() * (m.Size() - 1)
	return m.Communicator.AllGather(s, dst, src, t, tag)
}

func (m *meter) Send(s device.Stream, src device.Buffer, t dtype.Type, peer int, tag comm.Tag) error {
	m.bytes += src.Len()
	return m.Communicator.Send(s, src, t, peer, tag)
}
