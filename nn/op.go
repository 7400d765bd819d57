package nn

import (
	"fmt"
	"hash"
	"hash/fnv"

	"github.com/chewxy/hm"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/device"
)

// op is every operation of this package: a description for devices, a
// reference to compute with, and a rule to differentiate by.
type op struct {
	desc device.Op
	eps  float64 // of a layer norm; Attr.Eps is only its float32 form
	ref  reference
	id   string // distinguishes operations within a graph, see apply
	// diff says which inputs grad yields a gradient for; nil means none.
	diff []bool
	grad func(in gorgonia.Nodes, out, dy *gorgonia.Node) (gorgonia.Nodes, error)
}

var (
	_ gorgonia.SDOp            = (*op)(nil)
	_ gorgonia.UsePreallocDoer = (*op)(nil)
)

// maxMerges bounds the search for an id whose hash is free. One try fails with
// a probability of about (nodes of the graph)/2³².
const maxMerges = 16

// apply adds o to the graph of its inputs.
//
// gorgonia merges nodes whose 32-bit hashes agree without comparing what they
// compute. The id, drawn from the size of the graph, keeps the hashes apart
// and is the same in every process that builds the same graph; should another
// node have the hash all the same, the next id is tried.
func apply(o *op, in ...*gorgonia.Node) (*gorgonia.Node, error) {
	o.desc.In = make([]device.Tensor, len(in))
	for i, n := range in {
		o.desc.In[i] = tensorOf(n)
	}
	nodes := len(in[0].Graph().AllNodes())
	for try := range maxMerges {
		o.id = fmt.Sprintf("%d.%d", nodes, try)
		n, err := gorgonia.ApplyOp(o, in...)
		if err != nil {
			return nil, fmt.Errorf("nn: %v: %w", o.desc, err)
		}
		if n.Op() == gorgonia.Op(o) {
			return n, nil
		}
	}
	return nil, fmt.Errorf("nn: %v: gorgonia took it for another node %d times", o.desc, maxMerges)
}

// DeviceOp describes the operation to a device. Operations that share
// statistics, such as a layer norm and its gradient, hold the same *State.
// The caller must not change what it points at.
func (o *op) DeviceOp() device.Op { return o.desc }

// Arity is the number of inputs.
func (o *op) Arity() int { return len(o.desc.In) }

// Type is the type of this very operation: its inputs' types are known.
func (o *op) Type() hm.Type {
	var ts []hm.Type
	for _, t := range o.desc.In {
		ts = append(ts, typeOf(t))
	}
	return hm.NewFnType(append(ts, typeOf(o.desc.Out[0]))...)
}

// InferShape returns the shape that was decided when the layer was made.
func (o *op) InferShape(...gorgonia.DimSizer) (tensor.Shape, error) {
	return tensor.Shape(o.desc.Out[0].Shape).Clone(), nil
}

// ReturnsPtr is true: the output is fresh memory that a machine may reuse.
func (o *op) ReturnsPtr() bool { return true }

// CallsExtern is false: the reference is plain Go.
func (o *op) CallsExtern() bool { return false }

// OverwritesInput is -1: inputs are only read.
func (o *op) OverwritesInput() int { return -1 }

// WriteHash writes what makes the operation unique in its graph.
func (o *op) WriteHash(h hash.Hash) { fmt.Fprintf(h, "tandem/%s/%s", o.desc.Kind, o.id) }

// Hashcode is the FNV-1a hash of WriteHash.
func (o *op) Hashcode() uint32 {
	h := fnv.New32a()
	o.WriteHash(h)
	return h.Sum32()
}

func (o *op) String() string { return string(o.desc.Kind) }

// DiffWRT tells which inputs have a gradient.
func (o *op) DiffWRT(inputs int) []bool {
	if o.diff == nil {
		return make([]bool, inputs)
	}
	return o.diff
}

// SymDiff adds the gradients' nodes, those of parameters first. Inputs without
// a gradient have a nil entry.
func (o *op) SymDiff(in gorgonia.Nodes, out, dy *gorgonia.Node) (gorgonia.Nodes, error) {
	if o.grad == nil {
		return nil, fmt.Errorf("nn: %v: not differentiable", o.desc)
	}
	if got, want := tensorOf(dy), o.desc.Out[0]; !got.Equal(want) {
		return nil, fmt.Errorf("nn: %v: its gradient %q is a %v, want a %v", o.desc, dy.Name(), got, want)
	}
	return o.grad(in, out, dy)
}

// gradients collects the nodes of a SymDiff, so that the first error is the
// one returned.
type gradients struct {
	nodes gorgonia.Nodes
	err   error
}

// add makes the gradient of input i.
func (g *gradients) add(i int, o *op, in ...*gorgonia.Node) {
	if g.err == nil {
		g.nodes[i], g.err = apply(o, in...)
	}
}

func (g *gradients) done() (gorgonia.Nodes, error) {
	if g.err != nil {
		return nil, g.err
	}
	return g.nodes, nil
}

func gradientsOf(inputs int) *gradients { return &gradients{nodes: make(gorgonia.Nodes, inputs)} }
