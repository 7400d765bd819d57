package hf

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/tandem-go/tandem/models/gpt2mini"
)

// ConfigFile is the name of the model's description.
const ConfigFile = "config.json"

// config is the part of transformers' GPT2Config that means something here.
type config struct {
	Architectures []string `json:"architectures"`
	ModelType     string   `json:"model_type"`
	Vocab         int      `json:"vocab_size"`
	Positions     int      `json:"n_positions"`
	Context       int      `json:"n_ctx"`
	Width         int      `json:"n_embd"`
	Layers        int      `json:"n_layer"`
	Heads         int      `json:"n_head"`
	Activation    string   `json:"activation_function"`
	Epsilon       float64  `json:"layer_norm_epsilon"`
	ResidDropout  float64  `json:"resid_pdrop"`
	EmbedDropout  float64  `json:"embd_pdrop"`
	AttnDropout   float64  `json:"attn_pdrop"`
	Tied          *bool    `json:"tie_word_embeddings"`
	// Tokens that begin and end a text: GPT-2's, or null where there is no such.
	Begin *int   `json:"bos_token_id"`
	End   *int   `json:"eos_token_id"`
	Type  string `json:"torch_dtype"`
}

// gpt2Vocab is the size of GPT-2's vocabulary, whose last token ends a text.
const gpt2Vocab = 50257

// gelu is the activation in its tanh form; the other names are the same function.
const gelu = "gelu_new"

// Config describes the model as config.json does.
func Config(c gpt2mini.Config) ([]byte, error) {
	tied := !c.Untied
	v := config{
		Architectures: []string{"GPT2LMHeadModel"}, ModelType: "gpt2",
		Vocab: c.Vocab, Positions: c.Block, Context: c.Block, Width: c.DModel, Layers: c.Layers, Heads: c.Heads,
		Activation: gelu, Epsilon: gpt2mini.LayerNormEps,
		ResidDropout: c.Dropout, EmbedDropout: c.Dropout, Tied: &tied, Type: "float32",
	}
	if c.Vocab == gpt2Vocab {
		end := gpt2Vocab - 1
		v.Begin, v.End = &end, &end
	}
	b, err := json.MarshalIndent(v, "", "  ")
	return append(b, '\n'), err
}

// ReadConfig reads the config.json of a directory. What our model can't do, such
// as another activation, is an error.
func ReadConfig(dir string) (gpt2mini.Config, error) {
	path := filepath.Join(dir, ConfigFile)
	raw, err := os.ReadFile(path)
	if err != nil {
		return gpt2mini.Config{}, fmt.Errorf("hf: %w", err)
	}
	v := config{Activation: gelu, Epsilon: gpt2mini.LayerNormEps, ModelType: "gpt2"}
	if err := json.Unmarshal(raw, &v); err != nil {
		return gpt2mini.Config{}, fmt.Errorf("hf: %s: %w", path, err)
	}
	switch {
	case v.ModelType != "gpt2":
		return gpt2mini.Config{}, fmt.Errorf("hf: %s: %w: model_type %q, not gpt2", path, ErrModel, v.ModelType)
	case v.Activation != gelu && v.Activation != "gelu_pytorch_tanh" && v.Activation != "gelu_fast":
		return gpt2mini.Config{}, fmt.Errorf("hf: %s: %w: activation_function %q, not %s", path, ErrModel, v.Activation, gelu)
	case v.Epsilon != gpt2mini.LayerNormEps:
		return gpt2mini.Config{}, fmt.Errorf("hf: %s: %w: layer_norm_epsilon %g, not %g", path, ErrModel, v.Epsilon, gpt2mini.LayerNormEps)
	}
	c := gpt2mini.Config{
		Vocab: v.Vocab, Block: v.Positions, Layers: v.Layers, Heads: v.Heads, DModel: v.Width,
		Untied: v.Tied != nil && !*v.Tied,
	}
	if err := c.Validate(); err != nil {
		return c, fmt.Errorf("hf: %s: %w", path, err)
	}
	return c, nil
}
