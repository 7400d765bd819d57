// Package gpt2mini is GPT-2 as a gorgonia graph, with the parameter names and
// layouts of Hugging Face: layer norms before attention and MLP, GELU in its
// tanh form, packed query, key and value, and a head tied to the token
// embedding unless asked otherwise. After Radford et al., Language Models are
// Unsupervised Multitask Learners, 2019.
package gpt2mini

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/nn"
)

// LayerNormEps is what GPT-2 adds to a variance before the root.
const LayerNormEps = 1e-5

// Model is a graph with its inputs, parameters and results.
type Model struct {
	Config Config // with defaults filled in

	Graph  *gorgonia.ExprGraph
	Params gorgonia.Nodes // in the order of Config.Params, with values
	Tokens *gorgonia.Node // (Batch·Seq) ints, sequence after sequence
	// Targets are as many ints: the token that follows, or nn.Ignore.
	Targets *gorgonia.Node
	// DropoutKey is seed, step and first sample (see nn.Dropout); nil without dropout.
	DropoutKey *gorgonia.Node
	Logits     *gorgonia.Node // (Batch·Seq, Vocab)
	Loss       *gorgonia.Node // mean cross entropy of the targets that aren't ignored, a scalar

	params map[string]*gorgonia.Node
	inputs map[*gorgonia.Node]input
	salt   int64 // of the next dropout
}

// input is an integer input's memory. It is kept because to ask a tensor for
// its data allocates.
type input struct {
	value *tensor.Dense
	data  []int
}

// New builds the graph. Parameters are zero until Init or CopyParams; so are
// the inputs, which hold memory of their own that SetBatch fills.
func New(c Config) (*Model, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	m := &Model{Config: c, Graph: gorgonia.NewGraph(), params: map[string]*gorgonia.Node{}, inputs: map[*gorgonia.Node]input{}}
	n := c.Batch * c.Seq
	m.Tokens, m.Targets = m.ints("tokens", n), m.ints("targets", n)
	if c.Dropout > 0 {
		m.DropoutKey = m.ints("dropout_key", nn.KeyLen)
	}
	for _, p := range c.Params() {
		v := tensor.New(tensor.Of(c.DType), tensor.WithShape(p.Shape...))
		node := gorgonia.NewTensor(m.Graph, c.DType, len(p.Shape), gorgonia.WithShape(p.Shape...), gorgonia.WithName(p.Name), gorgonia.WithValue(v))
		m.Params = append(m.Params, node)
		m.params[p.Name] = node
	}
	if err := m.build(); err != nil {
		return nil, fmt.Errorf("gpt2mini: %w", err)
	}
	return m, nil
}

func (m *Model) ints(name string, n int) *gorgonia.Node {
	data := make([]int, n)
	v := tensor.New(tensor.WithShape(n), tensor.WithBacking(data))
	node := gorgonia.NewVector(m.Graph, tensor.Int, gorgonia.WithShape(n), gorgonia.WithName(name), gorgonia.WithValue(v))
	m.inputs[node] = input{v, data}
	return node
}

func (m *Model) build() (err error) {
	x, err := nn.Embedding(m.params["wte.weight"], m.params["wpe.weight"], m.Tokens, m.Config.Seq)
	if err != nil {
		return err
	}
	if x, err = m.dropout(x); err != nil {
		return err
	}
	for i := range m.Config.Layers {
		h := fmt.Sprintf("h.%d.", i)
		if x, err = m.residual(x, h+"ln_1", func(y *gorgonia.Node) (*gorgonia.Node, error) { return m.attention(y, h+"attn.") }); err != nil {
			return err
		}
		if x, err = m.residual(x, h+"ln_2", func(y *gorgonia.Node) (*gorgonia.Node, error) { return m.mlp(y, h+"mlp.") }); err != nil {
			return err
		}
	}
	if x, err = m.layerNorm(x, "ln_f"); err != nil {
		return err
	}
	head := m.params["wte.weight"]
	if m.Config.Untied {
		head = m.params["lm_head.weight"]
	}
	if m.Logits, err = nn.MatMulNT(x, head); err != nil {
		return err
	}
	m.Loss, err = nn.SoftmaxCrossEntropy(m.Logits, m.Targets, nil)
	return err
}

// residual adds branch(norm(x)) to x.
func (m *Model) residual(x *gorgonia.Node, norm string, branch func(*gorgonia.Node) (*gorgonia.Node, error)) (*gorgonia.Node, error) {
	y, err := m.layerNorm(x, norm)
	if err != nil {
		return nil, err
	}
	if y, err = branch(y); err != nil {
		return nil, err
	}
	if y, err = m.dropout(y); err != nil {
		return nil, err
	}
	return gorgonia.Add(x, y)
}

func (m *Model) attention(x *gorgonia.Node, name string) (*gorgonia.Node, error) {
	qkv, err := m.linear(x, name+"c_attn")
	if err != nil {
		return nil, err
	}
	y, err := nn.CausalSelfAttention(qkv, m.Config.Heads, m.Config.Seq)
	if err != nil {
		return nil, err
	}
	return m.linear(y, name+"c_proj")
}

func (m *Model) mlp(x *gorgonia.Node, name string) (*gorgonia.Node, error) {
	y, err := m.linear(x, name+"c_fc")
	if err != nil {
		return nil, err
	}
	if y, err = nn.GELU(y); err != nil {
		return nil, err
	}
	return m.linear(y, name+"c_proj")
}

func (m *Model) linear(x *gorgonia.Node, name string) (*gorgonia.Node, error) {
	return nn.Linear(x, m.params[name+".weight"], m.params[name+".bias"])
}

func (m *Model) layerNorm(x *gorgonia.Node, name string) (*gorgonia.Node, error) {
	return nn.LayerNorm(x, m.params[name+".weight"], m.params[name+".bias"], LayerNormEps)
}

func (m *Model) dropout(x *gorgonia.Node) (*gorgonia.Node, error) {
	m.salt++
	return nn.Dropout(x, m.DropoutKey, m.Config.Dropout, m.Config.Seq, m.salt)
}

// Reshaped builds the same model without dropout for another batch and
// sequence length, to evaluate or to sample with. It shares nothing with m,
// and its parameters are zero: see CopyParams.
func (m *Model) Reshaped(batch, seq int) (*Model, error) {
	c := m.Config
	c.Batch, c.Seq, c.Dropout = batch, seq, 0
	return New(c)
}
