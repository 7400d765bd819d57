package engine

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/device"
)

// layout is an op's type with the fields that reflect can see.
func layoutOfOp(op any) string {
	v := reflect.ValueOf(op)
	for v.Kind() == reflect.Pointer {
		v = v.Elem()
	}
	s := strings.TrimPrefix(reflect.TypeOf(op).String(), "*")
	for i := range v.NumField() {
		switch f := v.Field(i); f.Kind() {
		case reflect.Bool, reflect.Int, reflect.Uint8, reflect.Slice:
			s += fmt.Sprintf(" %s=%v", v.Type().Field(i).Name, f)
		case reflect.Pointer:
			s += fmt.Sprintf(" %s=*", v.Type().Field(i).Name)
		}
	}
	return s
}

// Without it an update of gorgonia that renames a type or a field would turn
// kernels into fallbacks or, worse, one op into another.
func TestLayoutOfStockOps(t *testing.T) {
	p := newProblem(tensor.Float32)
	m, q := p.param("m", 4, 6), p.param("q", 4, 6)
	x, y := p.param("x", 2, 4, 6), p.param("y", 2, 4, 6)
	v, w, s := p.param("v", 6), p.param("w", 6), p.param("s")
	mt := must(G.Transpose(m, 1, 0))
	repeated, _, err := G.Broadcast(p.param("row", 1, 6), m, G.NewBroadcastPattern([]byte{0}, nil))
	require.NoError(t, err)
	var into G.Value
	for _, c := range []struct {
		n                    *G.Node
		layout, kernel, name string
	}{
		{must(G.Mul(m, mt)), "gorgonia.linAlgBinOp āBinaryOperator=0 transA=false transB=false", "matmul {TransA:false TransB:true} [float32[4 6] float32[4 6]] → [float32[4 4]]", "A × B"},
		{must(G.Mul(m, v)), "gorgonia.linAlgBinOp āBinaryOperator=1 transA=false transB=false", "matmul {TransA:false TransB:false} [float32[4 6] float32[6 1]] → [float32[4 1]]", "A × b"},
		{must(G.Mul(v, w)), "gorgonia.linAlgBinOp āBinaryOperator=2 transA=false transB=false", "matmul {TransA:false TransB:false} [float32[1 6] float32[6 1]] → [float32[1 1]]", "a ⋅ b"},
		{must(G.OuterProd(v, w)), "gorgonia.linAlgBinOp āBinaryOperator=3 transA=false transB=false", "matmul {TransA:false TransB:false} [float32[6 1] float32[1 6]] → [float32[6 6]]", "a ⊗ b"},
		{must(G.BatchedMatMul(x, y, false, true)), "gorgonia.linAlgBinOp āBinaryOperator=4 transA=false transB=true", "batched-matmul {TransA:false TransB:true} [float32[2 4 6] float32[2 4 6]] → [float32[2 4 4]]", "A ××× Bᵀ"},
		{must(G.BatchedMatMul(x, must(G.Transpose(y, 0, 2, 1)))), "gorgonia.linAlgBinOp āBinaryOperator=4 transA=false transB=false", "batched-matmul {TransA:false TransB:true} [float32[2 4 6] float32[2 4 6]] → [float32[2 4 4]]", "A ××× B"},
		{must(G.Add(m, q)), "gorgonia.elemBinOp retSame=false", "binary.add [float32[4 6] float32[4 6]] → [float32[4 6]]", "+ false"},
		{must(G.Sub(m, s)), "gorgonia.elemBinOp retSame=false", "binary.sub [float32[4 6] float32[]] → [float32[4 6]]", "- false"},
		{must(G.HadamardProd(s, m)), "gorgonia.elemBinOp retSame=false", "binary.mul [float32[] float32[4 6]] → [float32[4 6]]", "⊙ false"},
		{must(G.HadamardDiv(m, q)), "gorgonia.elemBinOp retSame=false", "binary.div [float32[4 6] float32[4 6]] → [float32[4 6]]", "÷ false"},
		{must(G.Pow(m, q)), "gorgonia.elemBinOp retSame=false", "", "^ false"},
		{must(G.Gt(m, q, true)), "gorgonia.elemBinOp retSame=true", "binary.greater [float32[4 6] float32[4 6]] → [float32[4 6]]", "> true"},
		{must(G.Lt(m, q, true)), "gorgonia.elemBinOp retSame=true", "binary.less [float32[4 6] float32[4 6]] → [float32[4 6]]", "< true"},
		{must(G.Gte(m, q, true)), "gorgonia.elemBinOp retSame=true", "binary.at-least [float32[4 6] float32[4 6]] → [float32[4 6]]", ">= true"},
		{must(G.Lte(m, q, true)), "gorgonia.elemBinOp retSame=true", "binary.at-most [float32[4 6] float32[4 6]] → [float32[4 6]]", "<= true"},
		{must(G.Eq(m, q, true)), "gorgonia.elemBinOp retSame=true", "binary.equal [float32[4 6] float32[4 6]] → [float32[4 6]]", "== true"},
		{must(G.Ne(m, q, true)), "gorgonia.elemBinOp retSame=true", "binary.differ [float32[4 6] float32[4 6]] → [float32[4 6]]", "!= true"},
		{must(G.Gt(m, q, false)), "gorgonia.elemBinOp retSame=false", "", "> false"},
		{must(G.Neg(m)), unaryLayout, "unary.neg" + mToM, "neg"},
		{must(G.Exp(m)), unaryLayout, "unary.exp" + mToM, "exp"},
		{must(G.Log(m)), unaryLayout, "unary.log" + mToM, "ln"},
		{must(G.Sqrt(m)), unaryLayout, "unary.sqrt" + mToM, "sqrt"},
		{must(G.Square(m)), unaryLayout, "unary.square" + mToM, "square"},
		{must(G.Cube(m)), unaryLayout, "unary.cube" + mToM, "cube"},
		{must(G.Tanh(m)), unaryLayout, "unary.tanh" + mToM, "tanh"},
		{must(G.Sigmoid(m)), unaryLayout, "unary.sigmoid" + mToM, "sigmoid"},
		{must(G.Inverse(m)), unaryLayout, "unary.inverse" + mToM, "inv"},
		{must(G.InverseSqrt(m)), unaryLayout, "", "invSqrt"},
		{must(G.Log2(m)), unaryLayout, "", "log2"},
		{must(G.Sum(m, 0)), "gorgonia.sumOp along=[0] d=2 inputShape=[4 6]", "col-sum [float32[4 6]] → [float32[6]]", "Σ[0]"},
		{must(G.Sum(m, 1)), "gorgonia.sumOp along=[1] d=2 inputShape=[4 6]", "reduce.add axes [1] [float32[4 6]] → [float32[4]]", "Σ[1]"},
		{must(G.Sum(m)), "gorgonia.sumOp along=[0 1] d=2 inputShape=[4 6]", "reduce.add axes [0 1] [float32[4 6]] → [float32[]]", "Σ[0 1]"},
		{must(G.Sum(x, 1, 2)), "gorgonia.sumOp along=[1 2] d=3 inputShape=[2 4 6]", "reduce.add axes [1 2] [float32[2 4 6]] → [float32[2]]", "Σ[1 2]"},
		{must(G.Sum(x, 0, 2)), "gorgonia.sumOp along=[0 2] d=3 inputShape=[2 4 6]", "", "Σ[0 2]"},
		{must(G.Max(m, 1)), "gorgonia.maxOp along=[1] d=2", "reduce.most axes [1] [float32[4 6]] → [float32[4]]", "MaxAlong[1]"},
		{must(G.Reshape(m, tensor.Shape{8, 3})), "gorgonia.reshapeOp from=[4 6] to=[8 3]", "", "Reshape(8, 3)"},
		{mt, "gorgonia.transposeOp pattern=[1 0] d=2", "strided strides [1 6] + 0 [float32[4 6]] → [float32[6 4]]", "Aᵀ{1, 0}"},
		{must(G.Slice(m, nil, G.S(1, 3))), "gorgonia.sliceOp along=1 a=0 d=2", "strided strides [6 1] + 1 [float32[4 6]] → [float32[4 2]]", "T[:, 1:3:1...]"},
		{must(G.Concat(1, m, q)), "gorgonia.concatOp axis=1 d=2 children=2", "concat axes [1] [float32[4 6] float32[4 6]] → [float32[4 12]]", "Concat(axis=1)"},
		{repeated, "gorgonia.repeatOp along=0 inputShape=[1 6]", "strided strides [6 0 1] + 0 [float32[1 6]] → [float32[1 4 6]]", "Repeat0"},
		{must(G.SizeOf(1, m)), "gorgonia.sizeOp axis=1 d=2 val=6", "", "SizeOf=6"},
		{must(G.SoftMax(m, 1)), "gorgonia.softmaxOp shape=[4 6] axis=1 isLog=false", "softmax axes [1] [float32[4 6]] → [float32[4 6]]", "Softmax{1, false}()"},
		{must(G.LogSoftMax(q)), "gorgonia.softmaxOp shape=[4 6] axis=-1 isLog=true", "log-softmax axes [1] [float32[4 6]] → [float32[4 6]]", "Softmax{-1, true}()"},
		{must(G.ByIndices(m, p.ints("i", 1), 0)), "gorgonia.byIndicesOp axis=0", "gather [float32[4 6] int64[1]] → [float32[1 6]]", "ByIndicesOp{axis=0}"},
		{must(G.Dropout(m, 0.5)), "gorgonia.dropoutOp isTraining=true", "", "Dropout{training=true}()"},
		{G.UniformRandomNode(p.g, p.dt, 0, 1, 2), "gorgonia.randomOp which=0 shape=[2]", "", "0(0, 1) - (2)"},
		{G.Read(m, &into), "gorgonia.readOp into=*", "", "print"},
		{G.Set(m, q), "gorgonia.letOp", "", "="},
	} {
		require.Equal(t, c.layout, layoutOfOp(c.n.Op()), c.name)
		require.Equal(t, c.name, c.n.Op().String())
		if c.n.Type() == nil {
			continue
		}
		gr, err := collect(c.n, nil, nil)
		require.NoError(t, err)
		op, _, ok := describe(gr.loss)
		require.Equal(t, c.kernel != "", ok, c.name)
		if ok {
			got := op.String()
			if k := string(op.Kind); strings.HasSuffix(k, "matmul") {
				got = fmt.Sprintf("%s {TransA:%v TransB:%v}%s", k, op.Attr.TransA, op.Attr.TransB, strings.TrimPrefix(got, k))
			}
			require.Equal(t, c.kernel, withAxes(op, got))
		}
	}
}

// withAxes adds the attributes that say along what to an op's description.
func withAxes(op device.Op, s string) string {
	head, rest, _ := strings.Cut(s, " ")
	if op.Attr.Axes != nil {
		head += fmt.Sprintf(" axes %v", op.Attr.Axes)
	}
	if op.Attr.Strides != nil {
		head += fmt.Sprintf(" strides %v + %d", op.Attr.Strides, op.Attr.Offset)
	}
	return head + " " + rest
}

// Without it the ops that gorgonia makes only when it differentiates could go by
// another name after an update, and their kernels be lost.
func TestLayoutOfStockGradients(t *testing.T) {
	for _, c := range []struct {
		name, kernel string
		build        func(p *problem) *G.Node
	}{
		{"gorgonia.softmaxDiffOp", "softmax-grad axes [1] [float32[4 6] float32[4 6]] → [float32[4 6]]",
			func(p *problem) *G.Node { return must(G.SoftMax(p.param("m", 4, 6), 1)) }},
		{"gorgonia.softmaxDiffOp", "log-softmax-grad axes [0] [float32[4 6] float32[4 6]] → [float32[4 6]]",
			func(p *problem) *G.Node { return must(G.LogSoftMax(p.param("m", 4, 6), 0)) }},
		{"gorgonia.sliceIncrOp", "strided-grad strides [1] + 1 [float32[2]] → [float32[6]]",
			func(p *problem) *G.Node { return must(G.Slice(p.param("m", 4, 6), G.S(1, 2), G.S(1, 3))) }},
		{"gorgonia.byIndicesOpDiffOp", "embedding-grad-token [int64[2] float32[2 6]] → [float32[4 6]]",
			func(p *problem) *G.Node { return must(G.ByIndices(p.param("m", 4, 6), p.ints("i", 1, 3), 0)) }},
	} {
		p := newProblem(tensor.Float32)
		p.loss = p.sumSquares(c.build(p))
		gr, err := collectWithGrads(p)
		require.NoError(t, err)
		var got []string
		for _, v := range gr.values {
			if typeName(v.op) == c.name {
				op, _, ok := describe(v)
				require.True(t, ok, c.name)
				got = append(got, withAxes(op, op.String()))
			}
		}
		require.Contains(t, got, c.kernel)
	}
}

// collectWithGrads is the graph of a problem with its gradients.
func collectWithGrads(p *problem) (*graph, error) {
	if err := grad(p.loss, p.params); err != nil {
		return nil, err
	}
	var roots G.Nodes
	for _, n := range p.params {
		roots = append(roots, n.Deriv())
	}
	return collect(p.loss, p.params, roots)
}

const (
	unaryLayout = "gorgonia.elemUnaryOp argTensor=true numericResult=false"
	mToM        = " [float32[4 6]] → [float32[4 6]]"
)

// Without it a mean would need the host for its divisor, on every device.
func TestDivisorsAreKnownAtCompile(t *testing.T) {
	p := newProblem(tensor.Float32)
	p.loss = must(G.Mean(p.param("w", 4, 6)))
	r := compile(t, newDevice(t), p, nil)
	for _, st := range r.steps {
		require.NotEqual(t, "gorgonia.sizeOp", typeName(st.v.op))
	}
	_, grads := r.run()
	require.InDelta(t, 1.0/24, grads[0][7], 1e-8)
}

// Without it the folding of transposes could read a matrix that is transposed
// for others, too, or leave a copy behind that nothing reads.
func TestTransposesFoldIntoProducts(t *testing.T) {
	count := func(build func(p *problem)) int {
		p := newProblem(tensor.Float32)
		build(p)
		n := 0
		for _, st := range compile(t, newDevice(t), p, &Options{ForwardOnly: true}).steps {
			if typeName(st.v.op) == "gorgonia.transposeOp" {
				n++
			}
		}
		return n
	}
	require.Zero(t, count(func(p *problem) {
		p.loss = must(G.Mul(must(G.Transpose(p.param("a", 3, 4), 1, 0)), must(G.Transpose(p.param("b", 5, 3), 1, 0))))
	}))
	require.Equal(t, 1, count(func(p *problem) {
		at := must(G.Transpose(p.param("a", 3, 4), 1, 0))
		p.loss = must(G.Add(must(G.Mul(at, p.param("b", 3, 3))), at))
	}))
}
