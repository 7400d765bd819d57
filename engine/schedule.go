package engine

import (
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem/device"
)

// region says which memory a place is in.
type region uint8

const (
	inArena  region = iota
	inStatic        // constants
	inParam         // where parameter index lives
	inGrad          // where the gradient of parameter index goes
)

// place is a piece of memory before the memory itself is there.
type place struct {
	region region
	index  int
	off, n int
}

// step is a piece of work of a run: one op, or a copy to a gradient or output.
type step struct {
	v    *value // what is computed or, for a copy, copied
	copy bool
	grad int     // the parameter whose gradient it makes final, or -1
	out  *output // the output that a copy is for
	// add is the kernel that adds to the gradient instead of overwriting it.
	// Without one the op's kernel writes to scratch, and sum adds that.
	add, sum device.Kernel
	scratch  *item

	reads, lastReads []int   // parameters first, and last, read here
	freed            []*item // in use here for the last time
	// set and adds are the work itself, when overwriting and when adding; of a
	// split, when adding and when apart.
	set, adds []call
	split     *split
}

// output is a node whose value is kept for BindOutputs.
type output struct {
	v    *value
	at   place
	buf  device.Buffer
	bind bool // the node itself gets the value
	into []*gorgonia.Value
	own  *item // its copy, where the value's memory isn't the plan's
	val  gorgonia.Value
	mem  []byte // val's memory
}

// scheduler puts the work in order: ops by node id, each gradient's copy right
// behind the op that makes it final.
type scheduler struct {
	p      *Plan
	states map[*device.State]*item
	owners map[*value][]int // by the memory that the gradient is in
	used   map[*value]int   // readers of a memory, views apart
}

func (p *Plan) schedule(loss *value) *scheduler {
	s := &scheduler{p: p, states: map[*device.State]*item{}, owners: map[*value][]int{}, used: map[*value]int{}}
	for i, g := range p.grads {
		s.owners[g.base] = append(s.owners[g.base], i)
	}
	for _, v := range p.values {
		if v.kind == computed && v.base == v {
			for _, w := range v.in {
				s.used[w.base]++
			}
		}
	}
	for _, o := range p.outputs {
		s.used[o.v.base]++
	}
	s.emitAll(loss)
	s.live()
	return s
}

func (s *scheduler) emitAll(loss *value) {
	p := s.p
	p.forward, p.backward = 0, -1
	for _, o := range p.outputs {
		if k := o.v.base.kind; k == input || k == param {
			o.own = &item{size: aligned(o.v.t.Bytes())}
			p.steps = append(p.steps, &step{v: o.v, copy: true, grad: -1, out: o})
		}
	}
	var late []int // gradients that are final before the backward pass begins
	for i, g := range p.grads {
		if !g.computedBase() || g.base.index <= loss.base.index {
			late = append(late, i)
		}
	}
	begin := func() {
		p.backward = len(p.steps)
		for _, i := range late {
			s.emitCopy(i)
		}
	}
	for _, v := range p.values {
		if v.kind != computed || v.base != v {
			continue
		}
		if p.backward < 0 && !v.forward && v.index > loss.base.index {
			begin()
		}
		s.emit(v, late)
		if v == loss.base {
			p.forward = len(p.steps)
		}
	}
	if p.backward < 0 {
		begin()
	}
}

// emit appends v's op and the copies of the gradients that it makes final.
func (s *scheduler) emit(v *value, late []int) {
	st := &step{v: v, grad: -1, split: s.p.splitOf(v)}
	s.p.steps = append(s.p.steps, st)
	if st.split != nil {
		v.place = place{region: inGrad, index: st.split.Param, n: v.t.Bytes()}
		return
	}
	for _, i := range s.owners[v] {
		switch {
		case slices.Contains(late, i):
		case s.direct(v, i):
			st.grad = i
			s.p.params[i].Direct = true
			s.p.order = append(s.p.order, i)
			v.place = place{region: inGrad, index: i, n: v.t.Bytes()}
		default:
			s.emitCopy(i)
		}
	}
}

// direct reports whether the gradient of parameter i can be computed where it
// goes. There it is reduced in place as soon as it is final, so nothing may read
// it later.
func (s *scheduler) direct(v *value, i int) bool {
	return len(s.owners[v]) == 1 && s.used[v] == 0 && s.p.params[i].Shape != nil
}

func (s *scheduler) emitCopy(i int) {
	g := s.p.grads[i]
	s.p.steps = append(s.p.steps, &step{v: g, copy: true, grad: i})
	s.p.order = append(s.p.order, i)
}

// live gives everything in the arena its first and last step, and finds the
// first and last reader of each parameter.
func (s *scheduler) live() {
	p := s.p
	for _, v := range p.values {
		if v.base == v && (v.kind == input || (v.kind == computed && v.place.region == inArena)) {
			v.item = &item{size: aligned(v.t.Bytes()), first: -1, last: -1}
		}
	}
	r := readers{first: make([]int, len(p.params)), last: make([]int, len(p.params))}
	for i := range r.first {
		r.first[i], r.last[i] = -1, -1
	}
	for at, st := range p.steps {
		if st.copy {
			r.note(st.v, at)
			if st.out != nil {
				st.out.own.first, st.out.own.last = at, forever
			}
			continue
		}
		for _, w := range st.v.in {
			r.note(w, at)
		}
		if st.v.item != nil {
			st.v.item.first, st.v.item.last = at, at
		}
		s.liveStates(st, at)
	}
	for i := range r.first {
		if r.last[i] >= 0 {
			first, last := p.steps[r.first[i]], p.steps[r.last[i]]
			first.reads, last.lastReads = append(first.reads, i), append(last.lastReads, i)
		}
	}
	for _, o := range p.outputs {
		if o.v.computedBase() && o.v.base.item != nil {
			o.v.base.item.last = forever
		}
	}
}

// readers are the first and the last step that read each parameter, or −1.
type readers struct{ first, last []int }

// note lets v live until step at, which reads it.
func (r readers) note(v *value, at int) {
	switch b := v.base; {
	case b.item != nil:
		b.item.last = max(b.item.last, at)
	case b.kind == param:
		if r.first[b.param] < 0 {
			r.first[b.param] = at
		}
		r.last[b.param] = at
	}
}

func (s *scheduler) liveStates(st *step, at int) {
	if st.v.kernel == nil {
		return
	}
	for _, x := range st.v.desc.State {
		it := s.states[x]
		if it == nil {
			it = &item{size: aligned(x.Bytes()), first: at}
			s.states[x] = it
		}
		it.last = at
	}
}
