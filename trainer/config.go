// Package trainer is the training loop behind cmd/train: GPT-2 on a text,
// data-parallel over the ranks of a tandem.Group. It has no command line, so
// other programs can call it.
package trainer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"

	"github.com/tandem-go/tandem/data"
	"github.com/tandem-go/tandem/models/gpt2mini"
)

// Config says what to train and how. The zero value of a field means the
// default in brackets; where 0 itself is a sensible value the field says so.
type Config struct {
	// Data is the path of a UTF-8 text, or of tokens that data.Prepare wrote. Required.
	Data string
	// Tokenizer is data.CharTokenizer or data.GPT2Tokenizer [characters, or
	// what made the tokens].
	Tokenizer string
	// Out is the directory of metrics.jsonl; empty writes none.
	Out string
	// CheckpointEvery is the number of steps between checkpoints, which go to
	// Out/checkpoint; the last step and evaluations with the lowest loss so far get
	// one, too. One that is due while the last is still being written comes later. 0
	// writes none.
	CheckpointEvery int
	// Keep is how many checkpoints stay [2], besides that of the lowest validation loss.
	Keep int
	// Resume is the checkpoint to continue, or a directory of them or of a run, of
	// which the latest counts; ResumeAuto is Out, or a fresh start where that has
	// none. Rank 0 reads it. Steps and the learning rate's schedule are this
	// configuration's.
	Resume string
	// InitFrom is a file or directory with a model.safetensors of Hugging Face's
	// that has the initial parameters (package hf). It may know more than Block
	// positions, the first of which are used. Rank 0 reads it.
	InitFrom string
	// Timeline is the file in which all ranks' timelines end, a Chrome trace
	// (package trace); empty records none.
	Timeline string

	// Layers [4], Heads [4], DModel [128] and Block [64] give the model; Dropout is 0 … <1 [0].
	Layers, Heads, DModel, Block int
	Dropout                      float64

	// Steps is the number of optimizer steps [1000].
	Steps int
	// Batch is the number of windows per rank and micro-step [16].
	Batch int
	// GradAccum is the number of micro-steps per step [1].
	GradAccum int
	// Seed makes initialisation, sampling and dropout [0 is a seed like any other].
	Seed int64

	// LR is the learning rate after Warmup steps, which falls along a cosine to
	// MinLR at the last step. [1e-3, 1e-4, 100]; MinLR and Warmup are taken as
	// they are when LR is set.
	LR, MinLR float64
	Warmup    int
	// WeightDecay applies to tensors of two or more dimensions. 0 is none.
	WeightDecay float64
	// Clip bounds the global gradient norm. 0 is no clipping.
	Clip float64

	// BucketCapMB are the bucket sizes in MiB, the last repeats; empty picks at
	// least 8 buckets. FirstBucketMB and LastBucketMB are 0 for the rule's own choice.
	BucketCapMB                 []float64
	FirstBucketMB, LastBucketMB float64
	// TuneBuckets searches for better sizes over the first steps (ddp.Autotune);
	// those set above stay. What was tried ends in autotune.csv in Out.
	TuneBuckets bool

	// EvalEvery is the number of steps between evaluations [250]; the last step
	// is always evaluated.
	EvalEvery int
	// LogEvery is the number of steps between reported lines [10].
	LogEvery int
	// SampleTokens is the length of the text generated at the end; 0 is none.
	SampleTokens int

	// Stop, once closed on any rank, ends the run after the step under way or the
	// next, on all ranks: with a checkpoint, then an evaluation, and no sample
	// (Result.Stopped). nil never does.
	Stop <-chan struct{} `json:"-"`
	// Logger gets the rank's own log; nil discards.
	Logger *slog.Logger `json:"-"`
}

// Preset is the model called name (mini, small or gpt2; see gpt2mini.Preset)
// with a batch and a learning rate that suit it.
func Preset(name string) (Config, error) {
	m, err := gpt2mini.Preset(name)
	if err != nil {
		return Config{}, err
	}
	c := Config{Layers: m.Layers, Heads: m.Heads, DModel: m.DModel, Block: m.Block, Batch: 16, LR: 1e-3, MinLR: 1e-4}
	switch name {
	case "small":
		c.Batch = 8
	case "gpt2":
		c.Batch, c.LR, c.MinLR = 1, 6e-4, 6e-5
	}
	return c, nil
}

func or[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// Validate fills in the defaults and reports the first value that makes no sense.
func (c *Config) Validate() error {
	mini, err := Preset("mini")
	if err != nil {
		return err
	}
	or(&c.Layers, mini.Layers)
	or(&c.Heads, mini.Heads)
	or(&c.DModel, mini.DModel)
	or(&c.Block, mini.Block)
	or(&c.Batch, mini.Batch)
	or(&c.Steps, 1000)
	or(&c.GradAccum, 1)
	or(&c.EvalEvery, 250)
	or(&c.LogEvery, 10)
	or(&c.Keep, 2)
	if c.LR == 0 {
		c.LR, c.MinLR, c.Warmup = mini.LR, mini.MinLR, 100
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Data == "" {
		return errors.New("no text to train on; pass --data FILE with any UTF-8 text")
	}
	for _, v := range []struct {
		name string
		n    int
	}{{"steps", c.Steps}, {"batch", c.Batch}, {"grad-accum", c.GradAccum}, {"eval-every", c.EvalEvery}, {"keep", c.Keep},
		{"layers", c.Layers}, {"heads", c.Heads}, {"d-model", c.DModel}, {"block", c.Block}} {
		if v.n < 1 {
			return fmt.Errorf("--%s %d: must be at least 1", v.name, v.n)
		}
	}
	return c.validateRanges()
}

func (c *Config) validateRanges() error {
	if c.DModel%c.Heads != 0 {
		return fmt.Errorf("--d-model %d is not divisible by --heads %d; choose a multiple of %d", c.DModel, c.Heads, c.Heads)
	}
	if c.Warmup < 0 {
		return fmt.Errorf("--warmup %d: must not be negative", c.Warmup)
	}
	if c.SampleTokens < 0 {
		return fmt.Errorf("--sample %d: must not be negative; 0 samples nothing", c.SampleTokens)
	}
	if c.CheckpointEvery < 0 {
		return fmt.Errorf("--checkpoint-every %d: must not be negative; 0 writes none", c.CheckpointEvery)
	}
	if !(c.Dropout >= 0 && c.Dropout < 1) {
		return fmt.Errorf("--dropout %g: must be at least 0 and less than 1", c.Dropout)
	}
	for _, v := range []struct {
		name string
		x    float64
	}{{"lr", c.LR}, {"min-lr", c.MinLR}, {"weight-decay", c.WeightDecay}, {"clip", c.Clip},
		{"first-bucket-mb", c.FirstBucketMB}, {"last-bucket-mb", c.LastBucketMB}} {
		if !(v.x >= 0) || math.IsInf(v.x, 0) {
			return fmt.Errorf("--%s %g: must be finite and not negative", v.name, v.x)
		}
	}
	if c.MinLR > c.LR {
		return fmt.Errorf("--min-lr %g is above --lr %g", c.MinLR, c.LR)
	}
	for _, mb := range c.BucketCapMB {
		if !(mb > 0) || math.IsInf(mb, 0) {
			return fmt.Errorf("--bucket-cap-mb %g: must be a positive number of MiB", mb)
		}
	}
	return nil
}

// LoadText opens the text and checks that it is long enough for the model.
func (c *Config) LoadText(ctx context.Context) (*data.Source, error) {
	text, err := data.Open(ctx, c.Data, &data.Options{Tokenizer: c.Tokenizer})
	if err != nil {
		return nil, err
	}
	if err := text.Check(c.Block); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", c.Data, err), text.Close())
	}
	return text, nil
}

func (c *Config) model(vocab, batch int) gpt2mini.Config {
	return gpt2mini.Config{
		Vocab: vocab, Block: c.Block, Seq: c.Block, Layers: c.Layers, Heads: c.Heads, DModel: c.DModel,
		Batch: batch, Dropout: c.Dropout,
	}
}
