package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/trainer"
)

// errStopped ends a text that a signal cuts short.
var errStopped = errors.New("stopped")

// sample are the flags of the command.
type sample struct {
	trainer.Sampling
	checkpoint, prompt string
	n, threads         int
}

// newSample is the command; an interrupt ends the text where it is.
func newSample(in *interrupts) *cobra.Command {
	o := &sample{}
	cmd := &cobra.Command{
		Use:   "sample",
		Short: "Continue a text with a trained model",
		Long: `Continues a prompt with the model of a checkpoint and prints it as it is made.
Keys and values of earlier tokens are kept, so a token costs one pass over the
weights. A text longer than the model's block goes on from its last three
quarters of a block.

A directory of Hugging Face's (config.json, model.safetensors) works as well; its
tokens are then GPT-2's.`,
		Example: `  train sample --checkpoint run1 --prompt "Light is" -n 500
  train sample --checkpoint run1/checkpoint/step-00001000 --temperature 0.8 --top-k 40 --seed 7
  train sample --checkpoint run1 --prompt - < prompt.txt`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			in.orderly.Store(true)
			return o.run(cmd.Context(), in.stop, cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&o.checkpoint, "checkpoint", "", "checkpoint, or run, whose latest counts (required)")
	f.StringVar(&o.prompt, "prompt", "", "text to continue; - reads standard input (default: a newline)")
	f.IntVarP(&o.n, "tokens", "n", 200, "tokens to generate")
	f.Float64Var(&o.Temperature, "temperature", 1, "below 1 makes likely tokens likelier, 0 takes the likeliest")
	f.IntVar(&o.TopK, "top-k", 0, "draw from the k likeliest tokens only; 0 for all")
	f.Int64Var(&o.Seed, "seed", 1, "seed of the draws")
	f.IntVar(&o.threads, "threads", 0, "compute threads (default: all cores)")
	return cmd
}

func (o *sample) run(ctx context.Context, stop <-chan struct{}, in io.Reader, out io.Writer) error {
	if o.checkpoint == "" {
		return errors.New("no model; pass --checkpoint DIR, the --out of a run or one of its checkpoints")
	}
	if o.n < 0 || o.threads < 0 {
		return fmt.Errorf("--tokens %d, --threads %d: must not be negative", o.n, o.threads)
	}
	if err := o.Validate(); err != nil {
		return fmt.Errorf("--%w", err)
	}
	prompt := o.prompt
	if prompt == "-" {
		raw, err := io.ReadAll(in)
		if err != nil {
			return fmt.Errorf("--prompt: %w", err)
		}
		prompt = strings.TrimSuffix(string(raw), "\n")
	}
	if o.threads == 0 {
		o.threads = cpu.AllowedCores()
	}
	g, err := trainer.OpenGenerator(o.checkpoint, o.threads)
	if err != nil {
		return fmt.Errorf("--checkpoint: %w", err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-stop:
			cancel(errStopped)
		case <-ctx.Done():
		}
	}()
	err = g.Generate(ctx, out, prompt, o.n, o.Sampling)
	if errors.Is(err, errStopped) {
		err = nil
	}
	if _, werr := fmt.Fprintln(out); err == nil {
		err = werr
	}
	return err
}
