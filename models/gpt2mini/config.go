package gpt2mini

import (
	"fmt"

	"gorgonia.org/tensor"
)

// Config is the size of a model and of the batches that it takes. Vocab,
// Block, Layers, Heads and DModel have no default; a Preset sets them.
type Config struct {
	Vocab  int // number of tokens
	Block  int // positions that the model knows: the longest sequence
	Layers int
	Heads  int // must divide DModel
	DModel int // features of the residual stream; the MLP has four times as many

	Batch   int          // sequences a step; 0 means 1
	Seq     int          // positions of a sequence, at most Block; 0 means Block
	Dropout float64      // probability after the embedding and on each residual branch; 0 means none
	Untied  bool         // the head has weights of its own instead of the token embedding's
	DType   tensor.Dtype // Float32 or Float64; the zero value means Float32
}

// Preset is a model by name: mini (4 layers, 4 heads, 128 features, block 64),
// small (6, 6, 384, block 128) or gpt2 (12, 12, 768, block 1024: OpenAI's
// smallest). Vocab and Batch are those of the benchmarks; text has its own.
func Preset(name string) (Config, error) {
	switch name {
	case "mini":
		return Config{Vocab: 256, Block: 64, Layers: 4, Heads: 4, DModel: 128, Batch: 8}, nil
	case "small":
		return Config{Vocab: 65, Block: 128, Layers: 6, Heads: 6, DModel: 384, Batch: 4}, nil
	case "gpt2":
		return Config{Vocab: 50257, Block: 1024, Layers: 12, Heads: 12, DModel: 768, Batch: 1}, nil
	}
	return Config{}, fmt.Errorf("gpt2mini: unknown preset %q, want one of %v", name, Presets())
}

// Presets are the names that Preset knows, smallest first.
func Presets() []string { return []string{"mini", "small", "gpt2"} }

// Validate fills defaults in and checks the bounds. New does it too; a program
// may want to complain before it starts other ranks.
func (c *Config) Validate() error {
	if c.Batch == 0 {
		c.Batch = 1
	}
	if c.Seq == 0 {
		c.Seq = c.Block
	}
	if c.DType == (tensor.Dtype{}) {
		c.DType = tensor.Float32
	}
	for _, f := range []struct {
		name  string
		value int
	}{{"vocab", c.Vocab}, {"block", c.Block}, {"layers", c.Layers}, {"heads", c.Heads}, {"d-model", c.DModel}, {"batch", c.Batch}, {"seq", c.Seq}} {
		if f.value < 1 {
			return fmt.Errorf("gpt2mini: %s is %d, want at least 1", f.name, f.value)
		}
	}
	switch {
	case c.DModel%c.Heads != 0:
		return fmt.Errorf("gpt2mini: d-model %d is not divisible by %d heads; choose a multiple of %d", c.DModel, c.Heads, c.Heads)
	case c.Seq > c.Block:
		return fmt.Errorf("gpt2mini: sequences of %d positions don't fit the block of %d; shorten them or enlarge the block", c.Seq, c.Block)
	case !(c.Dropout >= 0 && c.Dropout < 1):
		return fmt.Errorf("gpt2mini: dropout is %v, want 0 ≤ p < 1", c.Dropout)
	case c.DType != tensor.Float32 && c.DType != tensor.Float64:
		return fmt.Errorf("gpt2mini: dtype is %v, want float32 or float64", c.DType)
	}
	return nil
}

// ParamShape is the name and the shape of a parameter.
type ParamShape struct {
	Name  string
	Shape []int
}

// Params lists the parameters in the order of Hugging Face's state dict, with
// its names and layouts: Conv1D weights are (in, out).
func (c Config) Params() []ParamShape {
	d := c.DModel
	ps := []ParamShape{{"wte.weight", []int{c.Vocab, d}}, {"wpe.weight", []int{c.Block, d}}}
	pair := func(name string, shape ...int) {
		ps = append(ps, ParamShape{name + ".weight", shape}, ParamShape{name + ".bias", shape[len(shape)-1:]})
	}
	for i := range c.Layers {
		h := fmt.Sprintf("h.%d.", i)
		pair(h+"ln_1", d)
		pair(h+"attn.c_attn", d, 3*d)
		pair(h+"attn.c_proj", d, d)
		pair(h+"ln_2", d)
		pair(h+"mlp.c_fc", d, 4*d)
		pair(h+"mlp.c_proj", 4*d, d)
	}
	pair("ln_f", d)
	if c.Untied {
		ps = append(ps, ParamShape{"lm_head.weight", []int{c.Vocab, d}})
	}
	return ps
}

// ParamCount is the number of trainable elements.
func (c Config) ParamCount() int {
	n := 0
	for _, p := range c.Params() {
		n += tensor.Shape(p.Shape).TotalSize()
	}
	return n
}

// StepFLOPs counts the floating-point operations of the matrix products of one
// forward and backward pass over Batch·Seq tokens: 6 for each weight and
// token, and the attention's scores and sums over the causal half.
func (c Config) StepFLOPs() float64 {
	d, tokens := float64(c.DModel), float64(c.Batch)*float64(c.Seq)
	weights := float64(c.Layers)*12*d*d + float64(c.Vocab)*d
	attention := float64(c.Layers) * 2 * d * float64(c.Seq+1) / 2
	return 6 * tokens * (weights + attention)
}
