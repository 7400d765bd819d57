package ddp

import (
	"context"
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/engine"
)

// BufferMode is how Options.Buffers are made the same on all ranks.
type BufferMode uint8

// The modes. Both happen at New, where it is always rank 0's values that count,
// and at the start of every synchronised step.
const (
	// BroadcastBuffers gives all ranks those of the lowest rank that has data.
	BroadcastBuffers BufferMode = iota
	// AverageBuffers gives all ranks the mean over those that have data.
	AverageBuffers
)

// modelBuffer is one of Options.Buffers.
type modelBuffer struct {
	node  *gorgonia.Node
	param bucket.Param
	mem   device.Buffer // where it lives
	value gorgonia.Value
}

// prepareBuffers moves the buffers to memory that collectives reach.
func (d *DDP) prepareBuffers() error {
	for _, n := range d.opts.Buffers {
		p := bucket.Param{Name: n.Name()}
		if s := n.Shape(); !n.IsScalar() && len(s) > 0 {
			p.Shape = append([]int(nil), s...)
		}
		var err error
		if p.Type, err = engine.TypeOf(n.Dtype()); err != nil {
			return fmt.Errorf("buffer %q: %w", p.Name, err)
		}
		if d.opts.BufferMode == AverageBuffers && !p.Type.Float() {
			return fmt.Errorf("buffer %q is %v; only floating-point buffers can be averaged", p.Name, p.Type)
		}
		b := &modelBuffer{node: n, param: p}
		if b.mem, err = d.comm.Alloc(p.Bytes()); err != nil {
			return fmt.Errorf("buffer %q: cannot allocate %d bytes: %w", p.Name, p.Bytes(), err)
		}
		if b.value, err = engine.View(b.mem, p.Shape, p.Type); err != nil {
			return fmt.Errorf("buffer %q: %w", p.Name, err)
		}
		d.buffers = append(d.buffers, b)
		if err := b.takeIn(); err != nil {
			return err
		}
	}
	return nil
}

// takeIn copies a value that was bound anew and binds the node to its memory.
func (b *modelBuffer) takeIn() error {
	v := b.node.Value()
	if v == b.value {
		return nil
	}
	if err := engine.Store(b.mem, v, b.param.Shape, b.param.Type); err != nil {
		return fmt.Errorf("buffer %q: %w", b.param.Name, err)
	}
	return gorgonia.UnsafeLet(b.node, b.value)
}

// describeBuffers is what must agree between ranks about them.
func (d *DDP) describeBuffers() string {
	var all []bucket.Param
	for _, b := range d.buffers {
		all = append(all, b.param)
	}
	return fmt.Sprintf("%d %v", d.opts.BufferMode, all)
}

// broadcastBuffers gives all ranks those of rank root.
func (d *DDP) broadcastBuffers(ctx context.Context, root int) error {
	s := d.red.Comm()
	for _, b := range d.buffers {
		if err := d.comm.Broadcast(s, b.mem, b.param.Type, root, comm.Tag{Name: "model buffer", Bucket: -1}); err != nil {
			return err
		}
	}
	return s.Sync(ctx)
}

// syncBuffers makes the buffers the same on all ranks, ahead of the passes that
// read them: it waits for the step header.
func (d *DDP) syncBuffers() error {
	if len(d.buffers) == 0 {
		return nil
	}
	for _, b := range d.buffers {
		if err := b.takeIn(); err != nil {
			return err
		}
	}
	h := &d.header
	if err := h.done.Sync(d.watch); err != nil {
		return err
	}
	if err := h.check(); err != nil {
		return err
	}
	if h.active() < 0 {
		return nil
	}
	if d.opts.BufferMode == BroadcastBuffers {
		return d.broadcastBuffers(d.watch, h.active())
	}
	return d.averageBuffers()
}

func (d *DDP) averageBuffers() error {
	s, n := d.red.Comm(), 0
	for r := range d.header.ranks {
		if d.header.get(r, laneJoin) != joinDone {
			n++
		}
	}
	for _, b := range d.buffers {
		mem, _ := b.mem.HostBytes()
		if d.joined == joinDone {
			clear(mem)
		}
		if err := d.comm.AllReduce(s, b.mem, b.mem, b.param.Type, comm.Sum, comm.Tag{Name: "model buffer", Bucket: -1}); err != nil {
			return err
		}
	}
	if err := s.Sync(d.watch); err != nil {
		return err
	}
	for _, b := range d.buffers {
		mem, _ := b.mem.HostBytes()
		divide(mem, b.param.Type, n)
	}
	return nil
}

// divide divides float32 or float64 elements by n.
func divide(mem []byte, t dtype.Type, n int) {
	for i := range len(mem) / t.Size() {
		putScalar(mem, t, i, scalar(mem, t, i)/float64(n))
	}
}
