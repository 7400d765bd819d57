package engine

import (
	"reflect"
	"slices"
	"strings"

	"github.com/tandem-go/tandem/device"
)

// The stock ops of gorgonia are unexported types. They are told apart by the
// names of their types and by their fields, read with reflect; a golden test
// holds the table against the pinned version of gorgonia.

// Operators of gorgonia.linAlgBinOp, in gorgonia's order.
const (
	linMatMul = iota
	linMatVec
	linDot
	linOuter
	linBatched
)

var binaryFuncs = map[string]device.Func{
	"+": device.Add, "-": device.Sub, "⊙": device.Mul, "÷": device.Div,
	">": device.Greater, "<": device.Less, ">=": device.AtLeast, "<=": device.AtMost, "==": device.Equal, "!=": device.Differ,
}

var unaryFuncs = map[string]device.Func{
	"neg": device.Neg, "exp": device.Exp, "ln": device.Log, "sqrt": device.Sqrt, "square": device.Square,
	"cube": device.Cube, "tanh": device.Tanh, "sigmoid": device.Sigmoid, "inv": device.Inverse,
}

// fields gives read access to the fields of an unexported op.
type fields struct{ v reflect.Value }

func fieldsOf(op any) fields {
	v := reflect.ValueOf(op)
	for v.Kind() == reflect.Pointer {
		v = v.Elem()
	}
	return fields{v}
}

func (f fields) get(name string, kinds ...reflect.Kind) (reflect.Value, bool) {
	if f.v.Kind() != reflect.Struct {
		return reflect.Value{}, false
	}
	x := f.v.FieldByName(name)
	return x, x.IsValid() && slices.Contains(kinds, x.Kind())
}

func (f fields) flag(name string) (on, ok bool) {
	x, ok := f.get(name, reflect.Bool)
	return ok && x.Bool(), ok
}

func (f fields) number(name string) (int, bool) {
	x, ok := f.get(name, reflect.Int, reflect.Uint8)
	if !ok {
		return 0, false
	}
	if x.Kind() == reflect.Uint8 {
		return int(x.Uint()), true
	}
	return int(x.Int()), true
}

func (f fields) numbers(name string) ([]int, bool) {
	x, ok := f.get(name, reflect.Slice)
	if !ok || x.Type().Elem().Kind() != reflect.Int {
		return nil, false
	}
	r := make([]int, x.Len())
	for i := range r {
		r[i] = int(x.Index(i).Int())
	}
	return r, true
}

// isReshape reports a change of shape alone.
func isReshape(v *value) bool {
	return typeName(v.op) == "gorgonia.reshapeOp" && len(v.in) == 1 && v.in[0].t.Bytes() == v.t.Bytes()
}

// swapsLastTwo reports a transposition of the two last axes and no other.
func swapsLastTwo(v *value) bool {
	if typeName(v.op) != "gorgonia.transposeOp" || len(v.in) != 1 {
		return false
	}
	p, ok := fieldsOf(v.op).numbers("pattern")
	n := len(p)
	if !ok || n < 2 || n != len(v.in[0].t.Shape) {
		return false
	}
	for i := range n - 2 {
		if p[i] != i {
			return false
		}
	}
	return p[n-2] == n-1 && p[n-1] == n-2
}

// describe says what a stock op is to a device, and on which operands: where a
// matrix product reads a transposed matrix, on the matrix itself.
func describe(v *value) (op device.Op, in []*value, ok bool) {
	switch typeName(v.op) {
	case "gorgonia.linAlgBinOp":
		return describeProduct(v)
	case "gorgonia.elemBinOp":
		return describeBinary(v)
	case "gorgonia.elemUnaryOp":
		f, ok := unaryFuncs[v.op.String()]
		if !ok || len(v.in) != 1 {
			return device.Op{}, nil, false
		}
		return device.Op{Kind: device.Unary, Attr: device.Attr{Func: f}, In: []device.Tensor{v.in[0].t}, Out: []device.Tensor{v.t}}, v.in, true
	case "gorgonia.sumOp":
		return describeReduction(v, device.Add)
	case "gorgonia.maxOp":
		return describeReduction(v, device.Most)
	}
	return describeShape(v)
}

func describeBinary(v *value) (device.Op, []*value, bool) {
	name, _, _ := strings.Cut(v.op.String(), " ")
	f, ok := binaryFuncs[name]
	if !ok || len(v.in) != 2 {
		return device.Op{}, nil, false
	}
	a, b := v.in[0].t, v.in[1].t
	full := a
	switch {
	case a.Equal(b):
	case a.Shape == nil && b.Type == a.Type:
		full = b
	case b.Shape == nil && b.Type == a.Type:
	default:
		return device.Op{}, nil, false
	}
	if !full.Equal(v.t) {
		return device.Op{}, nil, false
	}
	return device.Op{Kind: device.Binary, Attr: device.Attr{Func: f}, In: []device.Tensor{a, b}, Out: []device.Tensor{v.t}}, v.in, true
}

func describeProduct(v *value) (device.Op, []*value, bool) {
	f := fieldsOf(v.op)
	operator, ok1 := f.number("āBinaryOperator")
	transA, ok2 := f.flag("transA")
	transB, ok3 := f.flag("transB")
	if !ok1 || !ok2 || !ok3 || len(v.in) != 2 {
		return device.Op{}, nil, false
	}
	in := slices.Clone(v.in)
	op := device.Op{Kind: device.MatMul, Attr: device.Attr{TransA: transA, TransB: transB}}
	switch operator {
	case linMatMul, linBatched:
		if operator == linBatched {
			op.Kind = device.BatchedMatMul
		}
		if swapsLastTwo(in[0]) {
			in[0], op.Attr.TransA = in[0].in[0], !transA
		}
		if swapsLastTwo(in[1]) {
			in[1], op.Attr.TransB = in[1].in[0], !transB
		}
		op.In = []device.Tensor{stacked(in[0].t, operator == linBatched), stacked(in[1].t, operator == linBatched)}
		op.Out = []device.Tensor{stacked(v.t, operator == linBatched)}
	case linMatVec:
		op.Attr.TransB = false
		op.In = []device.Tensor{in[0].t, reshaped(in[1].t, in[1].t.Elems(), 1)}
		op.Out = []device.Tensor{reshaped(v.t, v.t.Elems(), 1)}
	case linDot:
		op.Attr = device.Attr{}
		op.In = []device.Tensor{reshaped(in[0].t, 1, in[0].t.Elems()), reshaped(in[1].t, in[1].t.Elems(), 1)}
		op.Out = []device.Tensor{reshaped(v.t, 1, 1)}
	case linOuter:
		op.Attr = device.Attr{}
		op.In = []device.Tensor{reshaped(in[0].t, in[0].t.Elems(), 1), reshaped(in[1].t, 1, in[1].t.Elems())}
		op.Out = []device.Tensor{reshaped(v.t, in[0].t.Elems(), in[1].t.Elems())}
	default:
		return device.Op{}, nil, false
	}
	return op, in, productFits(op)
}

// stacked folds the leading axes of a stack of matrices into one.
func stacked(t device.Tensor, batched bool) device.Tensor {
	n := len(t.Shape)
	if !batched || n < 3 {
		return t
	}
	g := 1
	for _, d := range t.Shape[:n-2] {
		g *= d
	}
	return reshaped(t, g, t.Shape[n-2], t.Shape[n-1])
}

func reshaped(t device.Tensor, shape ...int) device.Tensor {
	return device.Tensor{Shape: shape, Type: t.Type}
}

// productFits checks the shapes of a matrix product, so that what gorgonia would
// report when it runs is not handed to a kernel.
func productFits(op device.Op) bool {
	a, b, c := op.In[0].Shape, op.In[1].Shape, op.Out[0].Shape
	n := 2
	if op.Kind == device.BatchedMatMul {
		n = 3
	}
	if len(a) != n || len(b) != n || len(c) != n || (n == 3 && (a[0] != b[0] || a[0] != c[0])) {
		return false
	}
	rows, inner := a[n-2], a[n-1]
	if op.Attr.TransA {
		rows, inner = inner, rows
	}
	inner2, cols := b[n-2], b[n-1]
	if op.Attr.TransB {
		inner2, cols = cols, inner2
	}
	return inner == inner2 && c[n-2] == rows && c[n-1] == cols && op.In[0].Type == op.In[1].Type
}
