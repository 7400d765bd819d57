package engine

import (
	"errors"
	"fmt"

	"github.com/tandem-go/tandem/device"
)

// allocate lays out the arena of the activations, and fills the constants in.
func (p *Plan) allocate(s *scheduler) error {
	p.gather(s)
	for _, it := range p.items {
		if it.last >= 0 && it.last != forever {
			p.steps[it.last].freed = append(p.steps[it.last].freed, it)
		}
	}
	var err error
	if p.arena, err = p.dev.Alloc(max(layout(p.items), align)); err != nil {
		return fmt.Errorf("engine: memory of the activations: %w", err)
	}
	constants := 0
	for _, v := range p.values {
		switch {
		case v.item != nil:
			v.place = place{region: inArena, off: v.item.off, n: v.t.Bytes()}
		case v.kind == static:
			v.place = place{region: inStatic, off: constants, n: v.t.Bytes()}
			constants += aligned(v.t.Bytes())
		case v.kind == param:
			v.place = place{region: inParam, index: v.param, n: v.t.Bytes()}
		}
	}
	if p.static, err = p.dev.Alloc(max(constants, align)); err != nil {
		return fmt.Errorf("engine: memory of the constants: %w", err)
	}
	for _, o := range p.outputs {
		if o.at = o.v.base.place; o.own != nil {
			o.at = place{region: inArena, off: o.own.off, n: o.v.t.Bytes()}
		}
		o.buf = p.buffer(o.at)
	}
	p.states = s.states
	return p.fillConstants()
}

// gather lists everything that has memory in the arena, in a fixed order.
func (p *Plan) gather(s *scheduler) {
	seen := map[*item]bool{}
	add := func(it *item) {
		if it != nil && !seen[it] {
			seen[it] = true
			p.items = append(p.items, it)
		}
	}
	for _, v := range p.values {
		add(v.item)
	}
	for _, st := range p.steps {
		add(st.scratch)
		if !st.copy && st.v.kernel != nil {
			for _, x := range st.v.desc.State {
				add(s.states[x])
			}
		}
		if st.out != nil {
			add(st.out.own)
		}
	}
}

func (p *Plan) fillConstants() error {
	for _, v := range p.values {
		if v.kind != static {
			continue
		}
		mem, ok := p.buffer(v.place).HostBytes()
		if !ok {
			return errors.New("engine: constants need memory that the host can write")
		}
		if err := copyValue(mem, v.known, v.t, v.dt); err != nil {
			return fmt.Errorf("engine: constant %s: %w", v.name(), err)
		}
	}
	return nil
}

// buffer is the memory of a place. Parameters and gradients must be bound.
func (p *Plan) buffer(at place) device.Buffer {
	switch at.region {
	case inStatic:
		return p.static.Slice(at.off, at.n)
	case inParam:
		return p.bound.bufs[at.index]
	case inGrad:
		return p.gradBufs[at.index]
	}
	return p.arena.Slice(at.off, at.n)
}

// of is the memory that holds v.
func (p *Plan) of(v *value) device.Buffer { return p.buffer(v.base.place) }
