package gpt2mini_test

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/models/gpt2mini"
	"github.com/tandem-go/tandem/nn"
	"github.com/tandem-go/tandem/nn/nntest"
)

// tiny is a configuration that the reference can run at once.
func tiny() gpt2mini.Config {
	return gpt2mini.Config{Vocab: 11, Block: 7, Layers: 2, Heads: 2, DModel: 6, Batch: 2}
}

func build(t *testing.T, c gpt2mini.Config) *gpt2mini.Model {
	t.Helper()
	m, err := gpt2mini.New(c)
	require.NoError(t, err)
	require.NoError(t, m.Init(1))
	return m
}

// Without it a wrong size would fail deep inside a layer, or not at all.
func TestConfigBoundsAreNamed(t *testing.T) {
	for want, spoil := range map[string]func(c *gpt2mini.Config){
		"d-model 6 is not divisible by 4 heads; choose a multiple of 4": func(c *gpt2mini.Config) { c.Heads = 4 },
		"sequences of 8 positions don't fit the block of 7":             func(c *gpt2mini.Config) { c.Seq = 8 },
		"seq is -1, want at least 1":                                    func(c *gpt2mini.Config) { c.Seq = -1 },
		"vocab is 0, want at least 1":                                   func(c *gpt2mini.Config) { c.Vocab = 0 },
		"block is 0, want at least 1":                                   func(c *gpt2mini.Config) { c.Block = 0 },
		"layers is -2, want at least 1":                                 func(c *gpt2mini.Config) { c.Layers = -2 },
		"heads is 0, want at least 1":                                   func(c *gpt2mini.Config) { c.Heads = 0 },
		"d-model is 0, want at least 1":                                 func(c *gpt2mini.Config) { c.DModel = 0 },
		"batch is -1, want at least 1":                                  func(c *gpt2mini.Config) { c.Batch = -1 },
		"dropout is 1, want 0 ≤ p < 1":                                  func(c *gpt2mini.Config) { c.Dropout = 1 },
		"dropout is NaN, want 0 ≤ p < 1":                                func(c *gpt2mini.Config) { c.Dropout = math.NaN() },
		"dtype is int, want float32 or float64":                         func(c *gpt2mini.Config) { c.DType = tensor.Int },
	} {
		c := tiny()
		spoil(&c)
		_, err := gpt2mini.New(c)
		require.ErrorContains(t, err, want)
	}
}

// Without it a preset could have another size than its name promises.
func TestPresets(t *testing.T) {
	counts := map[string]int{ // 12·L·d² + 13·L·d + 2d + (V + block)·d
		"mini":  834_304,
		"small": 10_721_664,
		"gpt2":  124_439_808, // OpenAI's
	}
	for _, name := range gpt2mini.Presets() {
		c, err := gpt2mini.Preset(name)
		require.NoError(t, err)
		require.NoError(t, c.Validate())
		require.Equal(t, counts[name], c.ParamCount(), name)
		require.Equal(t, c.Block, c.Seq)
	}
	_, err := gpt2mini.Preset("huge")
	require.ErrorContains(t, err, `unknown preset "huge", want one of [mini small gpt2]`)
}

// Without it parameters could go by other names or shapes than in a Hugging
// Face checkpoint, or in another order than their list.
func TestParameterNamesAndShapes(t *testing.T) {
	c := tiny()
	c.Layers, c.Untied = 1, true
	m := build(t, c)
	want := []struct {
		name  string
		shape tensor.Shape
	}{
		{"wte.weight", tensor.Shape{11, 6}}, {"wpe.weight", tensor.Shape{7, 6}},
		{"h.0.ln_1.weight", tensor.Shape{6}}, {"h.0.ln_1.bias", tensor.Shape{6}},
		{"h.0.attn.c_attn.weight", tensor.Shape{6, 18}}, {"h.0.attn.c_attn.bias", tensor.Shape{18}},
		{"h.0.attn.c_proj.weight", tensor.Shape{6, 6}}, {"h.0.attn.c_proj.bias", tensor.Shape{6}},
		{"h.0.ln_2.weight", tensor.Shape{6}}, {"h.0.ln_2.bias", tensor.Shape{6}},
		{"h.0.mlp.c_fc.weight", tensor.Shape{6, 24}}, {"h.0.mlp.c_fc.bias", tensor.Shape{24}},
		{"h.0.mlp.c_proj.weight", tensor.Shape{24, 6}}, {"h.0.mlp.c_proj.bias", tensor.Shape{6}},
		{"ln_f.weight", tensor.Shape{6}}, {"ln_f.bias", tensor.Shape{6}},
		{"lm_head.weight", tensor.Shape{11, 6}},
	}
	require.Len(t, m.Params, len(want))
	for i, w := range want {
		require.Equal(t, w.name, m.Params[i].Name())
		require.Equal(t, w.shape, m.Params[i].Shape(), w.name)
	}
	require.Equal(t, tensor.Shape{14, 11}, m.Logits.Shape())
	require.True(t, m.Loss.IsScalar())
	require.Nil(t, m.DropoutKey)
}

// values is a copy of a parameter's elements.
func values(m *gpt2mini.Model, name string) []float64 {
	for _, p := range m.Params {
		if p.Name() == name {
			return slices.Clone(nntest.Values{p: p.Value()}.Float64s(p))
		}
	}
	return nil
}

// Without it ranks that build other batches, or models of other types, would
// start from other parameters.
func TestInitIsAFunctionOfSeedAndName(t *testing.T) {
	a := build(t, tiny())
	c := tiny()
	c.Batch, c.Seq, c.DType, c.Untied, c.Dropout = 1, 3, tensor.Float64, true, 0.1
	b := build(t, c)
	for _, p := range a.Params {
		require.Equal(t, values(a, p.Name()), values(b, p.Name()), p.Name())
	}
	require.NotEqual(t, values(a, "h.0.attn.c_attn.weight"), values(a, "h.1.attn.c_attn.weight"))
	require.NoError(t, b.Init(2))
	require.NotEqual(t, values(a, "wte.weight"), values(b, "wte.weight"))
}

// Without it training could start from another scale than GPT-2's.
func TestInitHasGPT2sScales(t *testing.T) {
	c, err := gpt2mini.Preset("mini")
	require.NoError(t, err)
	m := build(t, c)
	for _, p := range m.Params {
		x := values(m, p.Name())
		mean, std := 0.0, 0.0
		for _, v := range x {
			mean += v / float64(len(x))
		}
		for _, v := range x {
			std += (v - mean) * (v - mean) / float64(len(x))
		}
		std = math.Sqrt(std)
		wantMean, wantStd := 0.0, 0.02
		switch n := p.Name(); {
		case strings.HasSuffix(n, ".bias"):
			wantStd = 0
		case p.Dims() == 1:
			wantMean, wantStd = 1, 0
		case strings.HasSuffix(n, "c_proj.weight"):
			wantStd = 0.02 / math.Sqrt(8)
		}
		require.InDelta(t, wantMean, mean, 5*wantStd/math.Sqrt(float64(len(x))), p.Name())
		require.InDelta(t, wantStd, std, 0.05*wantStd, p.Name())
	}
}

// Without it an untrained model could favour some tokens: its loss must be
// about that of a guess.
func TestUntrainedLossIsThatOfAGuess(t *testing.T) {
	c, err := gpt2mini.Preset("mini")
	require.NoError(t, err)
	c.Batch, c.Seq = 1, 16
	m := build(t, c)
	tokens := make([]int, 16)
	for i := range tokens {
		tokens[i] = i * 37 % c.Vocab
	}
	require.NoError(t, m.SetBatch(tokens[:16], append(tokens[1:], 5)))
	v, err := nntest.Eval(m.Loss)
	require.NoError(t, err)
	require.InDelta(t, math.Log(float64(c.Vocab)), v.Float64s(m.Loss)[0], 0.1)
}

// Without it a bad batch would fail inside a kernel, or train on nonsense.
func TestSetBatchChecks(t *testing.T) {
	m := build(t, tiny())
	good := make([]int, 14)
	with := func(i, v int) []int { s := slices.Clone(good); s[i] = v; return s }
	require.ErrorContains(t, m.SetBatch(good[1:], good), "13 tokens and 14 targets, want 14 of each (batch 2, seq 7)")
	require.ErrorContains(t, m.SetBatch(good, good[1:]), "14 tokens and 13 targets")
	require.ErrorContains(t, m.SetBatch(with(8, 11), good), "token 11 at sequence 1, position 1 lies outside [0, 11)")
	require.ErrorContains(t, m.SetBatch(with(8, -1), good), "token -1")
	require.ErrorContains(t, m.SetBatch(good, with(0, -2)), "target -2 at sequence 0, position 0 lies outside [-1, 11)")
	require.NoError(t, m.SetBatch(good, with(3, nn.Ignore)))
	require.NoError(t, m.SetBatch(good, nil))
	require.Equal(t, slices.Repeat([]int{nn.Ignore}, 14), m.Targets.Value().Data())
	require.NoError(t, gorgonia.Let(m.Tokens, tensor.New(tensor.WithShape(14), tensor.WithBacking(good))))
	require.NoError(t, m.SetBatch(with(3, 9), good))
	require.Equal(t, with(3, 9), m.Tokens.Value().Data(), "also after another tensor was bound")
	require.Zero(t, testing.AllocsPerRun(10, func() { _ = m.SetBatch(good, good) }), "a steady step allocates nothing")
}

// Without it a model to evaluate with could share memory with the one in
// training, compute something else, or drop elements out.
func TestReshapedModelComputesTheSame(t *testing.T) {
	c := tiny()
	c.Dropout = 0.5
	m := build(t, c)
	e, err := m.Reshaped(1, 4)
	require.NoError(t, err)
	require.NoError(t, e.CopyParams(m))
	require.Nil(t, e.DropoutKey)
	full, err := m.Reshaped(2, 7)
	require.NoError(t, err)
	require.NoError(t, full.CopyParams(m))

	tokens := []int{1, 2, 3, 4, 5, 6, 7, 10, 9, 8, 7, 6, 5, 4}
	require.NoError(t, full.SetBatch(tokens, nil))
	require.NoError(t, e.SetBatch(tokens[7:11], nil))
	v, err := nntest.Eval(full.Logits)
	require.NoError(t, err)
	w, err := nntest.Eval(e.Logits)
	require.NoError(t, err)
	require.Equal(t, v.Float64s(full.Logits)[7*c.Vocab:11*c.Vocab], w.Float64s(e.Logits))

	require.NoError(t, m.Init(2))
	require.NotEqual(t, values(m, "wte.weight"), values(e, "wte.weight"), "a copy, not the same memory")

	other := tiny()
	other.DModel = 8
	require.ErrorContains(t, build(t, other).CopyParams(m), `copying "wte.weight" float32(11, 6) into "wte.weight" float32(11, 8)`)
	other = tiny()
	other.Layers = 1
	require.ErrorContains(t, build(t, other).CopyParams(m), "copying 28 parameters into 16")
}

// Without it a checkpoint's tensor could be cut off or land in another one.
func TestSetParam(t *testing.T) {
	c := tiny()
	c.DType = tensor.Float64
	m := build(t, c)
	require.NoError(t, m.SetParam("ln_f.bias", []float32{1, 2, 3, 4, 5, 6}))
	require.Equal(t, []float64{1, 2, 3, 4, 5, 6}, values(m, "ln_f.bias"))
	require.ErrorContains(t, m.SetParam("ln_f.bias", []float32{1}), `1 values for parameter "ln_f.bias" of shape (6), want 6`)
	require.ErrorContains(t, m.SetParam("ln_g.bias", nil), `no parameter "ln_g.bias"`)
}

// Without it the dropouts of a model could share their masks, or the key could
// be ignored.
func TestDropoutFollowsItsKey(t *testing.T) {
	c := tiny()
	c.Dropout = 0.3
	m := build(t, c)
	salts := map[int64]int{}
	for _, n := range m.Graph.AllNodes() {
		if o, ok := n.Op().(interface{ DeviceOp() device.Op }); ok && o.DeviceOp().Kind == device.Dropout {
			salts[o.DeviceOp().Attr.Salt]++
		}
	}
	require.Len(t, salts, 1+2*c.Layers, "one after the embedding and one on each branch, each with its own salt")

	require.NoError(t, m.SetBatch(make([]int, 14), make([]int, 14)))
	loss := func(step int) float64 {
		require.NoError(t, m.SetDropoutKey(1, step, 0))
		v, err := nntest.Eval(m.Loss)
		require.NoError(t, err)
		return v.Float64s(m.Loss)[0]
	}
	first := loss(0)
	require.NotEqual(t, first, loss(1))
	require.Equal(t, first, loss(0))
}

// Without it gradients could be produced in an order that leaves nothing to
// overlap, such as first layer first.
func TestGradientsAppearLastLayerFirst(t *testing.T) {
	for _, dropout := range []float64{0, 0.1} {
		c := tiny()
		c.Dropout = dropout
		m := build(t, c)
		_, err := gorgonia.Grad(m.Loss, m.Params...)
		require.NoError(t, err)
		order := slices.Clone(m.Params)
		slices.SortFunc(order, func(a, b *gorgonia.Node) int { return int(a.Deriv().ID() - b.Deriv().ID()) })
		var names []string
		for _, p := range order {
			names = append(names, p.Name())
		}
		want := []string{"ln_f.weight", "ln_f.bias"}
		for _, h := range []string{"h.1.", "h.0."} {
			want = append(want, h+"mlp.c_proj.bias", h+"mlp.c_proj.weight", h+"mlp.c_fc.bias", h+"mlp.c_fc.weight", h+"ln_2.weight", h+"ln_2.bias",
				h+"attn.c_proj.bias", h+"attn.c_proj.weight", h+"attn.c_attn.bias", h+"attn.c_attn.weight", h+"ln_1.weight", h+"ln_1.bias")
		}
		require.Equal(t, append(want, "wpe.weight", "wte.weight"), names)
	}
}

// Without it an untied head could still write into the token embedding.
func TestUntiedHeadHasItsOwnGradient(t *testing.T) {
	c := tiny()
	c.Untied, c.DType = true, tensor.Float64
	m := build(t, c)
	require.NoError(t, m.SetBatch(slices.Repeat([]int{3}, 14), slices.Repeat([]int{4}, 14)))
	grads, err := gorgonia.Grad(m.Loss, m.Params...)
	require.NoError(t, err)
	v, err := nntest.Eval(grads...)
	require.NoError(t, err)
	for i, g := range v.Float64s(grads[0]) {
		require.Equal(t, i/c.DModel == 3, g != 0, "only the token that occurs has a gradient")
	}
	for i, g := range v.Float64s(grads[len(grads)-1]) {
		require.NotZero(t, g, "class %d", i/c.DModel)
	}
}
