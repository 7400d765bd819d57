package engine

import (
	"errors"
	"fmt"

	"github.com/tandem-go/tandem/device"
)

// Split is a parameter whose gradient is the sum of a dense part, which is final
// early, and of rows that a lookup adds at the end: a tied embedding. In split
// runs (Plan.SplitRuns) only the dense part is written to the gradient's place,
// and the rows go elsewhere, so that both can travel by themselves.
type Split struct {
	Param int
	// Tokens (N, int64) are the rows of the parameter that Rows (N, D) add to.
	Tokens, Rows device.Tensor
}

// split is one with its memory.
type split struct {
	Split
	lookup       *value // the gradient of the lookup
	tokens, rows device.Buffer
}

// findSplits looks for gradients that are the sum of something dense and of an
// embedding's rows, where Options.Split wants them apart. What remains of the
// gradient is the dense part.
func (p *Plan) findSplits(gr *graph) {
	if p.opts.Split == nil {
		return
	}
	readers := map[*value]int{}
	for _, v := range gr.values {
		for _, w := range v.in {
			readers[w]++
		}
	}
	for _, o := range p.outputs {
		readers[o.v]++
	}
	owners := map[*value]int{}
	for _, g := range p.grads {
		owners[g]++
	}
	for i, g := range p.grads {
		if owners[g] > 1 || readers[g] > 0 || g.kernel == nil || g.desc.Kind != device.Binary || g.desc.Attr.Func != device.Add {
			continue
		}
		dense, lookup := g.in[0], g.in[1]
		if isLookup(dense) {
			dense, lookup = lookup, dense
		}
		// The rows are added to what the dense part has left.
		if !isLookup(lookup) || isLookup(dense) || dense.kind != computed || dense.base.index > lookup.index ||
			readers[lookup] > 1 || readers[dense] > 1 || dense.t.Elems() != lookup.t.Elems() {
			continue
		}
		s := Split{Param: i, Tokens: lookup.desc.In[0], Rows: lookup.desc.In[1]}
		if p.opts.Split(s, lookup.desc.Out[0]) {
			p.grads[i] = dense
			p.splits = append(p.splits, &split{Split: s, lookup: lookup})
		}
	}
}

func isLookup(v *value) bool { return v.kernel != nil && v.desc.Kind == device.EmbeddingGradToken }

// lookups are the values that splits compute besides gradients.
func (p *Plan) lookups() []*value {
	var all []*value
	for _, s := range p.splits {
		all = append(all, s.lookup)
	}
	return all
}

// splitOf is the split whose rows v computes, if any.
func (p *Plan) splitOf(v *value) *split {
	for _, s := range p.splits {
		if s.lookup == v {
			return s
		}
	}
	return nil
}

// splitAdders compiles the lookups so that they add to the dense part.
func (p *Plan) splitAdders() error {
	for _, s := range p.splits {
		op := s.lookup.desc
		op.Attr.Accumulate = true
		k, err := p.dev.Compile(op)
		if err != nil {
			return fmt.Errorf("engine: %s: %w", s.lookup.name(), err)
		}
		s.lookup.kernel, s.lookup.desc = k, op
	}
	return nil
}

// Splits lists the parameters whose gradients come in two parts.
func (p *Plan) Splits() []Split {
	var all []Split
	for _, s := range p.splits {
		all = append(all, s.Split)
	}
	return all
}

// BindSplit makes tokens and rows the places to which split runs write the
// second part of Splits()[i].
func (p *Plan) BindSplit(i int, tokens, rows device.Buffer) error {
	if i < 0 || i >= len(p.splits) {
		return fmt.Errorf("engine: no split %d", i)
	}
	s := p.splits[i]
	if tokens.Len() != s.Tokens.Bytes() || rows.Len() != s.Rows.Bytes() {
		return errors.New("engine: the buffers of a split have other sizes than its tensors")
	}
	s.tokens, s.rows = tokens, rows
	p.resolved = false
	return nil
}

// SplitRuns sets whether the next runs leave the second parts of gradients apart
// (true) or add them, as after Compile. Apart, ready is called for such a
// parameter once the dense part is final, and Hooks.Rows once the rows are.
func (p *Plan) SplitRuns(on bool) { p.apart = on }

// whole reports whether the gradient of param is not final with its dense part.
func (p *Plan) whole(param int) bool {
	if p.apart {
		return false
	}
	for _, s := range p.splits {
		if s.Param == param {
			return true
		}
	}
	return false
}

func (p *Plan) resolveSplit(st *step) {
	st.set = []call{{kernel: st.v.kernel, args: p.args(st.v, p.gradBufs[st.split.Param])}}
	st.adds = nil
	if s := st.split; s.tokens != nil {
		st.adds = []call{{dst: s.tokens, src: p.of(st.v.in[0])}, {dst: s.rows, src: p.of(st.v.in[1])}}
	}
}

// enqueueSplit adds the rows to the gradient, or puts them apart.
func (p *Plan) enqueueSplit(s device.Stream, st *step, ready func(int) error) error {
	calls, done := st.set, ready
	if p.apart {
		if calls, done = st.adds, p.hooks.Rows; calls == nil {
			return fmt.Errorf("engine: %s: a split run without BindSplit", st.v.name())
		}
	}
	for i := range calls {
		if err := calls[i].enqueue(s); err != nil {
			return fmt.Errorf("engine: enqueueing %s: %w", st.v.name(), err)
		}
	}
	return call1(done, st.split.Param)
}
