package engine

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Explain describes the plan, one line a step: its number, the node, the kernel
// (or "do" for an op's own Do), shapes, estimates of its floating-point
// operations and bytes (device.Cost), and where the result lies. A "<" names
// parameters read for the first time, a ">" those read for the last, a "!" the
// parameter whose gradient is final.
//
// Once TakeTimes has seen a run, a line also says how long the step took at
// best, its share of all steps, its rates and, if SetPeak was told, the share of
// the roof: what the device could have reached by its peaks, which may be
// exceeded by what finds its operands in a cache. A table by kind follows.
func (p *Plan) Explain() string {
	var b strings.Builder
	fmt.Fprintf(&b, "plan: %d steps, %d inputs, %d parameters, arena %d bytes, loss after step %d, backward from step %d\n",
		len(p.steps), len(p.inputs), len(p.params), p.arena.Len(), p.forward-1, p.backward)
	for at, st := range p.steps {
		fmt.Fprintf(&b, "%4d %-28s %s", at, st.how(), st.v.name())
		for i, w := range st.v.in {
			sep := ", "
			if i == 0 {
				sep = " of "
			}
			fmt.Fprintf(&b, "%s%v", sep, w.t)
		}
		flops, bytes := st.cost()
		fmt.Fprintf(&b, " → %v %s, %s, %s", st.v.t, p.where(st), amount(flops, "FLOP"), amount(bytes, "B"))
		if p.prof.runs > 0 {
			fmt.Fprintf(&b, ", %s", p.timing(p.prof.best[at], flops, bytes))
		}
		p.marksOf(&b, "<", st.reads)
		p.marksOf(&b, ">", st.lastReads)
		if st.grad >= 0 {
			p.marksOf(&b, "!", []int{st.grad})
		}
		b.WriteByte('\n')
	}
	if p.prof.runs > 0 {
		p.byKind(&b)
	}
	return b.String()
}

// how is what computes a step.
func (st *step) how() string {
	switch {
	case st.copy:
		return "copy"
	case st.v.kernel == nil:
		return "do"
	}
	how := string(st.v.desc.Kind)
	if f := st.v.desc.Attr.Func; f != "" {
		how += "." + string(f)
	}
	return how
}

// timing says how long something took and how close that is to the roof.
func (p *Plan) timing(d time.Duration, flops, bytes int64) string {
	var all time.Duration
	for _, t := range p.prof.best {
		all += t
	}
	ns := float64(max(d, 1))
	s := fmt.Sprintf("%.1f µs %.1f%%, %.1f GFLOP/s %.1f GB/s",
		ns/1e3, 100*ns/float64(max(all, 1)), float64(flops)/ns, float64(bytes)/ns)
	if p.prof.peak != (Peak{}) {
		s += fmt.Sprintf(" roof %.0f%%", 100*p.prof.peak.time(flops, bytes)/ns)
	}
	return s
}

// byKind adds the steps of each kind up, the longest first.
func (p *Plan) byKind(b *strings.Builder) {
	type total struct {
		how          string
		steps        int
		time         time.Duration
		flops, bytes int64
	}
	var kinds []*total
	var all total
	for at, st := range p.steps {
		how := st.how()
		i := slices.IndexFunc(kinds, func(t *total) bool { return t.how == how })
		if i < 0 {
			i, kinds = len(kinds), append(kinds, &total{how: how})
		}
		flops, bytes := st.cost()
		for _, t := range []*total{kinds[i], &all} {
			t.steps, t.time, t.flops, t.bytes = t.steps+1, t.time+p.prof.best[at], t.flops+flops, t.bytes+bytes
		}
	}
	slices.SortStableFunc(kinds, func(a, b *total) int { return cmp.Compare(b.time, a.time) })
	fmt.Fprintf(b, "shortest times of %d runs", p.prof.runs)
	if k := p.prof.peak; k != (Peak{}) {
		fmt.Fprintf(b, "; peaks %.1f GFLOP/s, %.1f GB/s", k.GFLOPS, k.GBs)
	}
	b.WriteByte('\n')
	all.how = "all"
	for _, t := range append(kinds, &all) {
		fmt.Fprintf(b, "%4d × %-28s %s, %s, %s\n", t.steps, t.how,
			amount(t.flops, "FLOP"), amount(t.bytes, "B"), p.timing(t.time, t.flops, t.bytes))
	}
}

// amount is n of a unit with three digits.
func amount(n int64, unit string) string {
	for _, u := range []struct {
		size   float64
		prefix string
	}{{1e9, "G"}, {1e6, "M"}, {1e3, "k"}} {
		if float64(n) >= u.size {
			return fmt.Sprintf("%.3g %s%s", float64(n)/u.size, u.prefix, unit)
		}
	}
	return fmt.Sprintf("%d %s", n, unit)
}

func (p *Plan) marksOf(b *strings.Builder, mark string, params []int) {
	for _, i := range params {
		fmt.Fprintf(b, " %s%s", mark, p.params[i].Name)
	}
}

func (p *Plan) where(st *step) string {
	switch {
	case st.grad >= 0:
		return "at grad"
	case st.out != nil:
		return fmt.Sprintf("at %d+%d", st.out.at.off, st.out.at.n)
	}
	return fmt.Sprintf("at %d+%d", st.v.place.off, st.v.place.n)
}
