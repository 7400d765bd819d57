package engine

import (
	"errors"
	"fmt"
	"unsafe"

	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem/device"
)

// paramBinding is where the parameters live.
type paramBinding struct {
	bufs []device.Buffer
	// vals are the nodes' values over bufs; nil while the plan has its own copies,
	// which every run renews from the nodes.
	vals []gorgonia.Value
}

// BindParams makes bufs, one a parameter and of its size, the memory in which
// the parameters live. The values of the nodes are copied in and the nodes bound
// to that memory, so that stock solvers update it in place. A node that is let
// to another value afterwards is noticed by the next Run, which copies the value
// in and binds the node again. Without BindParams a run reads the parameters
// from the nodes, as it does inputs.
//
// A ForwardOnly plan takes over what the buffers hold and copies nothing in:
// they may be those of another plan, of this graph or another.
func (p *Plan) BindParams(bufs []device.Buffer) error {
	if err := p.checkBuffers("parameter", bufs); err != nil {
		return err
	}
	if !p.host {
		return errors.New("engine: parameters can be bound only to memory that the host can address")
	}
	vals := make([]gorgonia.Value, len(bufs))
	for i, b := range bufs {
		mem, ok := b.HostBytes()
		if !ok {
			return fmt.Errorf("engine: the buffer of parameter %q is not in the host's memory", p.params[i].Name)
		}
		n := p.nodes[i]
		vals[i] = header(mem, p.params[i].Shape, n.Dtype(), p.params[i].Shape == nil)
		if p.opts.ForwardOnly {
			continue
		}
		v := n.Value()
		if v == nil {
			return fmt.Errorf("engine: parameter %q has no value", p.params[i].Name)
		}
		if err := p.copyParam(mem, i, v); err != nil {
			return err
		}
	}
	for i, n := range p.nodes {
		if err := gorgonia.UnsafeLet(n, vals[i]); err != nil {
			return fmt.Errorf("engine: binding parameter %q: %w", p.params[i].Name, err)
		}
	}
	p.bound = paramBinding{bufs: append([]device.Buffer(nil), bufs...), vals: vals}
	p.resolved = false
	return nil
}

// copyParam copies v, unless it is dst already.
func (p *Plan) copyParam(dst []byte, i int, v gorgonia.Value) error {
	t := p.params[i].tensor()
	dt := p.nodes[i].Dtype()
	src, _, strides, err := layoutOf(v, t, dt)
	switch {
	case err != nil:
	case strides == nil && same(src, dst):
		return nil
	default:
		err = copyValue(dst, v, t, dt)
	}
	if err != nil {
		return fmt.Errorf("engine: the value of parameter %q has %w", p.params[i].Name, err)
	}
	return nil
}

func same(a, b []byte) bool {
	return len(a) == len(b) && unsafe.SliceData(a) == unsafe.SliceData(b)
}

// BindGrads makes bufs, one a parameter and of its size, the places to which the
// gradients are written. Where a gradient's node belongs to one parameter alone
// (Param.OwnGrad) the node is bound to its place too, so that param.Grad() and
// the solvers find it there. Without BindGrads the plan has places of its own.
func (p *Plan) BindGrads(bufs []device.Buffer) error {
	if p.opts.ForwardOnly {
		return errors.New("engine: a ForwardOnly plan has no gradients")
	}
	if err := p.checkBuffers("gradient of parameter", bufs); err != nil {
		return err
	}
	for i, b := range bufs {
		mem, ok := b.HostBytes()
		if !ok || !p.params[i].OwnGrad {
			continue
		}
		g := p.nodes[i].Deriv()
		scalar := p.grads[i].scalar
		if err := gorgonia.UnsafeLet(g, header(mem, p.grads[i].t.Shape, g.Dtype(), scalar)); err != nil {
			return fmt.Errorf("engine: binding the gradient of parameter %q: %w", p.params[i].Name, err)
		}
	}
	p.gradBufs = append([]device.Buffer(nil), bufs...)
	p.resolved = false
	return nil
}

func (p *Plan) checkBuffers(what string, bufs []device.Buffer) error {
	if len(bufs) != len(p.params) {
		return fmt.Errorf("engine: %d buffers for %d parameters", len(bufs), len(p.params))
	}
	for i, b := range bufs {
		if b == nil || b.Len() != p.params[i].Bytes() {
			return fmt.Errorf("engine: the buffer for the %s %q must have %d bytes", what, p.params[i].Name, p.params[i].Bytes())
		}
		if mem, ok := b.HostBytes(); ok && uintptr(unsafe.Pointer(unsafe.SliceData(mem)))%uintptr(p.params[i].Type.Size()) != 0 {
			return fmt.Errorf("engine: the buffer for the %s %q is not aligned to its elements", what, p.params[i].Name)
		}
	}
	return nil
}

// ownBuffers allocates what the caller has not bound.
func (p *Plan) ownBuffers() error {
	alloc := func() ([]device.Buffer, error) {
		total := 0
		for _, q := range p.params {
			total += aligned(q.Bytes())
		}
		all, err := p.dev.Alloc(max(total, align))
		if err != nil {
			return nil, fmt.Errorf("engine: memory of parameters and gradients: %w", err)
		}
		bufs, off := make([]device.Buffer, len(p.params)), 0
		for i, q := range p.params {
			bufs[i] = all.Slice(off, q.Bytes())
			off += aligned(q.Bytes())
		}
		return bufs, nil
	}
	if p.bound.bufs == nil {
		bufs, err := alloc()
		if err != nil {
			return err
		}
		p.bound.bufs = bufs
	}
	if p.gradBufs == nil && !p.opts.ForwardOnly {
		bufs, err := alloc()
		if err != nil {
			return err
		}
		return p.BindGrads(bufs)
	}
	return nil
}
