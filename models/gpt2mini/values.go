package gpt2mini

import (
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem/nn"
)

// initStd is the standard deviation of GPT-2's initial weights.
const initStd = 0.02

// Init sets the parameters as GPT-2 does: weights and both embeddings from
// N(0, 0.02²), the projections into the residual stream from N(0, 0.02²/(2·Layers)),
// biases 0, gains 1. A parameter's values are a pure function of the seed, its
// name and its size; those of float64 models are float32 values too.
func (m *Model) Init(seed uint64) error {
	for i, p := range m.Config.Params() {
		draw := initializer(seed, p.Name, m.Config.Layers)
		if err := fill(m.Params[i], func(int) float64 { return draw() }); err != nil {
			return err
		}
	}
	return nil
}

func initializer(seed uint64, name string, layers int) func() float64 {
	norm := strings.Contains(name, "ln_")
	switch {
	case strings.HasSuffix(name, ".bias"):
		return func() float64 { return 0 }
	case norm:
		return func() float64 { return 1 }
	}
	std := initStd
	if strings.HasSuffix(name, ".c_proj.weight") {
		std /= math.Sqrt(2 * float64(layers))
	}
	h := fnv.New64a()
	h.Write([]byte(name))
	rng := rand.New(rand.NewPCG(seed, h.Sum64()))
	return func() float64 { return float64(float32(rng.NormFloat64() * std)) }
}

// fill sets element i of a parameter's value to f(i).
func fill(n *gorgonia.Node, f func(i int) float64) error {
	switch d := data(n).(type) {
	case []float32:
		for i := range d {
			d[i] = float32(f(i))
		}
	case []float64:
		for i := range d {
			d[i] = f(i)
		}
	default:
		return fmt.Errorf("gpt2mini: parameter %q holds a %T; bind a tensor of %v", n.Name(), d, n.Dtype())
	}
	return nil
}

func data(n *gorgonia.Node) any {
	if n.Value() == nil {
		return nil
	}
	return n.Value().Data()
}

// SetParam copies values into the parameter called name.
func (m *Model) SetParam(name string, values []float32) error {
	n, ok := m.params[name]
	if !ok {
		return fmt.Errorf("gpt2mini: no parameter %q", name)
	}
	if want := n.Shape().TotalSize(); len(values) != want {
		return fmt.Errorf("gpt2mini: %d values for parameter %q of shape %v, want %d", len(values), name, n.Shape(), want)
	}
	return fill(n, func(i int) float64 { return float64(values[i]) })
}

// CopyParams copies the values of from's parameters, which must have the same
// names, shapes and type. Where from trains with a deferred optimizer, wait
// for the step to be complete first.
func (m *Model) CopyParams(from *Model) error {
	if len(m.Params) != len(from.Params) {
		return fmt.Errorf("gpt2mini: copying %d parameters into %d", len(from.Params), len(m.Params))
	}
	for i, dst := range m.Params {
		src := from.Params[i]
		if dst.Name() != src.Name() || !slices.Equal(dst.Shape(), src.Shape()) || dst.Dtype() != src.Dtype() {
			return fmt.Errorf("gpt2mini: copying %q %v%v into %q %v%v", src.Name(), src.Dtype(), src.Shape(), dst.Name(), dst.Dtype(), dst.Shape())
		}
		switch s := data(src).(type) {
		case []float32:
			copy(data(dst).([]float32), s)
		case []float64:
			copy(data(dst).([]float64), s)
		default:
			return fmt.Errorf("gpt2mini: parameter %q has no value to copy", src.Name())
		}
	}
	return nil
}

// SetBatch copies the next batch in: Batch·Seq tokens, sequence after
// sequence, and as many targets (nil for a forward pass whose loss is of no
// interest: all are ignored). It allocates nothing and keeps neither slice.
func (m *Model) SetBatch(tokens, targets []int) error {
	n := m.Config.Batch * m.Config.Seq
	if len(tokens) != n || (targets != nil && len(targets) != n) {
		return fmt.Errorf("gpt2mini: %d tokens and %d targets, want %d of each (batch %d, seq %d)", len(tokens), len(targets), n, m.Config.Batch, m.Config.Seq)
	}
	for i, t := range tokens {
		if t < 0 || t >= m.Config.Vocab {
			return fmt.Errorf("gpt2mini: token %d at sequence %d, position %d lies outside [0, %d)", t, i/m.Config.Seq, i%m.Config.Seq, m.Config.Vocab)
		}
	}
	for i, t := range targets {
		if t < nn.Ignore || t >= m.Config.Vocab {
			return fmt.Errorf("gpt2mini: target %d at sequence %d, position %d lies outside [%d, %d)", t, i/m.Config.Seq, i%m.Config.Seq, nn.Ignore, m.Config.Vocab)
		}
	}
	dst, err := m.memory(m.Tokens)
	if err != nil {
		return err
	}
	copy(dst, tokens)
	if dst, err = m.memory(m.Targets); err != nil {
		return err
	}
	if targets == nil {
		for i := range dst {
			dst[i] = nn.Ignore
		}
	}
	copy(dst, targets)
	return nil
}

// memory is where an input's elements are. It binds the model's own tensor
// again if another was bound meanwhile.
func (m *Model) memory(n *gorgonia.Node) ([]int, error) {
	in := m.inputs[n]
	if n.Value() != gorgonia.Value(in.value) {
		if err := gorgonia.Let(n, in.value); err != nil {
			return nil, fmt.Errorf("gpt2mini: input %q: %w", n.Name(), err)
		}
	}
	return in.data, nil
}

// SetDropoutKey chooses the masks of the next step: the index of the batch's
// first sequence within the global batch makes them independent of how the
// batch is spread over ranks. Without dropout it does nothing.
func (m *Model) SetDropoutKey(seed int64, step, firstSample int) error {
	if m.DropoutKey == nil {
		return nil
	}
	key, err := m.memory(m.DropoutKey)
	if err != nil {
		return err
	}
	key[0], key[1], key[2] = int(seed), step, firstSample
	return nil
}
