package engine

import (
	"errors"
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/device"
)

// describer is an op that says what it is to a device, as those of package nn do.
type describer interface{ DeviceOp() device.Op }

// lower decides for every value how it comes about: as a view, a kernel, a
// value known now, or through its op's own Do.
func lower(dev device.Device, gr *graph, o Options) error {
	for _, v := range gr.values {
		if v.kind != computed {
			continue
		}
		if err := lowerValue(dev, v, o); err != nil {
			return err
		}
	}
	demote(gr.values)
	return nil
}

func lowerValue(dev device.Device, v *value, o Options) error {
	done, err := evaluate(v)
	if done || err != nil {
		return err
	}
	if o.Reference {
		return nil
	}
	if isReshape(v) {
		v.base = v.in[0].base
		return nil
	}
	op, in, ok := device.Op{}, v.in, true
	if d, is := v.op.(describer); is {
		op = d.DeviceOp()
		if err := fits(v, op); err != nil {
			return err
		}
	} else if op, in, ok = describe(v); !ok {
		return nil
	}
	k, err := dev.Compile(op)
	switch {
	case err == nil:
		v.kernel, v.desc, v.in = k, op, in
	case !errors.Is(err, device.ErrUnsupported):
		return fmt.Errorf("engine: %s: %w", v.name(), err)
	}
	return nil
}

// fits compares an op's description with the node it is of.
func fits(v *value, op device.Op) error {
	if len(op.In) != len(v.in) || len(op.Out) != 1 {
		return fmt.Errorf("engine: %s describes itself as %v: %d inputs and %d outputs, but it has %d and one",
			v.name(), op, len(op.In), len(op.Out), len(v.in))
	}
	for i, t := range op.In {
		if t.Type != v.in[i].t.Type || t.Elems() != v.in[i].t.Elems() {
			return fmt.Errorf("engine: %s describes input %d as %v, but %s is %v", v.name(), i, t, v.in[i].name(), v.in[i].t)
		}
	}
	if t := op.Out[0]; t.Type != v.t.Type || t.Elems() != v.t.Elems() {
		return fmt.Errorf("engine: %s describes its output as %v, but it is %v", v.name(), t, v.t)
	}
	return nil
}

// evaluate computes what depends on shapes and constants alone, such as the
// divisor of a mean.
func evaluate(v *value) (bool, error) {
	switch typeName(v.op) {
	case "gorgonia.sizeOp":
		axis, ok := fieldsOf(v.op).number("axis")
		if !ok || len(v.in) != 1 {
			return false, nil
		}
		size := 1
		if s := v.in[0].t.Shape; s != nil {
			if axis >= len(s) {
				return false, fmt.Errorf("engine: %s: no axis %d in shape %v", v.name(), axis, s)
			}
			size = s[axis]
		}
		if v.known = scalarOf(v.dt, size); v.known == nil {
			return false, nil
		}
	case "gorgonia.elemBinOp", "gorgonia.elemUnaryOp":
		args := make([]gorgonia.Value, len(v.in))
		for i, w := range v.in {
			if w.kind != static || v.t.Shape != nil {
				return false, nil
			}
			args[i] = w.known
		}
		known, err := do(v, args)
		if err != nil {
			return false, err
		}
		v.known = known
	default:
		return false, nil
	}
	v.kind, v.in = static, nil
	return true, nil
}

func scalarOf(dt tensor.Dtype, n int) gorgonia.Value {
	switch dt {
	case tensor.Float32:
		return gorgonia.NewF32(float32(n))
	case tensor.Float64:
		return gorgonia.NewF64(float64(n))
	case tensor.Int:
		return gorgonia.NewI(n)
	}
	return nil
}

// demote takes the kernel from every op whose state another op, one without a
// kernel, would have to write or read: a Do knows of no state.
func demote(values []*value) {
	for again := true; again; {
		again = false
		bare := map[*device.State]bool{}
		for _, v := range values {
			if d, ok := v.op.(describer); ok && v.kernel == nil && v.kind == computed {
				for _, s := range d.DeviceOp().State {
					bare[s] = true
				}
			}
		}
		for _, v := range values {
			if v.kernel == nil {
				continue
			}
			for _, s := range v.desc.State {
				if bare[s] {
					v.kernel, again = nil, true
					break
				}
			}
		}
	}
}

// needed keeps what the roots still need now that operands were folded, and
// marks what the forward roots need.
func needed(gr *graph, forward, backward []*value) []*value {
	keep := map[*value]bool{}
	mark := func(roots []*value, fwd bool) {
		stack := append([]*value(nil), roots...)
		for len(stack) > 0 {
			v := stack[len(stack)-1]
			stack = stack[:len(stack)-1]
			if keep[v] {
				continue
			}
			keep[v], v.forward = true, fwd
			stack = append(stack, v.in...)
		}
	}
	mark(forward, true)
	mark(backward, false)
	var r []*value
	for _, v := range gr.values {
		if keep[v] {
			r = append(r, v)
		}
	}
	return r
}
