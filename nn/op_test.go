package nn_test

import (
	"fmt"
	"hash"
	"hash/fnv"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
	"pgregory.net/rapid"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/nn"
	"github.com/tandem-go/tandem/nn/nntest"
)

// must unwraps a layer in a test where it can't fail.
func must(n *gorgonia.Node, err error) *gorgonia.Node {
	if err != nil {
		panic(err)
	}
	return n
}

func eval(t require.TestingT, n *gorgonia.Node) []float64 {
	v, err := nntest.Eval(n)
	require.NoError(t, err)
	return v.Float64s(n)
}

// squatter has the hash that another operation is about to get.
type squatter struct {
	gorgonia.Op
	text string
}

func (s squatter) WriteHash(h hash.Hash) { fmt.Fprint(h, s.text) }
func (s squatter) Hashcode() uint32      { h := fnv.New32a(); s.WriteHash(h); return h.Sum32() }

// Without it two layers of the same input, or a layer and a stranger with the
// same hash, could become one node: gorgonia compares hashes only.
func TestOperationsNeverMerge(t *testing.T) {
	d := newDraft(tensor.Float64, 1)
	x := d.param("x", 2, 3)
	a, b := must(nn.GELU(x)), must(nn.GELU(x))
	require.NotSame(t, a, b)

	next := len(d.g.AllNodes()) + 1
	s, err := gorgonia.ApplyOp(squatter{a.Op(), fmt.Sprintf("tandem/gelu/%d.0", next)}, x)
	require.NoError(t, err)
	c := must(nn.GELU(x))
	require.NotSame(t, s, c)
	require.Equal(t, eval(t, a), eval(t, c))
}

// Without it an operation could read a transposed view as if it were stored
// row by row.
func TestReferenceReadsViews(t *testing.T) {
	d := newDraft(tensor.Float64, 1)
	x, key := d.param("x", 2, 3), d.ints("key", 1, 2, 3)
	y := must(nn.Dropout(x, key, 0.5, 2, 0)).Op()
	dense := tensor.New(tensor.WithShape(3, 2), tensor.WithBacking([]float64{1, 4, 2, 5, 3, 6}))
	require.NoError(t, dense.T())
	straight := tensor.New(tensor.WithShape(2, 3), tensor.WithBacking([]float64{1, 2, 3, 4, 5, 6}))
	got, err := y.Do(dense, key.Value())
	require.NoError(t, err)
	want, err := y.Do(straight, key.Value())
	require.NoError(t, err)
	require.Equal(t, want.Data(), got.Data())
}

// Without it an executor that plans memory could get results elsewhere.
func TestUsePreallocDoWritesWhereItIsTold(t *testing.T) {
	d := newDraft(tensor.Float32, 1)
	x := d.param("logits", 2, 3)
	targets := d.ints("targets", 0, 2)
	y := must(nn.SoftmaxCrossEntropy(x, targets, nil))
	loss := gorgonia.NewF32(-1)
	_, err := y.Op().(gorgonia.UsePreallocDoer).UsePreallocDo(loss, x.Value(), targets.Value())
	require.NoError(t, err)
	require.InDelta(t, eval(t, y)[0], float64(*loss), 1e-7)

	g := must(nn.GELU(x)).Op().(gorgonia.UsePreallocDoer)
	out := tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(2, 3))
	_, err = g.UsePreallocDo(out, x.Value())
	require.NoError(t, err)
	require.NotContains(t, out.Data(), float32(0))
	_, err = g.UsePreallocDo(tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(2, 2)), x.Value())
	require.ErrorContains(t, err, "output has shape (2, 2)")
	_, err = g.UsePreallocDo(out, targets.Value())
	require.ErrorContains(t, err, "input 0 is int(2)")
	_, err = g.UsePreallocDo(out)
	require.ErrorContains(t, err, "0 inputs, want 1")
}

// Without it a token out of range would read or write other memory, or panic.
func TestIndicesOutOfRangeAreErrors(t *testing.T) {
	d := newDraft(tensor.Float64, 1)
	wte, wpe := d.param("wte", 4, 3), d.param("wpe", 2, 3)
	for _, token := range []int{-1, 4} {
		_, err := nntest.Eval(must(nn.Embedding(wte, wpe, d.ints(fmt.Sprint("tokens", token), 0, token), 2)))
		require.ErrorContains(t, err, fmt.Sprintf("token %d at row 1 lies outside [0, 4)", token))
	}
	for _, target := range []int{-2, 3} {
		_, err := nntest.Eval(must(nn.SoftmaxCrossEntropy(wpe, d.ints(fmt.Sprint("targets", target), 0, target), nil)))
		require.ErrorContains(t, err, fmt.Sprintf("target %d at row 1 lies outside [-1, 3)", target))
	}
}

// Without it the mean could count ignored rows, or divide by zero.
func TestCrossEntropyMeanSumAndCount(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n, v := dim(t, "n", 6), dim(t, "v", 5)
		d := newDraft(tensor.Float64, rapid.Uint64().Draw(t, "seed"))
		logits, targets := d.param("logits", n, v), d.randomInts("targets", n, nn.Ignore, v-1)
		mean := must(nn.SoftmaxCrossEntropy(logits, targets, nil))
		sum := must(nn.SoftmaxCrossEntropy(logits, targets, &nn.CrossEntropyOptions{Sum: true}))
		count := eval(t, must(nn.TargetCount(targets, tensor.Float64)))[0]

		x, want, rows := logits.Value().Data().([]float64), 0.0, 0.0
		for i, target := range targets.Value().Data().([]int) {
			if target < 0 {
				continue
			}
			z := 0.0
			for _, l := range x[i*v : (i+1)*v] {
				z += math.Exp(l)
			}
			want -= math.Log(math.Exp(x[i*v+target]) / z)
			rows++
		}
		require.Equal(t, rows, count)
		require.InDelta(t, want, eval(t, sum)[0], 1e-12)
		require.InDelta(t, want/max(rows, 1), eval(t, mean)[0], 1e-12)
	})
}

// Without it large logits could overflow to Inf.
func TestSoftmaxIsStable(t *testing.T) {
	d := newDraft(tensor.Float32, 1)
	logits := gorgonia.NewMatrix(d.g, tensor.Float32, gorgonia.WithShape(1, 2), gorgonia.WithName("logits"),
		gorgonia.WithValue(tensor.New(tensor.WithShape(1, 2), tensor.WithBacking([]float32{3e4, -3e4}))))
	require.InDelta(t, 6e4, eval(t, must(nn.SoftmaxCrossEntropy(logits, d.ints("t", 1), nil)))[0], 1)
}

// Without it a position could look at those after it, or at other sequences.
func TestAttentionIsCausal(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		batch, seq, heads, width := dim(t, "batch", 3), dim(t, "seq", 6), dim(t, "heads", 3), dim(t, "width", 4)
		d := newDraft(tensor.Float64, rapid.Uint64().Draw(t, "seed"))
		model := heads * width
		qkv := d.param("qkv", batch*seq, 3*model)
		y := must(nn.CausalSelfAttention(qkv, heads, seq))
		before := eval(t, y)
		row := rapid.IntRange(0, batch*seq-1).Draw(t, "row")
		for i := range 3 * model {
			qkv.Value().Data().([]float64)[row*3*model+i] += 1 + float64(i)
		}
		after := eval(t, y)
		for n := range batch * seq {
			same := fmt.Sprint(before[n*model:(n+1)*model]) == fmt.Sprint(after[n*model:(n+1)*model])
			sees := n >= row && n/seq == row/seq
			require.Equal(t, !sees, same, "row %d after row %d changed", n, row)
		}
	})
}

// Without it the mask could depend on how the batch is cut into ranks, so that
// world sizes would not compare.
func TestDropoutDoesNotDependOnTheCut(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		first, batch, seq, k := dim(t, "first", 9), 2*dim(t, "half", 3), dim(t, "seq", 4), dim(t, "d", 5)
		mask := func(first, batch, step int, salt int64) []float64 {
			d := newDraft(tensor.Float64, 1)
			x := d.param("x", batch*seq, k)
			return zeros(eval(t, must(nn.Dropout(x, d.ints("key", 7, step, first), 0.5, seq, salt))))
		}
		whole := mask(first, batch, 1, 2)
		require.Equal(t, whole, mask(first, batch, 1, 2), "the same key gives the same mask")
		require.Equal(t, whole, append(mask(first, batch/2, 1, 2), mask(first+batch/2, batch/2, 1, 2)...))
	})
}

// zeros is 1 where x is 0, and 0 elsewhere.
func zeros(x []float64) []float64 {
	z := make([]float64, len(x))
	for i, v := range x {
		if v == 0 {
			z[i] = 1
		}
	}
	return z
}

// Without it masks could repeat from step to step, layer to layer or sample to
// sample, keep the wrong share, or differ from device.DropoutKeep, which the
// devices implement.
func TestDropoutKeepsTheRightShare(t *testing.T) {
	const rows, cols, seq, p = 256, 100, 4, 0.3
	var masks [][]float64
	for _, c := range []struct {
		step int
		salt int64
	}{{1, 1}, {2, 1}, {1, 2}} {
		d := newDraft(tensor.Float64, 1)
		x := d.param("x", rows, cols)
		y := eval(t, must(nn.Dropout(x, d.ints("key", 7, c.step, 3), p, seq, c.salt)))
		for i, v := range y {
			want := 0.0
			if device.DropoutKeep(7, int64(c.step), c.salt, int64(3+i/(seq*cols)), i%(seq*cols), float32(p)) {
				want = x.Value().Data().([]float64)[i] / (1 - float64(float32(p)))
			}
			require.InDelta(t, want, v, 1e-12)
		}
		masks = append(masks, zeros(y))
	}
	const n = rows * cols
	sigma := math.Sqrt(p * (1 - p) * n)
	for i, m := range masks {
		dropped := 0.0
		for _, z := range m {
			dropped += z
		}
		require.InDelta(t, p*n, dropped, 5*sigma)
		for _, other := range masks[:i] {
			both := 0.0
			for k := range m {
				both += m[k] * other[k]
			}
			require.InDelta(t, p*p*n, both, 5*math.Sqrt(p*p*(1-p*p)*n), "masks are independent")
		}
	}
}
