package nn_test

import (
	"math/rand/v2"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
	"pgregory.net/rapid"

	"github.com/tandem-go/tandem/nn"
)

// draft is a graph under construction by a test: its inputs have random values
// that depend on the order of calls alone, so that the same draft can be made
// in float32 and float64.
type draft struct {
	g      *gorgonia.ExprGraph
	dt     tensor.Dtype
	rng    *rand.Rand
	params gorgonia.Nodes // inputs to differentiate with respect to
}

func newDraft(dt tensor.Dtype, seed uint64) *draft {
	return &draft{g: gorgonia.NewGraph(), dt: dt, rng: rand.New(rand.NewPCG(seed, 1))}
}

// param is an input with values from N(0, 1) in float32's precision.
func (d *draft) param(name string, shape ...int) *gorgonia.Node {
	n := d.input(name, shape...)
	d.params = append(d.params, n)
	return n
}

func (d *draft) input(name string, shape ...int) *gorgonia.Node {
	v := tensor.New(tensor.Of(d.dt), tensor.WithShape(shape...))
	switch s := v.Data().(type) {
	case []float32:
		for i := range s {
			s[i] = float32(d.rng.NormFloat64())
		}
	case []float64:
		for i := range s {
			s[i] = float64(float32(d.rng.NormFloat64()))
		}
	}
	return gorgonia.NewTensor(d.g, d.dt, len(shape), gorgonia.WithShape(shape...), gorgonia.WithName(name), gorgonia.WithValue(v))
}

func (d *draft) ints(name string, values ...int) *gorgonia.Node {
	v := tensor.New(tensor.WithShape(len(values)), tensor.WithBacking(values))
	return gorgonia.NewVector(d.g, tensor.Int, gorgonia.WithShape(len(values)), gorgonia.WithName(name), gorgonia.WithValue(v))
}

// randomInts are n values of [lo, hi].
func (d *draft) randomInts(name string, n, lo, hi int) *gorgonia.Node {
	values := make([]int, n)
	for i := range values {
		values[i] = lo + d.rng.IntN(hi-lo+1)
	}
	return d.ints(name, values...)
}

// sizes draws a function that makes the output of a layer of random sizes. It
// may be called for several drafts.
type sizes func(t *rapid.T) func(d *draft) (*gorgonia.Node, error)

func dim(t *rapid.T, name string, most int) int { return rapid.IntRange(1, most).Draw(t, name) }

// layers are the layers that every general property is tested on.
func layers() map[string]sizes {
	return map[string]sizes{
		"linear":                linear(true),
		"linear without bias":   linear(false),
		"matmul-nt":             matMulNT,
		"layer norm":            layerNorm,
		"layer norm, shared":    sharedLayerNorm,
		"gelu":                  gelu,
		"attention":             attention,
		"embedding":             embedding,
		"embedding, tied":       tiedEmbedding,
		"cross entropy":         crossEntropy(nil, -1),
		"cross entropy, sum":    crossEntropy(&nn.CrossEntropyOptions{Sum: true}, -1),
		"cross entropy, no row": crossEntropy(nil, -2),
		"dropout":               dropout,
	}
}

func linear(bias bool) sizes {
	return func(t *rapid.T) func(d *draft) (*gorgonia.Node, error) {
		n, in, out := dim(t, "n", 7), dim(t, "in", 9), dim(t, "out", 9)
		return func(d *draft) (*gorgonia.Node, error) {
			x, w := d.param("x", n, in), d.param("w", in, out)
			if !bias {
				return nn.Linear(x, w, nil)
			}
			return nn.Linear(x, w, d.param("bias", out))
		}
	}
}

func matMulNT(t *rapid.T) func(d *draft) (*gorgonia.Node, error) {
	n, k, v := dim(t, "n", 7), dim(t, "d", 9), dim(t, "v", 9)
	return func(d *draft) (*gorgonia.Node, error) {
		return nn.MatMulNT(d.param("x", n, k), d.param("w", v, k))
	}
}

// The epsilon is large because finite differences are useless where a row of
// few elements has hardly any variance; the parity test has 1e-5.
const roughEps = 0.1

func layerNorm(t *rapid.T) func(d *draft) (*gorgonia.Node, error) {
	n, k := dim(t, "n", 7), dim(t, "d", 9)
	return func(d *draft) (*gorgonia.Node, error) {
		return nn.LayerNorm(d.param("x", n, k), d.param("gamma", k), d.param("beta", k), roughEps)
	}
}

// sharedLayerNorm applies one gain and bias twice, so their gradients add up.
func sharedLayerNorm(t *rapid.T) func(d *draft) (*gorgonia.Node, error) {
	n, k := dim(t, "n", 5), dim(t, "d", 7)
	return func(d *draft) (*gorgonia.Node, error) {
		gamma, beta := d.param("gamma", k), d.param("beta", k)
		y, err := nn.LayerNorm(d.param("x", n, k), gamma, beta, roughEps)
		if err != nil {
			return nil, err
		}
		return nn.LayerNorm(y, gamma, beta, roughEps)
	}
}

func gelu(t *rapid.T) func(d *draft) (*gorgonia.Node, error) {
	shape := rapid.SliceOfN(rapid.IntRange(1, 5), 1, 3).Draw(t, "shape")
	return func(d *draft) (*gorgonia.Node, error) { return nn.GELU(d.param("x", shape...)) }
}

func attention(t *rapid.T) func(d *draft) (*gorgonia.Node, error) {
	batch, seq, heads, width := dim(t, "batch", 3), dim(t, "seq", 7), dim(t, "heads", 3), dim(t, "width", 5)
	return func(d *draft) (*gorgonia.Node, error) {
		return nn.CausalSelfAttention(d.param("qkv", batch*seq, 3*heads*width), heads, seq)
	}
}

// embedding has more tokens than the vocabulary often enough to repeat some,
// and a wpe of which only the first rows are used.
func embedding(t *rapid.T) func(d *draft) (*gorgonia.Node, error) {
	batch, seq, spare, vocab, k := dim(t, "batch", 3), dim(t, "seq", 5), dim(t, "spare", 3)-1, dim(t, "vocab", 6), dim(t, "d", 5)
	return func(d *draft) (*gorgonia.Node, error) {
		tokens := d.randomInts("tokens", batch*seq, 0, vocab-1)
		return nn.Embedding(d.param("wte", vocab, k), d.param("wpe", seq+spare, k), tokens, seq)
	}
}

// tiedEmbedding uses the token embedding for the head too.
func tiedEmbedding(t *rapid.T) func(d *draft) (*gorgonia.Node, error) {
	batch, seq, vocab, k := dim(t, "batch", 3), dim(t, "seq", 5), dim(t, "vocab", 6), dim(t, "d", 5)
	return func(d *draft) (*gorgonia.Node, error) {
		wte := d.param("wte", vocab, k)
		x, err := nn.Embedding(wte, d.param("wpe", seq, k), d.randomInts("tokens", batch*seq, 0, vocab-1), seq)
		if err != nil {
			return nil, err
		}
		return nn.MatMulNT(x, wte)
	}
}

// crossEntropy has targets of [−1, V), or ignores every row if lowest is −2.
func crossEntropy(o *nn.CrossEntropyOptions, lowest int) sizes {
	return func(t *rapid.T) func(d *draft) (*gorgonia.Node, error) {
		n, v := dim(t, "n", 7), dim(t, "v", 9)
		highest := v - 1
		if lowest == -2 {
			highest = nn.Ignore
		}
		return func(d *draft) (*gorgonia.Node, error) {
			return nn.SoftmaxCrossEntropy(d.param("logits", n, v), d.randomInts("targets", n, nn.Ignore, highest), o)
		}
	}
}

func dropout(t *rapid.T) func(d *draft) (*gorgonia.Node, error) {
	batch, seq, k := dim(t, "batch", 3), dim(t, "seq", 4), dim(t, "d", 6)
	p := rapid.SampledFrom([]float64{0, 0.1, 0.5, 0.9}).Draw(t, "p")
	return func(d *draft) (*gorgonia.Node, error) {
		// GELU in front: with p = 0 the input itself would be the output.
		x, err := nn.GELU(d.param("x", batch*seq, k))
		if err != nil {
			return nil, err
		}
		return nn.Dropout(x, d.ints("key", 5, 3, 2), p, seq, 9)
	}
}
