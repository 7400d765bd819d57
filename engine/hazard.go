package engine

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// hazards are what gorgonia gets wrong without a word. Each is refused where the
// result would be wrong, and warned about where it may be.
var hazards = []struct {
	name string
	find func(f *forward, v *value) (problem string, refuse bool)
}{
	{"wrong derivative", func(f *forward, v *value) (string, bool) {
		if typeName(v.op) != "gorgonia.elemUnaryOp" || !f.active(v) {
			return "", false
		}
		switch v.op.String() {
		case "invSqrt":
			return "gorgonia's gradient of InverseSqrt is wrong; use Inverse of Sqrt", true
		case "log2":
			return "gorgonia's gradient of Log2 is wrong; use Log and a factor", true
		}
		return "", false
	}},
	{"indices of a vector", func(f *forward, v *value) (string, bool) {
		if typeName(v.op) != "gorgonia.byIndicesOp" || len(v.in[0].t.Shape) != 1 || !f.active(v) {
			return "", false
		}
		return "gorgonia's gradient of ByIndices is wrong for a vector; reshape it to a matrix of one column", true
	}},
	{"outer product", func(f *forward, v *value) (string, bool) {
		operator, _ := fieldsOf(v.op).number("āBinaryOperator")
		if typeName(v.op) != "gorgonia.linAlgBinOp" || operator != linOuter || !f.active(v) {
			return "", false
		}
		return "gorgonia's gradient of OuterProd is wrong; multiply matrices of one column and one row", true
	}},
	{"slice bounds of one byte", sliceHazard},
	{"merged softmax", func(f *forward, v *value) (string, bool) {
		if typeName(v.op) != "gorgonia.softmaxOp" || f.readers[v] < 2 {
			return "", false
		}
		return "gorgonia merges SoftMax and LogSoftMax of one input into one node: if both were meant, one of its readers gets the other's values", false
	}},
	{"merged dropout", func(f *forward, v *value) (string, bool) {
		if typeName(v.op) != "gorgonia.dropoutOp" || f.readers[v] < 2 {
			return "", false
		}
		return "gorgonia merges two Dropouts of one input into one node: its readers share one mask", false
	}},
	{"random op", func(f *forward, v *value) (string, bool) {
		switch typeName(v.op) {
		case "gorgonia.randomOp", "gorgonia.dropoutOp":
			return "draws from gorgonia's own source: runs are not repeatable and ranks differ; nn.Dropout is keyed by seed, step and sample", false
		}
		return "", false
	}},
	{"large constant", func(f *forward, v *value) (string, bool) {
		if typeName(v.op) != "gorgonia.constantTensor" || !strings.Contains(fmt.Sprintf("%v", v.known), "...") {
			return "", false
		}
		return "gorgonia tells constants apart by their printed form, which leaves out the middle of this one: a different constant of the same ends is the same node; use an input", false
	}},
}

// sliceHazard: bounds enter the hash modulo 256, so two slices of one length
// whose starts differ by a multiple of 256 are one node.
func sliceHazard(f *forward, v *value) (string, bool) {
	s, ok := v.op.(interface{ IsSlice() tensor.Slice })
	if !ok || typeName(v.op) != "gorgonia.sliceOp" || s.IsSlice() == nil {
		return "", false
	}
	r := s.IsSlice()
	along, ok := fieldsOf(v.op).number("along")
	if !ok || along >= len(v.in[0].t.Shape) {
		return "", false
	}
	dim := v.in[0].t.Shape[along]
	if r.Start() < 256 && r.End()+256 > dim {
		return "", false
	}
	text := fmt.Sprintf("slices [%d:%d] of a dimension of %d, and gorgonia hashes bounds modulo 256: "+
		"a slice that starts 256 elements away is the same node", r.Start(), r.End(), dim)
	if f.readers[v] > 1 {
		return text + "; it has several readers, so two slices may have become one; reshape first, or use fused ops", true
	}
	return text, false
}

// forward is what the checks know of a graph before it has gradients.
type forward struct {
	gr      *graph
	fromPar map[*value]bool // depends differentiably on a parameter
	toLoss  map[*value]bool // the loss depends on it differentiably
	readers map[*value]int  // forward ops and outputs that read it
}

func (f *forward) active(v *value) bool { return f.fromPar[v] && f.toLoss[v] }

func analyse(gr *graph, o Options) (*forward, error) {
	f := &forward{gr: gr, fromPar: map[*value]bool{}, toLoss: map[*value]bool{}, readers: map[*value]int{}}
	f.toLoss[gr.loss] = true
	diffs := make([][]bool, len(gr.values))
	for i, v := range gr.values {
		d, err := differentiable(v)
		if err != nil {
			return nil, err
		}
		diffs[i] = d
		f.fromPar[v] = v.kind == param
		for j, c := range v.in {
			f.fromPar[v] = f.fromPar[v] || (d[j] && f.fromPar[c])
		}
	}
	for i := len(gr.values) - 1; i >= 0; i-- {
		v := gr.values[i]
		for j, c := range v.in {
			if gr.loss.node.Deriv() == nil || v.node.ID() <= gr.loss.node.ID() {
				f.readers[c]++ // not a gradient, which reads what its op reads
			}
			f.toLoss[c] = f.toLoss[c] || (f.toLoss[v] && diffs[i][j])
		}
	}
	for _, n := range o.Outputs {
		f.readers[gr.byID[n.ID()]]++
	}
	for _, t := range gr.reads {
		f.readers[gr.byID[t.node.ID()]]++
	}
	if o.ForwardOnly {
		clear(f.toLoss)
	}
	return f, nil
}

// differentiable says for each operand whether v's op has a gradient for it.
func differentiable(v *value) (d []bool, err error) {
	d = make([]bool, len(v.in))
	op, ok := v.op.(gorgonia.SDOp)
	if !ok || len(v.in) == 0 {
		return d, nil
	}
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("engine: %s: DiffWRT panicked: %v", v.name(), r)
		}
	}()
	copy(d, op.DiffWRT(len(v.in)))
	return d, nil
}

// refuseUnreached names the parameters that the loss doesn't depend on.
func (f *forward) refuseUnreached() error {
	var names []string
	for _, i := range f.unreached() {
		names = append(names, fmt.Sprintf("%q", f.gr.params[i].Name()))
	}
	if names == nil {
		return nil
	}
	return fmt.Errorf("engine: the loss %s does not depend differentiably on %s: leave them out of the parameters",
		f.gr.loss.name(), strings.Join(names, ", "))
}

// report logs the hazards and returns those that no plan may have.
func (f *forward) report(log *slog.Logger) error {
	var refused []error
	for _, v := range f.gr.values {
		for _, h := range hazards {
			problem, refuse := h.find(f, v)
			switch {
			case problem == "":
			case refuse:
				refused = append(refused, fmt.Errorf("engine: %s %s", v.name(), problem))
			default:
				log.Warn("engine: hazard of gorgonia", "hazard", h.name, "node", v.name(), "problem", problem)
			}
		}
	}
	for _, n := range f.gr.sets {
		log.Warn("engine: hazard of gorgonia", "hazard", "assignment", "node", nodeName(n), "problem", "gorgonia.Set is not executed by a plan")
	}
	return errors.Join(refused...)
}

// collisions warns when the graph is so large that two different nodes may have
// become one: gorgonia compares 32-bit hashes, and not operands.
func collisions(g *gorgonia.ExprGraph, log *slog.Logger) {
	n := float64(len(g.AllNodes()))
	if p := n * n / (1 << 33); p >= 0.001 {
		log.Warn("engine: hazard of gorgonia", "hazard", "hash collisions", "nodes", len(g.AllNodes()),
			"probability", fmt.Sprintf("%.2g", p),
			"problem", "gorgonia tells nodes apart by a 32-bit hash; fused ops make fewer nodes")
	}
}
