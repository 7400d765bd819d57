package nn_test

import (
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
	"pgregory.net/rapid"

	"github.com/tandem-go/tandem/nn/nntest"
)

// differentiate adds the gradients of Σ r⊙y, with random weights r, by the
// draft's parameters. It uses no stock operation of gorgonia.
func differentiate(t require.TestingT, d *draft, y *gorgonia.Node) (r *gorgonia.Node, grads gorgonia.Nodes) {
	if y.Dims() == 0 {
		weight := map[tensor.Dtype]any{tensor.Float32: float32(-1.75), tensor.Float64: -1.75}[d.dt]
		r = gorgonia.NewScalar(d.g, d.dt, gorgonia.WithName("r"), gorgonia.WithValue(weight))
	} else {
		r = d.input("r", y.Shape()...)
	}
	grads, err := gorgonia.Backpropagate(gorgonia.Nodes{y}, gorgonia.Nodes{r}, d.params)
	require.NoError(t, err)
	return r, grads
}

// weighted is Σ r⊙y.
func weighted(t require.TestingT, y, r *gorgonia.Node) (sum float64) {
	v, err := nntest.Eval(y, r)
	require.NoError(t, err)
	weights := v.Float64s(r)
	for i, x := range v.Float64s(y) {
		sum += weights[i] * x
	}
	return sum
}

// Without it a layer's gradient could be wrong for some shape: a single row,
// odd sizes, several heads, a repeated token, an ignored target.
func TestGradientsAgreeWithFiniteDifferences(t *testing.T) {
	for name, layer := range layers() {
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				d := newDraft(tensor.Float64, rapid.Uint64().Draw(t, "seed"))
				y, err := layer(t)(d)
				require.NoError(t, err)
				r, grads := differentiate(t, d, y)
				v, err := nntest.Eval(slices.Clone(grads)...)
				require.NoError(t, err)
				for i, p := range d.params {
					require.Equal(t, p.Shape(), grads[i].Shape(), p.Name())
					requireDerivative(t, p, v.Float64s(grads[i]), func() float64 { return weighted(t, y, r) })
				}
			})
		})
	}
}

// requireDerivative moves up to 8 elements of p by a little.
func requireDerivative(t require.TestingT, p *gorgonia.Node, grad []float64, f func() float64) {
	const h = 1e-5
	x := p.Value().Data().([]float64)
	require.Len(t, grad, len(x))
	for i := 0; i < len(x); i += 1 + len(x)/8 {
		was := x[i]
		x[i] = was + h
		up := f()
		x[i] = was - h
		down := f()
		x[i] = was
		want := (up - down) / (2 * h)
		require.InDelta(t, want, grad[i], 1e-7*max(1, math.Abs(want)), "%s[%d]", p.Name(), i)
	}
}

// Without it the float32 reference, which stands in for missing kernels, could
// compute something else than the float64 one that the other tests check.
func TestFloat32AgreesWithFloat64(t *testing.T) {
	for name, layer := range layers() {
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				seed, build := rapid.Uint64().Draw(t, "seed"), layer(t)
				var results [2][][]float64
				for i, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
					d := newDraft(dt, seed)
					y, err := build(d)
					require.NoError(t, err)
					require.Equal(t, dt, y.Dtype())
					_, grads := differentiate(t, d, y)
					nodes := append(slices.Clone(grads), y)
					v, err := nntest.Eval(nodes...)
					require.NoError(t, err)
					for _, n := range nodes {
						require.Equal(t, dt, v[n].Dtype())
						results[i] = append(results[i], v.Float64s(n))
					}
				}
				for k, want := range results[1] {
					most := 1.0
					for _, x := range want {
						most = max(most, math.Abs(x))
					}
					require.InDeltaSlice(t, want, results[0][k], 2e-5*most)
				}
			})
		})
	}
}
