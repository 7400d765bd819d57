package cpu

import (
	"fmt"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// compiler turns operations of one kind into programs. compile is called with
// operations that agree with the signature.
type compiler struct {
	signature
	compile func(d *Device, op device.Op) (program, error)
}

// types shortens the table below.
func types(t ...dtype.Type) []dtype.Type { return t }

const (
	f32 = dtype.Float32
	f64 = dtype.Float64
	i64 = dtype.Int64
)

// compilers holds every kind of package device.
var compilers = map[device.Kind]compiler{
	device.Copy: {signature{in: types(anyType), out: types(anyType)}, compileCopy},
	device.Fill: {signature{out: types(anyType)}, compileFill},

	device.MatMul:        {signature{in: types(f32, f32, f32), optional: 1, out: types(f32), accumulates: true}, compileMatMul},
	device.BatchedMatMul: {signature{in: types(f32, f32), out: types(f32), accumulates: true}, compileBatchedMatMul},
	device.ColSum:        {signature{in: types(f32), out: types(f32), accumulates: true}, compileColSum},

	device.Strided:     {signature{in: types(anyType), out: types(anyType)}, compileStrided},
	device.StridedGrad: {signature{in: types(anyType), out: types(anyType)}, compileStridedGrad},
	device.Concat:      {signature{in: types(anyType), variadic: true, out: types(anyType)}, compileConcat},
	device.Gather:      {signature{in: types(f32, i64), out: types(f32)}, compileGather},
	device.Reduce:      {signature{in: types(f32), out: types(f32)}, compileReduce},

	device.Softmax:        {signature{in: types(f32), out: types(f32)}, compileSoftmax},
	device.LogSoftmax:     {signature{in: types(f32), out: types(f32)}, compileSoftmax},
	device.SoftmaxGrad:    {signature{in: types(f32, f32), out: types(f32)}, compileSoftmaxGrad},
	device.LogSoftmaxGrad: {signature{in: types(f32, f32), out: types(f32)}, compileSoftmaxGrad},

	device.Binary:   {signature{in: types(f32, f32), out: types(f32)}, compileBinary},
	device.Unary:    {signature{in: types(f32), out: types(f32)}, compileUnary},
	device.GELU:     {signature{in: types(f32), out: types(f32)}, compileGELU},
	device.GELUGrad: {signature{in: types(f32, f32), out: types(f32)}, compileGELUGrad},
	device.Dropout:  {signature{in: types(f32, i64), out: types(f32)}, compileDropout},

	device.LayerNorm:          {signature{in: types(f32, f32, f32), state: types(f32, f32), out: types(f32)}, compileLayerNorm},
	device.LayerNormGradGamma: {signature{in: types(f32, f32), state: types(f32, f32, f32), out: types(f32)}, compileLayerNormGradGamma},
	device.LayerNormGradBeta:  {signature{in: types(f32, f32), state: types(f32), out: types(f32)}, compileLayerNormGradBeta},
	device.LayerNormGradInput: {signature{in: types(f32, f32, f32), state: types(f32, f32), out: types(f32)}, compileLayerNormGradInput},

	device.Attention:     {signature{in: types(f32), state: types(f32), out: types(f32)}, compileAttention},
	device.AttentionGrad: {signature{in: types(f32, f32, f32), state: types(f32), out: types(f32)}, compileAttentionGrad},

	device.Embedding:             {signature{in: types(f32, f32, i64), out: types(f32)}, compileEmbedding},
	device.EmbeddingGradToken:    {signature{in: types(i64, f32), out: types(f32), accumulates: true}, compileEmbeddingGradToken},
	device.EmbeddingGradPosition: {signature{in: types(f32), out: types(f32), accumulates: true}, compileEmbeddingGradPosition},

	device.CrossEntropy:     {signature{in: types(f32, i64), state: types(f32, f32), out: types(f32)}, compileCrossEntropy},
	device.CrossEntropyGrad: {signature{in: types(f32, i64, f32), state: types(f32, f32), out: types(f32)}, compileCrossEntropyGrad},

	device.AdamW:      {signature{in: types(f32, f32), out: types(f32, f32, f32)}, compileUpdate},
	device.SGD:        {signature{in: types(f32, f32), out: types(f32, f32)}, compileUpdate},
	device.SumSquares: {signature{in: types(f32), out: types(f64)}, compileSumSquares},
	device.ClipScale:  {signature{in: types(f64, f32), out: types(f32)}, compileClipScale},
	device.Scale:      {signature{in: types(f32, f32), out: types(f32)}, compileScale},
}

// signature is the number and the types of a kind's arguments.
type signature struct {
	in, state, out []dtype.Type
	optional       int  // how many of the last inputs may be missing
	accumulates    bool // the kind honours Attr.Accumulate
	variadic       bool // the last input may come any number of times
}

// input is the type that input i must have.
func (s signature) input(i int) dtype.Type { return s.in[min(i, len(s.in)-1)] }

// anyType stands for every valid type.
const anyType = dtype.Invalid

// check compares op with the signature. A wrong count or a shape with a
// negative size is a mistake; float64 in place of float32 is unsupported.
func (s signature) check(op device.Op) error {
	if op.Attr.Accumulate && !s.accumulates {
		return fmt.Errorf("the kind doesn't accumulate: %w", device.ErrUnsupported)
	}
	if n := len(op.In); n > len(s.in) && !s.variadic || n < len(s.in)-s.optional {
		return fmt.Errorf("%d inputs, want %d", n, len(s.in))
	}
	if len(op.State) != len(s.state) {
		return fmt.Errorf("%d states, want %d", len(op.State), len(s.state))
	}
	if len(op.Out) != len(s.out) {
		return fmt.Errorf("%d outputs, want %d", len(op.Out), len(s.out))
	}
	for i, t := range op.In {
		if err := checkType("input", i, t, s.input(i)); err != nil {
			return err
		}
	}
	for i, st := range op.State {
		if st == nil {
			return fmt.Errorf("state %d is nil", i)
		}
		if err := checkType("state", i, st.Tensor, s.state[i]); err != nil {
			return err
		}
	}
	for i, t := range op.Out {
		if err := checkType("output", i, t, s.out[i]); err != nil {
			return err
		}
	}
	return nil
}

func checkType(what string, i int, t device.Tensor, want dtype.Type) error {
	for _, d := range t.Shape {
		if d < 0 {
			return fmt.Errorf("%s %d has shape %v", what, i, t.Shape)
		}
	}
	switch {
	case !t.Type.Valid():
		return fmt.Errorf("%s %d has type %v", what, i, t.Type)
	case want != anyType && t.Type != want:
		return fmt.Errorf("%s %d is %v, the kernel wants %v: %w", what, i, t.Type, want, device.ErrUnsupported)
	}
	return nil
}
