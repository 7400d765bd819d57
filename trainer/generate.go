package trainer

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/tandem-go/tandem/checkpoint"
	"github.com/tandem-go/tandem/data"
	"github.com/tandem-go/tandem/models/gpt2mini"
	"github.com/tandem-go/tandem/models/gpt2mini/hf"
	"github.com/tandem-go/tandem/models/gpt2mini/infer"
)

// Sampling says how tokens are drawn.
type Sampling = infer.Sampler

// Generator continues texts with a trained model.
type Generator struct {
	// Step is the training step of a checkpoint, -1 where that isn't known.
	Step int
	// Model is its size.
	Model     ModelState
	tokenizer data.Tokenizer
	decoder   *infer.Decoder
}

// OpenGenerator loads the checkpoint that path means: a checkpoint's directory,
// or the latest of a run; or a directory of Hugging Face's with config.json and
// model.safetensors, whose tokens are then GPT-2's. threads compute; 0 means one.
func OpenGenerator(path string, threads int) (*Generator, error) {
	g := &Generator{Step: -1}
	dir := path
	var c gpt2mini.Config
	vocab := data.Vocab{Tokenizer: data.GPT2Tokenizer}
	cp, err := checkpoint.Find(path)
	switch {
	case err == nil:
		var s State
		if err := cp.State(&s); err != nil {
			return nil, err
		}
		dir, c, vocab, g.Step = cp.Dir, s.Model.Config(), s.Vocab, s.Step
	case errors.Is(err, checkpoint.ErrNone):
		var herr error
		if c, herr = hf.ReadConfig(path); herr != nil {
			return nil, err // that there is no checkpoint is the likelier mistake
		}
		vocab.Size = c.Vocab
	default:
		return nil, err
	}
	g.Model = modelState(c)
	if g.tokenizer, err = vocab.Open(); err != nil {
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	return g, g.load(dir, c, threads)
}

func (g *Generator) load(dir string, c gpt2mini.Config, threads int) error {
	f, err := hf.Open(dir)
	if err != nil {
		return err
	}
	err = f.Check(c)
	if err == nil {
		sizes := map[string]int{}
		for _, p := range c.Params() {
			sizes[p.Name] = elems(p.Shape)
		}
		g.decoder, err = infer.New(c, func(name string) ([]float32, error) {
			values := make([]float32, sizes[name])
			return values, f.Read(name, values)
		}, &infer.Options{Threads: threads})
	}
	return errors.Join(err, f.Close())
}

func elems(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

// Generate writes prompt and n tokens that continue it to w, each as soon as its
// characters are whole. An empty prompt is a newline, or the first token where
// the vocabulary has none.
func (g *Generator) Generate(ctx context.Context, w io.Writer, prompt string, n int, s Sampling) error {
	g.decoder.Reset()
	ids, err := g.tokenizer.Encode(prompt)
	if err != nil {
		return fmt.Errorf("the prompt: %w", err)
	}
	if len(ids) == 0 {
		if ids, err = g.tokenizer.Encode("\n"); err != nil {
			ids = []int32{0}
		}
	}
	if _, err := io.WriteString(w, prompt); err != nil {
		return err
	}
	text := data.NewTextWriter(w, g.tokenizer)
	err = infer.Generate(ctx, g.decoder, &s, ids, n, func(token int32) error { return text.Write(token) })
	return errors.Join(err, text.Close())
}
