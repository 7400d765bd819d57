package nn

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

type float interface{ float32 | float64 }

// args are the operands of a reference computation, by position: f holds the
// floating-point inputs, i the integer ones. out is overwritten whole.
type args[F float] struct {
	*op
	f   [][]F
	i   [][]int
	out []F
}

// reference computes an operation without state: gradients compute anew what
// a device keeps. Sums run in float64 for both types.
type reference struct {
	f32 func(args[float32]) error
	f64 func(args[float64]) error
}

// Do computes the operation into fresh memory.
func (o *op) Do(in ...gorgonia.Value) (gorgonia.Value, error) {
	return o.UsePreallocDo(newValue(o.desc.Out[0]), in...)
}

// UsePreallocDo computes the operation into out, a contiguous value of the
// output's type and size.
func (o *op) UsePreallocDo(out gorgonia.Value, in ...gorgonia.Value) (gorgonia.Value, error) {
	var err error
	if o.desc.Out[0].Type == dtype.Float32 {
		err = run(o, o.ref.f32, out, in)
	} else {
		err = run(o, o.ref.f64, out, in)
	}
	if err != nil {
		return nil, fmt.Errorf("nn: %v: %w", o.desc, err)
	}
	return out, nil
}

func newValue(t device.Tensor) gorgonia.Value {
	switch {
	case len(t.Shape) > 0:
		return tensor.New(tensor.Of(elementOf(t.Type)), tensor.WithShape(t.Shape...))
	case t.Type == dtype.Float32:
		return gorgonia.NewF32(0)
	}
	return gorgonia.NewF64(0)
}

func run[F float](o *op, f func(args[F]) error, out gorgonia.Value, in []gorgonia.Value) error {
	if len(in) != len(o.desc.In) {
		return fmt.Errorf("%d inputs, want %d", len(in), len(o.desc.In))
	}
	a := args[F]{op: o, f: make([][]F, len(in)), i: make([][]int, len(in))}
	for i, v := range in {
		d, err := data(v)
		if err != nil {
			return fmt.Errorf("input %d: %w", i, err)
		}
		n := 0
		switch d := d.(type) {
		case []F:
			a.f[i], n = d, len(d)
		case F:
			a.f[i], n = []F{d}, 1
		case []int:
			a.i[i], n = d, len(d)
		}
		if n != o.desc.In[i].Elems() || (a.i[i] != nil) == o.desc.In[i].Type.Float() {
			return fmt.Errorf("input %d is %v%v, want %v", i, v.Dtype(), v.Shape(), o.desc.In[i])
		}
	}
	switch d := out.Data().(type) {
	case []F:
		if len(d) != o.desc.Out[0].Elems() {
			return fmt.Errorf("output has shape %v, want %v", out.Shape(), o.desc.Out[0])
		}
		a.out = d
		return f(a)
	case F:
		a.out = make([]F, 1)
		if err := f(a); err != nil {
			return err
		}
		return setScalar(out, float64(a.out[0]))
	}
	return fmt.Errorf("output is %v, want %v", out.Dtype(), o.desc.Out[0])
}

// data returns the elements of v in row-major order.
func data(v gorgonia.Value) (any, error) {
	t, ok := v.(*tensor.Dense)
	if !ok {
		return v.Data(), nil
	}
	if t.DataOrder().IsColMajor() {
		return nil, fmt.Errorf("tensor of shape %v is column major, want row major", t.Shape())
	}
	if t.RequiresIterator() {
		return t.Materialize().Data(), nil
	}
	return t.Data(), nil
}

func setScalar(v gorgonia.Value, x float64) error {
	switch v := v.(type) {
	case *gorgonia.F32:
		*v = gorgonia.F32(x)
	case *gorgonia.F64:
		*v = gorgonia.F64(x)
	case *tensor.Dense:
		if v.Dtype() == tensor.Float32 {
			v.Set(0, float32(x))
		} else {
			v.Set(0, x)
		}
	default:
		return fmt.Errorf("scalar output is a %T", v)
	}
	return nil
}
