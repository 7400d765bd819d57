package engine

import (
	"fmt"

	"github.com/tandem-go/tandem/device"
)

// call is one piece of work for a stream: a kernel, a function or a copy.
type call struct {
	kernel   device.Kernel
	args     []device.Buffer
	f        func() error
	dst, src device.Buffer
}

func (c *call) enqueue(s device.Stream) error {
	switch {
	case c.kernel != nil:
		return s.Launch(c.kernel, c.args)
	case c.f != nil:
		return s.HostFunc(c.f)
	}
	return s.Copy(c.dst, c.src)
}

// Run stages the values bound to the inputs, enqueues the whole plan on s and
// returns: the values may then be changed or bound anew. ready, if not nil, is
// called for every parameter right after the last work that writes its gradient
// was enqueued, in the order that Order gives; its error ends Run and is
// returned as it is. After an error part of the run may be enqueued: the results
// are undefined.
//
// Run blocks only while the run before the last has not begun. A run with the
// same values gives the same bits, unless the graph holds random ops.
func (p *Plan) Run(s device.Stream, ready func(param int) error) error {
	if err := p.resolve(); err != nil {
		return err
	}
	turn, err := p.stage()
	if err != nil {
		return err
	}
	if err := p.enqueueInputs(s, turn); err != nil {
		return err
	}
	for at, st := range p.steps {
		if err := p.marks(s, at); err != nil {
			return err
		}
		if err := p.enqueue(s, st, ready); err != nil {
			return err
		}
	}
	return p.marks(s, len(p.steps))
}

// marks records the events that lie before step at.
func (p *Plan) marks(s device.Stream, at int) error {
	if err := p.mark(s, at); err != nil {
		return err
	}
	if at == p.forward {
		if err := s.Record(p.forwardDone); err != nil {
			return err
		}
	}
	if at == p.backward && !p.opts.ForwardOnly {
		return s.Record(p.backwardStart)
	}
	return nil
}

func (p *Plan) enqueueInputs(s device.Stream, turn int) error {
	clear(p.wasRead)
	if p.opts.Poison {
		if err := s.HostFunc(p.poisonAll); err != nil {
			return err
		}
	}
	for _, i := range p.unread {
		if err := call1(p.hooks.LastRead, i); err != nil {
			return err
		}
	}
	st := &p.staging
	for i := range st.slots {
		if err := p.enqueueSlot(s, &st.slots[i], turn); err != nil {
			return err
		}
	}
	for _, i := range st.fresh {
		if err := p.enqueueSlot(s, &st.relet[i], turn); err != nil {
			return err
		}
	}
	if err := s.Record(st.copied[turn]); err != nil {
		return err
	}
	st.used[turn] = true
	st.turn = 1 - turn
	return nil
}

func (p *Plan) enqueueSlot(s device.Stream, sl *slot, turn int) error {
	if sl.param >= 0 {
		if err := p.read(sl.param); err != nil {
			return err
		}
	}
	return s.Copy(sl.dst, sl.src[turn])
}

func (p *Plan) enqueue(s device.Stream, st *step, ready func(param int) error) error {
	for _, i := range st.reads {
		if err := p.read(i); err != nil {
			return err
		}
	}
	if st.split != nil {
		return p.enqueueSplit(s, st, ready)
	}
	calls := st.set
	if st.grad >= 0 {
		if err := call1(p.hooks.Write, st.grad); err != nil {
			return err
		}
		if p.adds {
			calls = st.adds
		}
	}
	for i := range calls {
		if err := calls[i].enqueue(s); err != nil {
			return fmt.Errorf("engine: enqueueing %s: %w", st.v.name(), err)
		}
	}
	for _, i := range st.lastReads {
		if err := call1(p.hooks.LastRead, i); err != nil {
			return err
		}
	}
	if st.grad >= 0 && !p.whole(st.grad) {
		return call1(ready, st.grad)
	}
	return nil
}

func (p *Plan) read(i int) error {
	if p.wasRead[i] {
		return nil
	}
	p.wasRead[i] = true
	return call1(p.hooks.Read, i)
}

func call1(f func(int) error, i int) error {
	if f == nil {
		return nil
	}
	return f(i)
}

// resolve turns places into buffers, once all of them are known.
func (p *Plan) resolve() error {
	if p.resolved {
		return nil
	}
	if err := p.ownBuffers(); err != nil {
		return err
	}
	if err := p.makeSlots(); err != nil {
		return err
	}
	for _, st := range p.steps {
		p.resolveStep(st)
	}
	p.wasRead = make([]bool, len(p.params))
	p.unread = p.unread[:0]
	read := make([]bool, len(p.params))
	for _, st := range p.steps {
		for _, i := range st.reads {
			read[i] = true
		}
	}
	for i, r := range read {
		if !r {
			p.unread = append(p.unread, i)
		}
	}
	p.resolved = true
	return nil
}

func (p *Plan) resolveStep(st *step) {
	switch {
	case st.split != nil:
		p.resolveSplit(st)
	case st.copy:
		p.resolveCopy(st)
	case st.v.kernel != nil:
		p.resolveKernel(st)
	default:
		st.set = []call{{f: p.hostCall(st.v, p.of(st.v), false)}}
		if st.grad >= 0 {
			st.adds = []call{{f: p.hostCall(st.v, p.of(st.v), true)}}
		}
	}
	if p.opts.Poison && len(st.freed) > 0 {
		f := call{f: func() error { return p.poison(st.freed) }}
		st.set = append(st.set, f)
		st.adds = append(st.adds, f)
	}
}

func (p *Plan) resolveCopy(st *step) {
	src := p.of(st.v)
	if st.out != nil {
		st.set = []call{{dst: st.out.buf, src: src}}
		return
	}
	dst := p.gradBufs[st.grad]
	st.set = []call{{dst: dst, src: src}}
	st.adds = []call{p.sumCall(st, dst, src)}
}

func (p *Plan) resolveKernel(st *step) {
	out := p.of(st.v)
	args := p.args(st.v, out)
	st.set = []call{{kernel: st.v.kernel, args: args}}
	switch {
	case st.grad < 0:
	case st.add != nil:
		st.adds = []call{{kernel: st.add, args: args}}
	default:
		tmp := p.arena.Slice(st.scratch.off, out.Len())
		st.adds = []call{{kernel: st.v.kernel, args: p.args(st.v, tmp)}, p.sumCall(st, out, tmp)}
	}
}

// args are a kernel's buffers: inputs, states, output.
func (p *Plan) args(v *value, out device.Buffer) []device.Buffer {
	var r []device.Buffer
	for _, w := range v.in {
		r = append(r, p.of(w))
	}
	for _, x := range v.desc.State {
		r = append(r, p.arena.Slice(p.states[x].off, x.Bytes()))
	}
	return append(r, out)
}

// sumCall adds src to the gradient in dst.
func (p *Plan) sumCall(st *step, dst, src device.Buffer) call {
	if st.sum != nil {
		return call{kernel: st.sum, args: []device.Buffer{dst, src, dst}}
	}
	d, _ := dst.HostBytes()
	s, _ := src.HostBytes()
	t := st.v.t.Type
	return call{f: func() error { addTo(d, s, t); return nil }}
}
