package hf_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/checkpoint"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/models/gpt2mini"
	"github.com/tandem-go/tandem/models/gpt2mini/hf"
)

func tiny() gpt2mini.Config {
	return gpt2mini.Config{Vocab: 5, Block: 4, Layers: 2, Heads: 2, DModel: 6}
}

// values are other numbers for each name and element, exact in half precision.
func values(name string, n int) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(i%16) + float32(len(name))/4
	}
	return v
}

func raw(v []float32) []byte {
	b := make([]byte, 0, 4*len(v))
	for _, x := range v {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(x))
	}
	return b
}

func size(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

func tensors(c gpt2mini.Config) []checkpoint.Tensor {
	shapes := map[string][]int{}
	for _, p := range c.Params() {
		shapes[p.Name] = p.Shape
	}
	return hf.Tensors(c, func(name string) []byte { return raw(values(name, size(shapes[name]))) })
}

func write(t *testing.T, ts []checkpoint.Tensor) string {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, checkpoint.Write(&b, ts, hf.Metadata()))
	path := filepath.Join(t.TempDir(), "model.safetensors")
	require.NoError(t, os.WriteFile(path, b.Bytes(), 0o600))
	return path
}

func open(t *testing.T, path string) *hf.File {
	t.Helper()
	f, err := hf.Open(path)
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

// requireModel reads every parameter and compares it.
func requireModel(t *testing.T, f *hf.File, c gpt2mini.Config) {
	t.Helper()
	require.NoError(t, f.Check(c))
	for _, p := range c.Params() {
		got := make([]float32, size(p.Shape))
		require.NoError(t, f.Read(p.Name, got))
		require.Equal(t, values(p.Name, len(got)), got, p.Name)
	}
}

// Without it files of transformers, old and new, with and without a prefix, in
// half precision or with masks and the tied head along, would not open.
func TestReadsWhatOthersWrite(t *testing.T) {
	c := tiny()
	requireModel(t, open(t, write(t, tensors(c))), c)
	requireModel(t, open(t, filepath.Dir(write(t, tensors(c)))), c)

	bare := tensors(c)
	for i := range bare {
		bare[i].Name = bare[i].Name[len("transformer."):]
	}
	mask := checkpoint.Tensor{Name: "h.0.attn.bias", Type: dtype.Uint8, Shape: []int{1, 1, 4, 4}, Data: make([]byte, 16)}
	masked := checkpoint.Tensor{Name: "h.1.attn.masked_bias", Type: dtype.Float32, Data: make([]byte, 4)}
	lmHead := checkpoint.Tensor{Name: "lm_head.weight", Type: dtype.Float32, Shape: []int{5, 6}, Data: make([]byte, 120)}
	requireModel(t, open(t, write(t, append(bare, mask, masked, lmHead))), c)

	bf := tensors(c)
	for i := range bf {
		short := make([]byte, 0, len(bf[i].Data)/2)
		for j := 0; j < len(bf[i].Data); j += 4 {
			short = append(short, bf[i].Data[j+2:j+4]...)
		}
		bf[i].Type, bf[i].Data = dtype.BFloat16, short
	}
	requireModel(t, open(t, write(t, bf)), c)

	longer := c
	longer.Block = 9
	requireModel(t, open(t, write(t, tensors(longer))), c)

	untied := c
	untied.Untied = true
	f := open(t, write(t, tensors(untied)))
	requireModel(t, f, untied)
	require.NoError(t, f.Check(c), "the head of a tied model may be in the file")
}

// Without it another model would be loaded in part, or the difference not named.
func TestFirstDifferenceIsNamed(t *testing.T) {
	f := open(t, write(t, tensors(tiny())))
	for want, change := range map[string]func(*gpt2mini.Config){
		`"transformer.wte.weight" has the shape [5 6], the model's is [65 6]`: func(c *gpt2mini.Config) { c.Vocab = 65 },
		`"transformer.wpe.weight" has the shape [4 6], the model's is [8 6]`:  func(c *gpt2mini.Config) { c.Block = 8 },
		`it has no "h.2.ln_1.weight"`:                                         func(c *gpt2mini.Config) { c.Layers = 3 },
		`it has "transformer.h.1.ln_1.weight", which the model lacks`:         func(c *gpt2mini.Config) { c.Layers = 1 },
		`it has no "lm_head.weight"`:                                          func(c *gpt2mini.Config) { c.Untied = true },
	} {
		c := tiny()
		change(&c)
		err := f.Check(c)
		require.ErrorIs(t, err, hf.ErrModel)
		require.ErrorContains(t, err, want)
	}
	twice := tensors(tiny())
	twice = append(twice, twice[0])
	twice[len(twice)-1].Name = "wte.weight"
	_, err := hf.Open(write(t, twice))
	require.ErrorContains(t, err, "both")
	odd := tensors(tiny())
	odd[0].Type = dtype.Int32
	require.ErrorContains(t, open(t, write(t, odd)).Check(tiny()), "convert it")
	require.ErrorContains(t, f.Read("none", nil), "no parameter")
	require.ErrorContains(t, f.Read("ln_f.bias", make([]float32, 7)), "fewer than 7")
}

// Without it transformers could build another model around our parameters, or
// we around theirs.
func TestConfig(t *testing.T) {
	dir := t.TempDir()
	put := func(b []byte) { require.NoError(t, os.WriteFile(filepath.Join(dir, hf.ConfigFile), b, 0o600)) }
	for _, c := range []gpt2mini.Config{tiny(), {Vocab: 50257, Block: 8, Layers: 1, Heads: 1, DModel: 4, Untied: true}} {
		b, err := hf.Config(c)
		require.NoError(t, err)
		put(b)
		got, err := hf.ReadConfig(dir)
		require.NoError(t, err)
		require.NoError(t, c.Validate())
		require.Equal(t, c, got)
		var v map[string]any
		require.NoError(t, json.Unmarshal(b, &v))
		require.Equal(t, "gpt2", v["model_type"])
		require.Equal(t, "gelu_new", v["activation_function"])
		require.Equal(t, c.Vocab == 50257, v["eos_token_id"] != nil)
	}
	// As OpenAI's on the hub, but for the size.
	put([]byte(`{"activation_function":"gelu_new","architectures":["GPT2LMHeadModel"],"attn_pdrop":0.1,"bos_token_id":50256,"layer_norm_epsilon":1e-05,"model_type":"gpt2","n_ctx":1024,"n_embd":768,"n_head":12,"n_layer":12,"n_positions":1024,"vocab_size":50257}`))
	got, err := hf.ReadConfig(dir)
	require.NoError(t, err)
	want, err := gpt2mini.Preset("gpt2")
	require.NoError(t, err)
	require.NoError(t, want.Validate())
	require.Equal(t, want, got)
	for bad, want := range map[string]string{
		`{"model_type":"llama"}`:         "llama",
		`{"activation_function":"relu"}`: "relu",
		`{"layer_norm_epsilon":1e-6}`:    "1e-06",
		`{}`:                             "vocab is 0",
		`[`:                              "config.json",
	} {
		put([]byte(bad))
		_, err := hf.ReadConfig(dir)
		require.ErrorContains(t, err, want)
	}
	_, err = hf.ReadConfig(t.TempDir())
	require.ErrorIs(t, err, os.ErrNotExist)
}
