package engine

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/models/gpt2mini"
	"github.com/tandem-go/tandem/models/gpt2mini/parity"
)

// tolerance is the project's for gradients: max|a−b| ≤ 2e-5·max|b|.
const tolerance = 2e-5

// Without it GPT-2 as a plan of kernels could compute something else than
// PyTorch, and the float64 plan would be no reference.
func TestParityOfPlans(t *testing.T) {
	files, err := parity.Files()
	require.NoError(t, err)
	d := newDevice(t)
	for _, path := range files {
		f, err := parity.Load(path)
		require.NoError(t, err)
		for name, o := range map[string]Options{"kernels": {}, "poisoned": {Poison: true}, "do": {Reference: true}} {
			t.Run(filepath.Base(path)+"/"+name, func(t *testing.T) {
				c := f.Config
				if c.DType = tensor.Float32; o.Reference {
					c.DType = tensor.Float64
				}
				m, err := gpt2mini.New(c)
				require.NoError(t, err)
				for name, p := range f.Params {
					require.NoError(t, m.SetParam(name, p.Data))
				}
				require.NoError(t, m.SetBatch(f.Tokens[0], f.Targets[0]))
				p := &problem{params: m.Params, loss: m.Loss}
				r := compile(t, d, p, &o)
				loss, grads := r.run()
				require.InDelta(t, f.Losses[0], loss, 1e-5)
				for i, g := range grads {
					name := r.Params()[i].Name
					rel := parity.Compare(name, g, f.Grads[name]).Rel
					require.LessOrEqual(t, rel, tolerance, "gradient of %s", name)
				}
				if name == "kernels" {
					requireKernelsOnly(t, r.Plan)
				}
			})
		}
	}
}

// requireKernelsOnly fails where an op runs through its own Do.
func requireKernelsOnly(t *testing.T, p *Plan) {
	t.Helper()
	for _, st := range p.steps {
		if !st.copy && st.v.kernel == nil {
			t.Errorf("%s runs through its own Do", st.v.name())
		}
	}
}
