package nn_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/nn"
)

// Without it a wrong shape would surface as a panic in a kernel, or as
// gorgonia's type error that names no node.
func TestWrongArgumentsAreNamed(t *testing.T) {
	d := newDraft(tensor.Float32, 1)
	x, w, b := d.param("acts", 4, 6), d.param("weight", 6, 2), d.param("bias", 2)
	row, cube := d.param("row", 1, 2), d.param("cube", 2, 2, 6)
	vec, tokens, key := d.param("gain", 6), d.ints("tokens", 1, 2, 3, 0), d.ints("key", 1, 2, 3)
	e := newDraft(tensor.Float64, 1)
	wide, other := gorgonia.NewMatrix(d.g, tensor.Float64, gorgonia.WithShape(6, 2), gorgonia.WithName("wide")), e.param("other", 6, 2)
	wpe := d.param("wpe", 3, 6)

	node := func(n *gorgonia.Node, err error) error { return err }
	for want, err := range map[string]error{
		`nn: linear: x is nil`: node(nn.Linear(nil, w, b)),
		`x has shape [4 6] and w [4 6]: the columns of x must be the rows of w`:          node(nn.Linear(x, x, b)),
		`bias has shape [6] and w [6 2]: the bias needs an element for each column of w`: node(nn.Linear(x, w, vec)),
		`bias "row" has shape (1, 2), want 1 dimensions: make it a vector`:               node(nn.Linear(x, w, row)),
		`x "cube" has shape (2, 2, 6), want 2 dimensions: flatten batch and sequence`:    node(nn.Linear(cube, w, b)),
		`w "wide" is float64[6 2], but "acts" is float32: one type for all`:              node(nn.Linear(x, wide, b)),
		`w "other" and "acts" belong to different graphs`:                                node(nn.Linear(x, other, b)),
		`x "tokens" is Vector int, want float32 or float64`:                              node(nn.Linear(tokens, w, b)),
		`nn: matmul-nt: x has shape [4 6] and w [6 2]: they must have as many columns`:   node(nn.MatMulNT(x, w)),
		`x has shape [4 6], gamma [6] and beta [2]`:                                      node(nn.LayerNorm(x, vec, b, 1e-5)),
		`eps is 0, want a positive number`:                                               node(nn.LayerNorm(x, vec, vec, 0)),
		`qkv "weight" has 2 columns, want a multiple of 3`:                               node(nn.CausalSelfAttention(w, 1, 2)),
		`d-model 2 of qkv "acts" is not divisible by 3 heads`:                            node(nn.CausalSelfAttention(x, 3, 2)),
		`qkv "acts" has 4 rows, want a multiple of the sequence length 3`:                node(nn.CausalSelfAttention(x, 2, 3)),
		`heads is 0, want at least 1`:                                                    node(nn.CausalSelfAttention(x, 0, 2)),
		`nn: attention: seq is -1, want at least 1`:                                      node(nn.CausalSelfAttention(x, 2, -1)),
		`sequences of 4 positions, but wpe has only 3 rows; shorten the sequence`:        node(nn.Embedding(x, wpe, tokens, 4)),
		`tokens "tokens" has 4 elements, want a multiple of the sequence length 3`:       node(nn.Embedding(x, wpe, tokens, 3)),
		`wte has shape [6 2] and wpe [3 6]: they must have as many columns`:              node(nn.Embedding(w, wpe, tokens, 2)),
		`tokens "gain" is Vector float32 of shape (6), want a vector of tensor.Int`:      node(nn.Embedding(x, wpe, vec, 2)),
		`logits have 6 rows and targets 4 elements: one target a row`:                    node(nn.SoftmaxCrossEntropy(w, tokens, nil)),
		`nn: target-count: dtype is int, want float32 or float64`:                        node(nn.TargetCount(tokens, tensor.Int)),
		`probability is 1, want 0 ≤ p < 1`:                                               node(nn.Dropout(x, key, 1, 2, 0)),
		`probability is -0.1, want 0 ≤ p < 1`:                                            node(nn.Dropout(x, key, -0.1, 2, 0)),
		`key has 4 elements, want 3: seed, step, first sample`:                           node(nn.Dropout(x, tokens, 0.1, 2, 0)),
		`nn: dropout: key is nil`:                                                        node(nn.Dropout(x, nil, 0.1, 2, 0)),
		`nn: dropout: x "acts" has 4 rows, want a multiple of the sequence length 3`:     node(nn.Dropout(x, key, 0.1, 3, 0)),
		`nn: dropout: seq is 0, want at least 1`:                                         node(nn.Dropout(x, key, 0.1, 0, 0)),
		`nn: gelu: x is nil`:                                                             node(nn.GELU(nil)),
	} {
		require.ErrorContains(t, err, want)
	}
}

// Without it the second derivative would be silently wrong.
func TestGradientsAreNotDifferentiable(t *testing.T) {
	d := newDraft(tensor.Float64, 1)
	y := must(nn.GELU(d.param("x", 2, 3)))
	_, grads := differentiate(t, d, y)
	_, err := gorgonia.Backpropagate(grads, gorgonia.Nodes{d.input("s", 2, 3)}, d.params)
	require.Error(t, err)
}

// Without it a machine that asks a node to differentiate by a gradient of
// another shape would write past the end of something.
func TestGradientOfAnotherShapeIsRefused(t *testing.T) {
	d := newDraft(tensor.Float64, 1)
	y := must(nn.GELU(d.param("x", 2, 3)))
	_, err := gorgonia.Backpropagate(gorgonia.Nodes{y}, gorgonia.Nodes{d.input("r", 3, 2)}, d.params)
	require.ErrorContains(t, err, `its gradient "r" is a float64[3 2], want a float64[2 3]`)
}
