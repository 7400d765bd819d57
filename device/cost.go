package device

// Cost estimates an operation's floating-point operations and the bytes that
// its arguments make it move. Additions and multiplications count one each,
// and so does an element of a division, root, exponential or hyperbolic
// function; what an implementation recomputes doesn't count. Both are what
// utilisation is measured against, not what any one device executes.
func Cost(op Op) (flops, bytes int64) {
	for _, t := range op.In {
		bytes += int64(t.Bytes())
	}
	for _, s := range op.State {
		bytes += int64(s.Bytes())
	}
	var out int64
	for _, t := range op.Out {
		bytes += int64(t.Bytes())
		out += int64(t.Elems())
	}
	if op.Attr.Accumulate {
		bytes += int64(op.Out[0].Bytes())
	}
	switch op.Kind {
	case LayerNormGradBeta: // its inputs only order it
		bytes = int64(op.State[0].Bytes() + op.Out[0].Bytes())
	case Embedding, Gather: // of the tables only the rows that are asked for
		tables, index := len(op.In)-1, op.In[len(op.In)-1]
		bytes = int64(index.Bytes() + (tables+1)*op.Out[0].Bytes())
	}
	if f, ok := flopsPerElement[op.Kind]; ok {
		n := out
		if len(op.In) > 0 && op.Kind != Binary { // whose first operand may be a scalar
			n = int64(op.In[0].Elems())
		}
		return f * n, bytes
	}
	switch op.Kind {
	case MatMul, BatchedMatMul:
		flops = 2 * out * int64(innerSize(op))
		if op.Attr.Bias {
			flops += out
		}
	case Attention, AttentionGrad:
		// Causal: half of the T×T scores. Forward has two products (q·k, p·v),
		// the gradient four (dv, dp, dq, dk).
		n := int64(op.In[0].Elems()) / 3
		products := int64(2)
		if op.Kind == AttentionGrad {
			products = 4
		}
		flops = products * n * int64(op.Attr.Seq+1)
	}
	return flops, bytes
}

// flopsPerElement is for kinds whose work is proportional to their first input.
var flopsPerElement = map[Kind]int64{
	Copy: 0, Fill: 0, Embedding: 0, ColSum: 1, Binary: 1, Unary: 1, Scale: 1, SumSquares: 2, ClipScale: 1,
	LayerNorm: 7, LayerNormGradGamma: 5, LayerNormGradBeta: 0, LayerNormGradInput: 11,
	Strided: 0, StridedGrad: 0, Concat: 0, Gather: 0, Reduce: 1,
	Softmax: 5, LogSoftmax: 4, SoftmaxGrad: 4, LogSoftmaxGrad: 4,
	GELU: 7, GELUGrad: 14, Dropout: 1, AdamW: 13, SGD: 6, CrossEntropy: 3, CrossEntropyGrad: 4,
}

// innerSize is the dimension that a product sums over.
func innerSize(op Op) int {
	s := op.In[0].Shape
	if len(s) < 2 {
		return 0
	}
	if op.Attr.TransA {
		return s[len(s)-2]
	}
	return s[len(s)-1]
}
