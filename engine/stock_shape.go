package engine

import (
	"reflect"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/device"
)

// The stock ops that move elements, reduce along axes or normalise along one.

// describeShape is describe for these ops.
func describeShape(v *value) (device.Op, []*value, bool) {
	switch typeName(v.op) {
	case "gorgonia.transposeOp":
		return describeTranspose(v)
	case "gorgonia.sliceOp":
		return describeSlice(v)
	case "gorgonia.sliceIncrOp":
		return describeSliceGrad(v)
	case "gorgonia.repeatOp":
		return describeRepeat(v)
	case "gorgonia.concatOp":
		return describeConcat(v)
	case "gorgonia.byIndicesOp", "gorgonia.byIndicesOpDiffOp":
		return describeByIndices(v)
	case "gorgonia.softmaxOp":
		return describeSoftmax(v, device.Softmax, device.LogSoftmax, v.in)
	case "gorgonia.softmaxDiffOp":
		if len(v.in) != 3 {
			return device.Op{}, nil, false
		}
		return describeSoftmax(v, device.SoftmaxGrad, device.LogSoftmaxGrad, v.in[1:])
	}
	return device.Op{}, nil, false
}

// of is a description with v's operands and result as they are.
func of(v *value, kind device.Kind, a device.Attr, in ...*value) (device.Op, []*value, bool) {
	op := device.Op{Kind: kind, Attr: a, Out: []device.Tensor{v.t}}
	for _, w := range in {
		op.In = append(op.In, w.t)
	}
	return op, in, true
}

// stridesOf are the strides of a contiguous tensor.
func stridesOf(shape []int) []int {
	s, n := make([]int, len(shape)), 1
	for i := len(shape) - 1; i >= 0; i-- {
		s[i], n = n, n*shape[i]
	}
	return s
}

func describeTranspose(v *value) (op device.Op, in []*value, ok bool) {
	pattern, ok := fieldsOf(v.op).numbers("pattern")
	if !ok || len(v.in) != 1 {
		return op, nil, false
	}
	x := v.in[0].t
	if len(pattern) != len(x.Shape) {
		return op, nil, false
	}
	from := stridesOf(x.Shape)
	var shape, strides []int
	for _, p := range pattern {
		if p < 0 || p >= len(from) {
			return op, nil, false
		}
		shape, strides = append(shape, x.Shape[p]), append(strides, from[p])
	}
	op, in, _ = of(v, device.Strided, device.Attr{Strides: strides}, v.in[0])
	op.Out[0].Shape = shape
	return op, in, op.Out[0].Elems() == v.t.Elems()
}

// window is what a slice of x covers, as attributes of a device.Strided and the
// shape that they are for.
func window(op gorgonia.Op, x device.Tensor) (a device.Attr, shape []int, ok bool) {
	f := fieldsOf(op)
	along, ok := f.number("along")
	s, isSlice := op.(tensor.Slice)
	held, isSet := f.get("Slice", reflect.Interface)
	if !ok || !isSlice || !isSet || along < 0 || along >= len(x.Shape) {
		return a, nil, false
	}
	shape, a.Strides = slices.Clone(x.Shape), stridesOf(x.Shape)
	if held.IsNil() || s.End() <= s.Start() {
		return a, shape, true
	}
	step := max(1, s.Step())
	if s.Start() < 0 || s.End() > x.Shape[along] {
		return a, nil, false
	}
	a.Offset = s.Start() * a.Strides[along]
	shape[along] = (s.End() - s.Start() + step - 1) / step
	a.Strides[along] *= step
	return a, shape, true
}

func describeSlice(v *value) (op device.Op, in []*value, ok bool) {
	if len(v.in) != 1 {
		return op, nil, false
	}
	a, shape, ok := window(v.op, v.in[0].t)
	if !ok {
		return op, nil, false
	}
	op, in, _ = of(v, device.Strided, a, v.in[0])
	op.Out[0].Shape = shape
	return op, in, op.Out[0].Elems() == v.t.Elems()
}

// describeSliceGrad is the op that puts a slice's gradient into zeros of the
// sliced tensor's shape; it needs no more of that tensor.
func describeSliceGrad(v *value) (op device.Op, in []*value, ok bool) {
	if len(v.in) != 2 || !slices.Equal(v.in[0].t.Shape, v.t.Shape) {
		return op, nil, false
	}
	a, shape, ok := window(v.op, v.t)
	if !ok {
		return op, nil, false
	}
	op, in, _ = of(v, device.StridedGrad, a, v.in[1])
	op.In[0].Shape = shape
	return op, in, op.In[0].Elems() == v.in[1].t.Elems()
}

// describeRepeat repeats every element along an axis. A scalar becomes a vector,
// and a vector gets the axes that it lacks.
func describeRepeat(v *value) (op device.Op, in []*value, ok bool) {
	along, ok := fieldsOf(v.op).number("along")
	if !ok || len(v.in) != 2 || along < 0 {
		return op, nil, false
	}
	x := slices.Clone(v.in[0].t.Shape)
	for len(x) <= along {
		x = append(x, 1)
	}
	n := v.in[0].t.Elems()
	if n == 0 || v.t.Elems()%n != 0 {
		return op, nil, false
	}
	times := v.t.Elems() / n
	shape := slices.Insert(x, along+1, times)
	strides := slices.Insert(stridesOf(slices.Delete(slices.Clone(shape), along+1, along+2)), along+1, 0)
	op, in, _ = of(v, device.Strided, device.Attr{Strides: strides}, v.in[0])
	op.Out[0].Shape = shape
	return op, in, true
}

func describeConcat(v *value) (op device.Op, in []*value, ok bool) {
	axis, ok := fieldsOf(v.op).number("axis")
	if !ok || axis < 0 || axis >= len(v.t.Shape) || len(v.in) == 0 {
		return op, nil, false
	}
	along := 0
	for _, w := range v.in {
		s := slices.Clone(w.t.Shape)
		if len(s) != len(v.t.Shape) {
			return op, nil, false
		}
		along += s[axis]
		if s[axis] = v.t.Shape[axis]; !slices.Equal(s, v.t.Shape) {
			return op, nil, false
		}
	}
	if along != v.t.Shape[axis] {
		return op, nil, false
	}
	return of(v, device.Concat, device.Attr{Axes: []int{axis}}, v.in...)
}

// describeByIndices takes rows of a matrix, or adds gradients up in them.
func describeByIndices(v *value) (op device.Op, in []*value, ok bool) {
	axis, ok := fieldsOf(v.op).number("axis")
	if !ok || axis != 0 || len(v.in) < 2 || len(v.in[0].t.Shape) < 2 {
		return op, nil, false
	}
	x := v.in[0].t
	table := reshaped(x, x.Shape[0], x.Elems()/x.Shape[0])
	if len(v.in) == 2 {
		op, in, _ = of(v, device.Gather, device.Attr{}, v.in[0], v.in[1])
		op.In[0], op.Out[0] = table, reshaped(x, op.In[1].Elems(), table.Shape[1])
		return op, in, op.Out[0].Elems() == v.t.Elems()
	}
	op, in, _ = of(v, device.EmbeddingGradToken, device.Attr{}, v.in[2], v.in[1])
	op.Out[0] = table
	return op, in, op.In[0].Elems()*table.Shape[1] == op.In[1].Elems()
}

func describeSoftmax(v *value, kind, log device.Kind, operands []*value) (op device.Op, in []*value, ok bool) {
	axis, ok1 := fieldsOf(v.op).number("axis")
	isLog, ok2 := fieldsOf(v.op).flag("isLog")
	dims := len(v.t.Shape)
	if axis == -1 {
		axis = dims - 1
	}
	if !ok1 || !ok2 || axis < 0 || axis >= dims || len(operands) == 0 {
		return op, nil, false
	}
	for _, w := range operands {
		if !slices.Equal(w.t.Shape, v.t.Shape) {
			return op, nil, false
		}
	}
	if isLog {
		kind = log
	}
	return of(v, kind, device.Attr{Axes: []int{axis}}, operands...)
}

// describeReduction reduces along neighbouring axes, or along all.
func describeReduction(v *value, f device.Func) (op device.Op, in []*value, ok bool) {
	along, ok := fieldsOf(v.op).numbers("along")
	if !ok || len(v.in) != 1 {
		return op, nil, false
	}
	along = slices.Clone(along)
	slices.Sort(along)
	dims := len(v.in[0].t.Shape)
	for i, a := range along {
		if a < 0 || a >= dims || a != along[0]+i {
			return op, nil, false
		}
	}
	if len(along) == 0 {
		for i := range dims {
			along = append(along, i)
		}
	}
	if f == device.Add && dims == 2 && slices.Equal(along, []int{0}) {
		return of(v, device.ColSum, device.Attr{}, v.in[0])
	}
	kept := v.in[0].t
	kept.Shape = slices.Delete(slices.Clone(kept.Shape), along[0], along[len(along)-1]+1)
	op, in, _ = of(v, device.Reduce, device.Attr{Func: f, Axes: along}, v.in[0])
	return op, in, kept.Elems() == v.t.Elems() && dims > 0
}
