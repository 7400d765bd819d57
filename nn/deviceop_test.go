package nn_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/nn"
)

// describe writes what a graph's operations tell a device, in order of their
// creation. States are numbered by pointer.
func describe(t *testing.T, g *gorgonia.ExprGraph) string {
	t.Helper()
	sorted, err := gorgonia.Sort(g)
	require.NoError(t, err)
	var b strings.Builder
	states := map[*device.State]int{}
	for i := len(sorted) - 1; i >= 0; i-- {
		o, ok := sorted[i].Op().(interface{ DeviceOp() device.Op })
		if !ok {
			continue
		}
		d := o.DeviceOp()
		fmt.Fprintf(&b, "%s%s %v", d.Kind, attributes(d.Attr), d.In)
		for _, s := range d.State {
			if _, ok := states[s]; !ok {
				states[s] = len(states)
			}
			fmt.Fprintf(&b, " #%d %s %v", states[s], s.Name, s.Tensor)
		}
		fmt.Fprintf(&b, " → %v\n", d.Out)
	}
	return b.String()
}

// attributes lists those that aren't zero.
func attributes(a device.Attr) string {
	s := fmt.Sprintf("%+v", a)
	var set []string
	for f := range strings.FieldsSeq(strings.Trim(s, "{}")) {
		if _, v, _ := strings.Cut(f, ":"); v != "" && v != "0" && v != "false" && v != "[]" {
			set = append(set, f)
		}
	}
	if set == nil {
		return ""
	}
	return "{" + strings.Join(set, " ") + "}"
}

// golden is what each layer and its gradient tell a device: the contract of
// device/op.go, spelt out.
var golden = map[string]struct {
	build func(d *draft) (*gorgonia.Node, error)
	want  string
}{
	"linear": {
		func(d *draft) (*gorgonia.Node, error) {
			return nn.Linear(d.param("x", 4, 3), d.param("w", 3, 5), d.param("b", 5))
		}, `
matmul{Bias:true} [float32[4 3] float32[3 5] float32[5]] → [float32[4 5]]
col-sum [float32[4 5]] → [float32[5]]
matmul{TransA:true} [float32[4 3] float32[4 5]] → [float32[3 5]]
matmul{TransB:true} [float32[4 5] float32[3 5]] → [float32[4 3]]`,
	},
	"matmul-nt": {
		func(d *draft) (*gorgonia.Node, error) { return nn.MatMulNT(d.param("x", 4, 3), d.param("w", 7, 3)) }, `
matmul{TransB:true} [float32[4 3] float32[7 3]] → [float32[4 7]]
matmul{TransA:true} [float32[4 7] float32[4 3]] → [float32[7 3]]
matmul [float32[4 7] float32[7 3]] → [float32[4 3]]`,
	},
	"layer norm": {
		func(d *draft) (*gorgonia.Node, error) {
			return nn.LayerNorm(d.param("x", 4, 3), d.param("gamma", 3), d.param("beta", 3), 1e-5)
		}, `
layer-norm{Eps:1e-05} [float32[4 3] float32[3] float32[3]] #0 layer-norm.mean float32[4] #1 layer-norm.rstd float32[4] → [float32[4 3]]
layer-norm-grad-gamma [float32[4 3] float32[4 3]] #0 layer-norm.mean float32[4] #1 layer-norm.rstd float32[4] #2 layer-norm.dbeta float32[3] → [float32[3]]
layer-norm-grad-beta [float32[4 3] float32[3]] #2 layer-norm.dbeta float32[3] → [float32[3]]
layer-norm-grad-input [float32[4 3] float32[3] float32[4 3]] #0 layer-norm.mean float32[4] #1 layer-norm.rstd float32[4] → [float32[4 3]]`,
	},
	"gelu": {
		func(d *draft) (*gorgonia.Node, error) { return nn.GELU(d.param("x", 2, 3, 4)) }, `
gelu [float32[2 3 4]] → [float32[2 3 4]]
gelu-grad [float32[2 3 4] float32[2 3 4]] → [float32[2 3 4]]`,
	},
	"attention": {
		func(d *draft) (*gorgonia.Node, error) { return nn.CausalSelfAttention(d.param("qkv", 10, 12), 2, 5) }, `
attention{Heads:2 Seq:5} [float32[10 12]] #0 attention.lse float32[20] → [float32[10 4]]
attention-grad{Heads:2 Seq:5} [float32[10 12] float32[10 4] float32[10 4]] #0 attention.lse float32[20] → [float32[10 12]]`,
	},
	"embedding": {
		func(d *draft) (*gorgonia.Node, error) {
			return nn.Embedding(d.param("wte", 9, 3), d.param("wpe", 8, 3), d.ints("tokens", 1, 1, 2, 8), 2)
		}, `
embedding{Seq:2} [float32[9 3] float32[8 3] int64[4]] → [float32[4 3]]
embedding-grad-position{Seq:2} [float32[4 3]] → [float32[8 3]]
embedding-grad-token [int64[4] float32[4 3]] → [float32[9 3]]`,
	},
	"cross entropy": {
		func(d *draft) (*gorgonia.Node, error) {
			return nn.SoftmaxCrossEntropy(d.param("logits", 2, 3), d.ints("targets", 0, -1), nil)
		}, `
cross-entropy{Mean:true} [float32[2 3] int64[2]] #0 cross-entropy.lse float32[2] #1 cross-entropy.count float32[1] → [float32[]]
cross-entropy-grad{Mean:true} [float32[2 3] int64[2] float32[]] #0 cross-entropy.lse float32[2] #1 cross-entropy.count float32[1] → [float32[2 3]]`,
	},
	"dropout": {
		func(d *draft) (*gorgonia.Node, error) {
			return nn.Dropout(d.param("x", 4, 3), d.ints("key", 1, 2, 3), 0.25, 2, 7)
		}, `
dropout{P:0.25 Seq:2 Salt:7} [float32[4 3] int64[3]] → [float32[4 3]]
dropout{P:0.25 Seq:2 Salt:7} [float32[4 3] int64[3]] → [float32[4 3]]`,
	},
}

// Without it kinds, the order of arguments or shared statistics could drift
// from what the devices implement; and parameter gradients could come after
// the input's, which costs overlap.
func TestDeviceOps(t *testing.T) {
	for name, c := range golden {
		t.Run(name, func(t *testing.T) {
			d := newDraft(tensor.Float32, 1)
			y, err := c.build(d)
			require.NoError(t, err)
			differentiate(t, d, y)
			require.Equal(t, strings.TrimPrefix(c.want, "\n")+"\n", describe(t, d.g))
		})
	}
}

// Without it two layer norms could share statistics.
func TestStatesBelongToOneLayer(t *testing.T) {
	d := newDraft(tensor.Float32, 1)
	gamma, beta := d.param("gamma", 3), d.param("beta", 3)
	y, err := nn.LayerNorm(d.param("x", 4, 3), gamma, beta, 1e-5)
	require.NoError(t, err)
	y, err = nn.LayerNorm(y, gamma, beta, 1e-5)
	require.NoError(t, err)
	differentiate(t, d, y)
	s := describe(t, d.g)
	require.Contains(t, s, "#5 ", "mean, rstd and dbeta of each")
	require.NotContains(t, s, "#6 ")
}

// Without it the ranks of a job could build graphs that differ in the order of
// their nodes, and so in the order of their collectives.
func TestGraphsAreTheSameEveryTime(t *testing.T) {
	build := func() (ids []string) {
		d := newDraft(tensor.Float32, 1)
		gamma, beta := d.param("gamma", 4), d.param("beta", 4)
		x := must(nn.Embedding(d.param("wte", 9, 4), d.param("wpe", 3, 4), d.ints("tokens", 1, 2, 3), 3))
		for range 5 {
			x = must(nn.GELU(must(nn.LayerNorm(x, gamma, beta, 1e-5))))
		}
		differentiate(t, d, x)
		sorted, err := gorgonia.Sort(d.g)
		require.NoError(t, err)
		for _, n := range sorted {
			ids = append(ids, fmt.Sprintf("%d %s %x", n.ID(), n.Name(), n.Hashcode()))
		}
		return ids
	}
	first := build()
	require.Greater(t, len(first), 30)
	require.Equal(t, first, build(), "what the process built before must not matter")
}
