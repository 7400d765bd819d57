package gpt2mini_test

import (
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/models/gpt2mini"
	"github.com/tandem-go/tandem/models/gpt2mini/parity"
	"github.com/tandem-go/tandem/nn/nntest"
)

// tolerance is the project's: max|a−b| ≤ 2e-5·max|b| for each gradient.
const tolerance = 2e-5

// Without it the model could be some other network than GPT-2, or its
// gradients wrong in a way that still trains.
func TestParityOfLossAndGradients(t *testing.T) {
	files, err := parity.Files()
	require.NoError(t, err)
	for _, path := range files {
		f, err := parity.Load(path)
		require.NoError(t, err)
		for _, dt := range []tensor.Dtype{tensor.Float64, tensor.Float32} {
			t.Run(filepath.Base(path)+"/"+dt.String(), func(t *testing.T) {
				c := f.Config
				c.DType = dt
				loss, grads := reference(t, c, f.Params, f.Tokens[0], f.Targets[0])
				require.InDelta(t, f.Losses[0], loss, 1e-5)
				requireClose(t, grads, f.Grads)
			})
		}
	}
}

// Without it the halves of the batch, which data-parallel ranks are compared
// with, could be cut in another place than ours.
func TestParityOfHalfBatches(t *testing.T) {
	files, err := parity.Files()
	require.NoError(t, err)
	for _, path := range files {
		f, err := parity.Load(path)
		require.NoError(t, err)
		if f.Config.Batch < 2 {
			t.Logf("%s: a batch of %d has no halves", path, f.Config.Batch)
			continue
		}
		c := f.Config
		c.DType, c.Batch = tensor.Float64, f.Config.Batch/2
		n := len(f.Tokens[0])
		half := c.Batch * c.Seq
		for rank, from := range []int{0, n - half} {
			_, grads := reference(t, c, f.Params, f.Tokens[0][from:from+half], f.Targets[0][from:from+half])
			requireClose(t, grads, f.RankGrads[rank])
		}
	}
}

// reference is the loss and the gradient of every parameter, by the layers'
// own reference implementations.
func reference(t *testing.T, c gpt2mini.Config, params map[string]parity.Tensor, tokens, targets []int) (float64, map[string][]float64) {
	t.Helper()
	m, err := gpt2mini.New(c)
	require.NoError(t, err)
	for name, p := range params {
		require.NoError(t, m.SetParam(name, p.Data))
	}
	require.NoError(t, m.SetBatch(tokens, targets))
	nodes, err := gorgonia.Grad(m.Loss, m.Params...)
	require.NoError(t, err)
	values, err := nntest.Eval(append(slices.Clone(nodes), m.Loss)...)
	require.NoError(t, err)
	grads := map[string][]float64{}
	for i, p := range m.Params {
		grads[p.Name()] = values.Float64s(nodes[i])
	}
	return values.Float64s(m.Loss)[0], grads
}

func requireClose(t *testing.T, got map[string][]float64, want map[string]parity.Tensor) {
	t.Helper()
	require.Len(t, got, len(want))
	for name, w := range want {
		require.LessOrEqual(t, parity.Compare(name, got[name], w).Rel, tolerance, "gradient of %s", name)
	}
}
