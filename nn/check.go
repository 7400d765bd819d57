package nn

import (
	"fmt"

	"github.com/chewxy/hm"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// dtypeOf translates gorgonia's element types; what we have no use for is Invalid.
func dtypeOf(t tensor.Dtype) dtype.Type {
	switch t {
	case tensor.Float32:
		return dtype.Float32
	case tensor.Float64:
		return dtype.Float64
	case tensor.Int:
		return dtype.Int64
	}
	return dtype.Invalid
}

func elementOf(t dtype.Type) tensor.Dtype {
	switch t {
	case dtype.Float32:
		return tensor.Float32
	case dtype.Float64:
		return tensor.Float64
	}
	return tensor.Int
}

// tensorOf describes the value of a node. A scalar has no shape.
func tensorOf(n *gorgonia.Node) device.Tensor {
	var shape []int
	if n.Dims() > 0 {
		shape = n.Shape().Clone()
	}
	return device.Tensor{Shape: shape, Type: dtypeOf(n.Dtype())}
}

func typeOf(t device.Tensor) hm.Type {
	if len(t.Shape) == 0 {
		return elementOf(t.Type)
	}
	return gorgonia.TensorType{Dims: len(t.Shape), Of: elementOf(t.Type)}
}

// checker looks at the arguments of a layer and keeps the first complaint.
// After one, what it returns is harmless and the caller goes on to err.
type checker struct {
	layer string
	first *gorgonia.Node // all arguments share its graph
	float dtype.Type     // element type of the floating-point arguments, once known
	err   error
}

func (c *checker) fail(format string, a ...any) {
	if c.err == nil {
		c.err = fmt.Errorf("nn: "+c.layer+": "+format, a...)
	}
}

// must complains unless ok holds.
func (c *checker) must(ok bool, format string, a ...any) {
	if !ok {
		c.fail(format, a...)
	}
}

// node does what is common to all arguments and tells whether it can be looked at.
func (c *checker) node(role string, n *gorgonia.Node) bool {
	if c.err != nil {
		return false
	}
	if n == nil {
		c.fail("%s is nil", role)
		return false
	}
	if c.first == nil {
		c.first = n
	}
	c.must(n.Graph() != nil, "%s %q belongs to no graph; make it with gorgonia.NewTensor or another layer", role, n.Name())
	c.must(n.Graph() == c.first.Graph(), "%s %q and %q belong to different graphs", role, n.Name(), c.first.Name())
	return c.err == nil
}

// floats checks a floating-point argument with this many dimensions (any
// number if negative) and returns its description.
func (c *checker) floats(role string, n *gorgonia.Node, dims int) device.Tensor {
	none := device.Tensor{Shape: make([]int, max(dims, 0)), Type: dtype.Float32}
	if !c.node(role, n) {
		return none
	}
	t := tensorOf(n)
	c.must(t.Type.Float(), "%s %q is %v, want float32 or float64", role, n.Name(), n.Type())
	if c.float == dtype.Invalid {
		c.float = t.Type
	}
	c.must(t.Type == c.float, "%s %q is %v, but %q is %v: one type for all", role, n.Name(), t, c.first.Name(), c.float)
	c.must(dims < 0 || len(t.Shape) == dims, "%s %q has shape %v, want %d dimensions%s", role, n.Name(), n.Shape(), dims, hint(dims, len(t.Shape)))
	if c.err != nil {
		return none
	}
	return t
}

func hint(want, got int) string {
	switch {
	case want == 2 && got > 2:
		return ": flatten batch and sequence with gorgonia.Reshape to (batch·seq, features)"
	case want == 1 && got == 2:
		return ": make it a vector (gorgonia.NewVector), not a row"
	}
	return ""
}

// ints checks a vector of tensor.Int and returns its length.
func (c *checker) ints(role string, n *gorgonia.Node) int {
	if !c.node(role, n) {
		return 0
	}
	c.must(n.Dtype() == tensor.Int && n.Dims() == 1, "%s %q is %v of shape %v, want a vector of tensor.Int", role, n.Name(), n.Type(), n.Shape())
	if c.err != nil {
		return 0
	}
	return n.Shape()[0]
}
