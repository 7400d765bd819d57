// Package hf reads and writes GPT-2 as Hugging Face's transformers stores it:
// model.safetensors with the names of GPT2LMHeadModel, and config.json.
package hf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/tandem-go/tandem/checkpoint"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/internal/simd"
	"github.com/tandem-go/tandem/models/gpt2mini"
)

// prefix precedes every parameter of the transformer below the head in files of
// GPT2LMHeadModel; those of the bare GPT2Model, such as OpenAI's on the hub, lack it.
const prefix = "transformer."

// head is the output projection, which has no prefix.
const head = "lm_head.weight"

// masks are buffers that older versions of transformers saved along.
var masks = regexp.MustCompile(`^(h\.\d+\.)?attn\.(masked_)?bias$`)

// ErrModel is in the chain when a file holds another model than was expected.
var ErrModel = errors.New("another model")

// Name is what GPT2LMHeadModel calls the parameter.
func Name(param string) string {
	if param == head {
		return head
	}
	return prefix + param
}

// Tensors lists the parameters of a model under Hugging Face's names. data
// gives each one's values, float32 in little-endian order, by our name.
func Tensors(c gpt2mini.Config, data func(name string) []byte) []checkpoint.Tensor {
	var all []checkpoint.Tensor
	for _, p := range c.Params() {
		all = append(all, checkpoint.Tensor{Name: Name(p.Name), Type: dtype.Float32, Shape: p.Shape, Data: data(p.Name)})
	}
	return all
}

// Metadata is what transformers wants a file's to be.
func Metadata() map[string]string { return map[string]string{"format": "pt"} }

// File is an open file of parameters.
type File struct {
	f     *checkpoint.File
	path  string
	names map[string]string // ours to the file's
}

// Open opens a model.safetensors, or the directory that holds one. Names may have
// the prefix "transformer." or not; masks of the attention are passed over.
func Open(path string) (*File, error) {
	if filepath.Ext(path) != ".safetensors" {
		path = filepath.Join(path, checkpoint.ModelFile)
	}
	f, err := checkpoint.Open(path)
	if err != nil {
		return nil, err
	}
	h := &File{f: f, path: path, names: map[string]string{}}
	for _, n := range f.Names() {
		ours := strings.TrimPrefix(n, prefix)
		if masks.MatchString(ours) {
			continue
		}
		if twin, twice := h.names[ours]; twice {
			f.Close()
			return nil, fmt.Errorf("hf: %s: holds both %q and %q", path, twin, n)
		}
		h.names[ours] = n
	}
	return h, nil
}

// Close closes the file.
func (h *File) Close() error { return h.f.Close() }

// Check compares the file with the model of configuration c and reports the first
// difference, which wraps ErrModel. A file may know more positions than the
// model, which then uses the first ones, and may hold the head's copy of tied
// weights.
func (h *File) Check(c gpt2mini.Config) error {
	known := map[string]bool{}
	if !c.Untied {
		known[head] = true
	}
	for _, p := range c.Params() {
		known[p.Name] = true
		t, ok := h.f.Tensor(h.names[p.Name])
		if !ok {
			return h.differs("it has no %q; %s", p.Name, "the model has more layers or is no GPT-2: see --layers")
		}
		if _, err := converter(t.Type); err != nil {
			return h.differs("%q %w", t.Name, err)
		}
		if p.Name == "wpe.weight" && len(t.Shape) == 2 && t.Shape[1] == p.Shape[1] && t.Shape[0] > p.Shape[0] {
			continue
		}
		if !slices.Equal(t.Shape, p.Shape) {
			return h.differs("%q has the shape %v, the model's is %v%s", t.Name, t.Shape, p.Shape, hints[p.Name])
		}
	}
	for _, n := range h.f.Names() {
		ours := strings.TrimPrefix(n, prefix)
		if !masks.MatchString(ours) && !known[ours] {
			return h.differs("it has %q, which the model lacks: see --layers", n)
		}
	}
	return nil
}

// hints say which flag makes a shape.
var hints = map[string]string{
	"wte.weight": " (vocabulary × --d-model; GPT-2's 50257 tokens need --tokenizer gpt2)",
	"wpe.weight": " (--block × --d-model)",
}

func (h *File) differs(format string, args ...any) error {
	return fmt.Errorf("hf: %s: %w: "+format, append([]any{h.path, ErrModel}, args...)...)
}

// Read reads a parameter's values into dst, which has as many as c says. Half
// precision is widened; of more positions than the model's, the first are read.
func (h *File) Read(name string, dst []float32) error {
	t, ok := h.f.Tensor(h.names[name])
	if !ok {
		return fmt.Errorf("hf: %s has no parameter %q", h.path, name)
	}
	widen, err := converter(t.Type)
	if err != nil {
		return fmt.Errorf("hf: %s: %q %w", h.path, t.Name, err)
	}
	n := t.Type.Size()
	for _, d := range t.Shape {
		n *= d
	}
	if n < len(dst)*t.Type.Size() {
		return fmt.Errorf("hf: %s: %q of shape %v has fewer than %d values", h.path, t.Name, t.Shape, len(dst))
	}
	raw := make([]byte, n)
	if err := h.f.Read(t.Name, raw); err != nil {
		return err
	}
	return widen(dst, raw)
}

// converter turns stored values of a type into float32.
func converter(t dtype.Type) (func(dst []float32, src []byte) error, error) {
	switch t {
	case dtype.Float32:
		return func(dst []float32, src []byte) error {
			for i := range dst {
				dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
			}
			return nil
		}, nil
	case dtype.Float16:
		return half((*simd.Kernels).F16ToF32), nil
	case dtype.BFloat16:
		return half((*simd.Kernels).BF16ToF32), nil
	}
	return nil, fmt.Errorf("is of type %v; convert it to float32, float16 or bfloat16", t)
}

func half(widen func(k *simd.Kernels, dst []float32, src []uint16)) func([]float32, []byte) error {
	return func(dst []float32, src []byte) error {
		k, err := simd.For(simd.Best())
		if err != nil {
			return err
		}
		bits := make([]uint16, len(dst))
		for i := range bits {
			bits[i] = binary.LittleEndian.Uint16(src[2*i:])
		}
		widen(k, dst, bits)
		return nil
	}
}
