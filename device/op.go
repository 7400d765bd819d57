package device

import (
	"fmt"
	"slices"

	"github.com/tandem-go/tandem/dtype"
)

// Kind names what an operation computes.
type Kind string

// The kinds, with their arguments in order: inputs | states | outputs.
// Matrices are row major and contiguous. N rows, D features, B sequences of
// T positions with N = B·T, H heads, V classes. Indices are int64. A state is
// memory that one operation leaves for a later one (see State).
const (
	// Copy: x | | y of the same size. Also what a reshape is, when it isn't a view.
	Copy Kind = "copy"
	// Fill: | | y. Every element is Attr.Alpha.
	Fill Kind = "fill"

	// MatMul: A, B [, bias (M)] | | C (N, M). C = op(A)·op(B) (+ bias), where op
	// transposes if Attr.TransA or TransB; Attr.Bias says that bias is there.
	// Attr.Accumulate adds to C instead of overwriting it.
	MatMul Kind = "matmul"
	// BatchedMatMul: A (G,·,·), B (G,·,·) | | C (G,·,·), as MatMul without bias.
	BatchedMatMul Kind = "batched-matmul"
	// ColSum: x (N, D) | | y (D), the sum over rows. Attr.Accumulate is honoured.
	ColSum Kind = "col-sum"

	// Strided: x | | y of any one type. y's element (i0, i1, …) is x's element
	// Attr.Offset + Σ ik·Attr.Strides[k], with a stride for each axis of y: a
	// transposition, a slice, a repetition (stride 0). Nothing is negative.
	Strided Kind = "strided"
	// StridedGrad: dy | | dx of any one type. dx is zero, but for the elements
	// that Strided would have read, which are dy's. No two of them coincide.
	StridedGrad Kind = "strided-grad"
	// Concat: x0, x1, … | | y of any one type, one behind the other along Attr.Axes[0].
	Concat Kind = "concat"
	// Gather: x (V, D), rows (N) | | y (N, D). Row n of y is row rows[n] of x; one
	// outside [0, V) is an error of the stream. Its gradient is EmbeddingGradToken.
	Gather Kind = "gather"
	// Reduce: x | | y by Attr.Func (add, most) over Attr.Axes, which are ascending
	// neighbours. y has the axes that are left.
	Reduce Kind = "reduce"
	// Softmax and LogSoftmax: x | | y of x's shape, along Attr.Axes[0].
	Softmax    Kind = "softmax"
	LogSoftmax Kind = "log-softmax"
	// SoftmaxGrad and LogSoftmaxGrad: y, dy | | dx.
	SoftmaxGrad    Kind = "softmax-grad"
	LogSoftmaxGrad Kind = "log-softmax-grad"

	// Binary: a, b | | y by Attr.Func (add, sub, mul, div, and the comparisons, which
	// give 1 or 0). Shapes are equal, or one operand is a scalar (shape nil).
	Binary Kind = "binary"
	// Unary: x | | y by Attr.Func (neg, exp, log, sqrt, square, cube, tanh,
	// sigmoid, inverse, relu).
	Unary Kind = "unary"

	// LayerNorm: x (N, D), gamma (D), beta (D) | mean (N), rstd (N) | y (N, D). Attr.Eps.
	LayerNorm Kind = "layer-norm"
	// LayerNormGradGamma: x, dy | mean, rstd, dbeta (D) | dgamma (D). One pass
	// gives both sums; dbeta stays in the state for LayerNormGradBeta.
	LayerNormGradGamma Kind = "layer-norm-grad-gamma"
	// LayerNormGradBeta: dy, dgamma | dbeta (D) | dbeta (D). The inputs only
	// order it behind LayerNormGradGamma.
	LayerNormGradBeta Kind = "layer-norm-grad-beta"
	// LayerNormGradInput: x, gamma, dy | mean, rstd | dx (N, D).
	LayerNormGradInput Kind = "layer-norm-grad-input"

	// GELU (tanh form): x | | y.
	GELU Kind = "gelu"
	// GELUGrad: x, dy | | dx.
	GELUGrad Kind = "gelu-grad"

	// Attention (causal): qkv (N, 3D) | lse (B·H·T) | y (N, D). Attr.Heads, Attr.Seq
	// = T. Scores are scaled by 1/√(D/H). Row n of qkv holds q, k, v one after
	// another, each split into heads. lse keeps each row's log-sum-exp.
	Attention Kind = "attention"
	// AttentionGrad: qkv, y, dy | lse | dqkv (N, 3D).
	AttentionGrad Kind = "attention-grad"

	// Embedding: wte (V, D), wpe (≥T, D), tokens (N) | | x (N, D), the sum of the
	// token's and the position's rows; the position of row n is n mod Attr.Seq.
	Embedding Kind = "embedding"
	// EmbeddingGradToken: tokens (N), dy (N, D) | | dwte (V, D). Rows are added in
	// order of n. Attr.Accumulate is honoured.
	EmbeddingGradToken Kind = "embedding-grad-token"
	// EmbeddingGradPosition: dy (N, D) | | dwpe (≥T, D); rows from T on are zero.
	// Attr.Seq, Attr.Accumulate.
	EmbeddingGradPosition Kind = "embedding-grad-position"

	// CrossEntropy: logits (N, V), targets (N) | lse (N), count (1, float32) |
	// loss (scalar). Rows whose target is −1 are ignored; count is the number
	// of the others. Attr.Mean divides by it (0 rows give a loss of 0).
	// A target outside [−1, V) is an error of the stream.
	CrossEntropy Kind = "cross-entropy"
	// CrossEntropyGrad: logits, targets, dloss (scalar) | lse, count | dlogits (N, V).
	CrossEntropyGrad Kind = "cross-entropy-grad"

	// TargetCount: targets (N) | | y (scalar), the number of targets that aren't −1.
	TargetCount Kind = "target-count"

	// Dropout: x, key (3: seed, step, first sample; int64) | | y. Element i of
	// sample s is kept with probability 1−Attr.P, decided by a counter-based
	// hash of (seed, step, Attr.Salt, s, i) alone (DropoutKeep), and divided by
	// 1−P. A sample is Attr.Seq rows. Applied to dy it is its own gradient.
	Dropout Kind = "dropout"

	// AdamW: grad, hyper (HyperLen float32) | | param, m, v, all of one length.
	// Decoupled decay. Element-wise, no FMA: the same bits everywhere.
	// Attr.Decay tells whether weight decay applies to this run of elements.
	AdamW Kind = "adamw"
	// SGD: grad, hyper | | param, momentum.
	SGD Kind = "sgd"
	// SumSquares: x | | y (1, float64). Fixed lane order: the same bits for
	// every instruction set and thread count.
	SumSquares Kind = "sum-squares"
	// ClipScale: squares (P, float64), hyper | | hyper. Adds the squares in
	// order, writes HyperNorm = √sum and HyperScale = min(1, HyperMaxNorm/norm)
	// (1 when HyperMaxNorm is 0).
	ClipScale Kind = "clip-scale"
	// Scale: x, factor (1) | | y = x·factor.
	Scale Kind = "scale"
)

// Indices into the hyper-parameter buffer of AdamW, SGD and ClipScale. They are
// read from memory, not baked into the kernel, so that a captured step can be
// replayed with another learning rate.
const (
	HyperLR      = iota // learning rate of this step
	HyperBeta1          // AdamW: decay of the first moment; SGD: momentum
	HyperBeta2          // AdamW: decay of the second moment
	HyperEps            // AdamW
	HyperDecay          // weight decay
	HyperBias1          // AdamW: 1 − β1^t
	HyperBias2          // AdamW: 1 − β2^t
	HyperMaxNorm        // clip threshold, 0 for none
	HyperScale          // factor on the gradient, written by ClipScale, else 1
	HyperNorm           // global gradient norm, written by ClipScale
	HyperLen     = 16   // length of the buffer in float32
)

// Func is the function of a Binary, Unary or Reduce operation.
type Func string

// The functions of Binary, Unary and Reduce.
const (
	Add     Func = "add"
	Sub     Func = "sub"
	Mul     Func = "mul"
	Div     Func = "div"
	Most    Func = "most" // the greater one
	Greater Func = "greater"
	Less    Func = "less"
	AtLeast Func = "at-least"
	AtMost  Func = "at-most"
	Equal   Func = "equal"
	Differ  Func = "differ"
	Neg     Func = "neg"
	Exp     Func = "exp"
	Log     Func = "log"
	Sqrt    Func = "sqrt"
	Square  Func = "square"
	Cube    Func = "cube"
	Tanh    Func = "tanh"
	Sigmoid Func = "sigmoid"
	Inverse Func = "inverse"
	ReLU    Func = "relu"
)

// Attr holds the attributes that the kinds above mention; the rest stay zero.
type Attr struct {
	TransA, TransB bool
	Bias           bool
	Accumulate     bool
	Mean           bool
	Decay          bool
	Func           Func
	Alpha          float32
	Eps            float32
	P              float32
	Heads, Seq     int
	Salt           int64
	Axes, Strides  []int
	Offset         int
}

// Tensor is the type of an argument. A nil Shape is a scalar: one element.
type Tensor struct {
	Shape []int
	Type  dtype.Type
}

// Elems is the number of elements.
func (t Tensor) Elems() int {
	n := 1
	for _, d := range t.Shape {
		n *= d
	}
	return n
}

// Bytes is the size in bytes.
func (t Tensor) Bytes() int { return t.Elems() * t.Type.Size() }

func (t Tensor) String() string { return fmt.Sprintf("%v%v", t.Type, t.Shape) }

// Equal reports whether shape and type agree.
func (t Tensor) Equal(u Tensor) bool { return t.Type == u.Type && slices.Equal(t.Shape, u.Shape) }

// State is memory that one operation writes for a later one of the same step,
// such as the statistics of a layer norm. Operations that name the same *State
// share the same memory; whoever builds the plan allocates it.
type State struct {
	Name string
	Tensor
}

// Op describes an operation without the graph that it came from.
type Op struct {
	Kind  Kind
	Attr  Attr
	In    []Tensor
	State []*State
	Out   []Tensor
}

func (o Op) String() string {
	s := string(o.Kind)
	if o.Attr.Func != "" {
		s += "." + string(o.Attr.Func)
	}
	return fmt.Sprintf("%s %v → %v", s, o.In, o.Out)
}

// DropoutKeep decides whether Dropout keeps element i (counted within its
// sample) of a sample. It is part of the contract of the Dropout kind: every
// device gives the same answer, so runs agree across devices and world sizes.
// The hash is two rounds of SplitMix64's finaliser (Steele, Lea, Flood, 2014)
// over the key, then one a counter.
func DropoutKeep(seed, step, salt, sample int64, i int, p float32) bool {
	return DropoutBits(DropoutKey(seed, step, salt, sample), i) >= DropoutThreshold(p)
}

// DropoutKey folds what is constant within a sample.
func DropoutKey(seed, step, salt, sample int64) uint64 {
	h := mix64(uint64(seed) + 0x9e3779b97f4a7c15)
	h = mix64(h ^ uint64(step)*0xbf58476d1ce4e5b9)
	h = mix64(h ^ uint64(salt)*0x94d049bb133111eb)
	return mix64(h ^ uint64(sample)*0x9e3779b97f4a7c15)
}

// DropoutBits is the 32 random bits of element i under key.
func DropoutBits(key uint64, i int) uint32 {
	return uint32(mix64(key+uint64(i)*0x9e3779b97f4a7c15) >> 32)
}

// DropoutThreshold is the bound below which bits mean «drop» for probability p.
func DropoutThreshold(p float32) uint32 { return uint32(float64(p) * (1 << 32)) }

func mix64(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
