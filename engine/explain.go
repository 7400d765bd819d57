package engine

import (
	"fmt"
	"strings"
)

// Explain describes the plan, one line a step: its number, the node, the kernel
// (or "do" for an op's own Do), shapes, and where the result lies. A "<" names
// parameters read for the first time, a ">" those read for the last, a "!" the
// parameter whose gradient is final.
func (p *Plan) Explain() string {
	var b strings.Builder
	fmt.Fprintf(&b, "plan: %d steps, %d inputs, %d parameters, arena %d bytes, loss after step %d, backward from step %d\n",
		len(p.steps), len(p.inputs), len(p.params), p.arena.Len(), p.forward-1, p.backward)
	for at, st := range p.steps {
		how := "do"
		switch {
		case st.copy:
			how = "copy"
		case st.v.kernel != nil:
			how = string(st.v.desc.Kind)
			if f := st.v.desc.Attr.Func; f != "" {
				how += "." + string(f)
			}
		}
		fmt.Fprintf(&b, "%4d %-28s %s", at, how, st.v.name())
		for i, w := range st.v.in {
			sep := ", "
			if i == 0 {
				sep = " of "
			}
			fmt.Fprintf(&b, "%s%v", sep, w.t)
		}
		fmt.Fprintf(&b, " → %v %s", st.v.t, p.where(st))
		p.marksOf(&b, "<", st.reads)
		p.marksOf(&b, ">", st.lastReads)
		if st.grad >= 0 {
			p.marksOf(&b, "!", []int{st.grad})
		}
		b.WriteByte('\n')
	}
	return b.String()
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
