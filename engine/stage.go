package engine

import (
	"context"
	"errors"
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/device"
)

// staging takes the values of the inputs when Run is called, so that the caller
// may change them while the run is under way. It is double: a run may be staged
// while the one before it still waits for its turn.
type staging struct {
	copied [2]device.Event // the stream has taken what was staged
	used   [2]bool
	turn   int
	slots  []slot
	relet  []slot // per parameter; filled when a bound parameter is let anew
	fresh  []int  // parameters let anew before this run
}

// slot is a node whose value is copied to the device.
type slot struct {
	node  *gorgonia.Node
	t     device.Tensor
	dt    tensor.Dtype
	param int // or -1
	dst   device.Buffer
	src   [2]device.Buffer
	mem   [2][]byte
}

func (p *Plan) makeSlots() error {
	st := &p.staging
	st.slots = st.slots[:0]
	for _, v := range p.inputs {
		st.slots = append(st.slots, slot{node: v.node, t: v.t, dt: v.dt, param: -1, dst: p.of(v)})
	}
	for i := range p.params {
		s := slot{node: p.nodes[i], t: p.params[i].tensor(),
			dt: p.nodes[i].Dtype(), param: i, dst: p.bound.bufs[i]}
		if p.bound.vals == nil {
			st.slots = append(st.slots, s)
		} else {
			st.relet = append(st.relet[:i], s)
		}
	}
	total := 0
	for i := range st.slots {
		total += aligned(st.slots[i].t.Bytes())
	}
	for k := range st.copied {
		all, err := p.dev.Alloc(max(total, align))
		if err != nil {
			return fmt.Errorf("engine: memory to stage inputs: %w", err)
		}
		off := 0
		for i := range st.slots {
			s := &st.slots[i]
			if err := s.place(k, all.Slice(off, s.t.Bytes())); err != nil {
				return err
			}
			off += aligned(s.t.Bytes())
		}
	}
	return nil
}

func (s *slot) place(k int, b device.Buffer) error {
	mem, ok := b.HostBytes()
	if !ok {
		return errors.New("engine: inputs are staged in memory that the host can write, and this device has none")
	}
	s.src[k], s.mem[k] = b, mem
	return nil
}

// stage copies the inputs, and the parameters that were let anew. It waits for
// the stream to have taken what was staged two runs ago; that is over when that
// run's work began, or its stream failed.
func (p *Plan) stage() (turn int, err error) {
	st := &p.staging
	turn = st.turn
	if st.used[turn] {
		// Only the end matters here; a failure shows in the stream that had it.
		_ = st.copied[turn].Sync(context.Background())
		st.used[turn] = false
	}
	for i := range st.slots {
		if err := st.slots[i].take(turn); err != nil {
			return 0, err
		}
	}
	st.fresh = st.fresh[:0]
	for i, old := range p.bound.vals {
		if v := p.nodes[i].Value(); v != old {
			if err := p.takeFresh(i, v, turn); err != nil {
				return 0, err
			}
		}
	}
	return turn, nil
}

func (s *slot) take(turn int) error {
	v := s.node.Value()
	if v == nil {
		return fmt.Errorf("engine: input %q has no value; bind one with gorgonia.Let", s.node.Name())
	}
	if err := shapeFits(v, s.t.Shape); err != nil {
		return fmt.Errorf("engine: the value of input %q has %w", s.node.Name(), err)
	}
	if err := copyValue(s.mem[turn], v, s.t, s.dt); err != nil {
		return fmt.Errorf("engine: the value of input %q has %w", s.node.Name(), err)
	}
	return nil
}

// shapeFits refuses a tensor of another shape, be its size the same or not.
func shapeFits(v gorgonia.Value, shape []int) error {
	x, ok := v.(*tensor.Dense)
	if !ok {
		return nil
	}
	got := x.Shape()
	if len(got) == len(shape) {
		fits := true
		for i, d := range shape {
			fits = fits && got[i] == d
		}
		if fits {
			return nil
		}
	}
	return fmt.Errorf("shape %v, not %v", append([]int(nil), got...), shape)
}

// takeFresh takes the new value of a bound parameter, unless it is only another
// header over the same memory.
func (p *Plan) takeFresh(i int, v gorgonia.Value, turn int) error {
	name := p.params[i].Name
	if v == nil {
		return fmt.Errorf("engine: parameter %q has lost its value", name)
	}
	s := &p.staging.relet[i]
	home, _ := s.dst.HostBytes()
	if src, _, strides, err := layoutOf(v, s.t, s.dt); err == nil && strides == nil && same(src, home) {
		p.bound.vals[i] = v
		return nil
	}
	if s.src[turn] == nil {
		b, err := p.dev.Alloc(s.t.Bytes())
		if err != nil {
			return fmt.Errorf("engine: memory to stage parameter %q: %w", name, err)
		}
		if err := s.place(turn, b); err != nil {
			return err
		}
	}
	if err := s.take(turn); err != nil {
		return err
	}
	val := header(home, s.t.Shape, s.dt, s.t.Shape == nil)
	if err := gorgonia.UnsafeLet(p.nodes[i], val); err != nil {
		return fmt.Errorf("engine: binding parameter %q: %w", name, err)
	}
	p.bound.vals[i] = val
	p.staging.fresh = append(p.staging.fresh, i)
	return nil
}
