package main

import (
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tandem-go/tandem/trainer"
)

// options are the root command's flags.
type options struct {
	train                             trainer.Config
	preset, backend, bucketCap, out   string
	nproc, threads                    int
	json, quiet, printConfig, explain bool
	from                              origins
	in                                *interrupts
	grace                             time.Duration
	lock                              *os.File // on out; nil in a rank that others answer for
}

// addFlags declares the flags. Their defaults are those of the preset, so a
// model flag that isn't given leaves the preset's value.
func (o *options) addFlags(f *pflag.FlagSet) {
	c := &o.train
	f.StringVar(&c.Data, "data", "", "UTF-8 text, the last 10 % of which validates; or a train.bin with its val.bin, as \"train data prepare\" or nanoGPT makes them (default: Newton's Opticks from the Go installation)")
	f.StringVar(&c.Tokenizer, "tokenizer", "", "char (one token a character) or gpt2 (byte-pair encoding, 50257 tokens) (default: char, or what prepared tokens were made with)")
	f.StringVar(&o.out, "out", "", "directory for metrics.jsonl and each rank's log (default: a new one under the system's temporary directory)")
	f.StringVar(&o.preset, "preset", "mini", "model: mini (4 layers, 4 heads, d 128, block 64), small (6, 6, 384, 128) or gpt2 (12, 12, 768, 1024)")
	f.IntVar(&c.Layers, "layers", 0, "transformer blocks (default: the preset's)")
	f.IntVar(&c.Heads, "heads", 0, "attention heads; divides --d-model (default: the preset's)")
	f.IntVar(&c.DModel, "d-model", 0, "width (default: the preset's)")
	f.IntVar(&c.Block, "block", 0, "context length in tokens (default: the preset's)")
	f.Float64Var(&c.Dropout, "dropout", 0, "dropout probability, 0 … <1")

	f.IntVar(&c.Steps, "steps", 1000, "optimizer steps")
	f.IntVar(&c.Batch, "batch", 0, "windows per rank and micro-step (default: the preset's)")
	f.IntVar(&c.GradAccum, "grad-accum", 1, "micro-steps per step; only the last one communicates")
	f.Int64Var(&c.Seed, "seed", 1, "seed of initialisation, sampling and dropout; the batches don't depend on the number of ranks")
	f.Float64Var(&c.LR, "lr", 0, "learning rate after warm-up (default: the preset's)")
	f.Float64Var(&c.MinLR, "min-lr", 0, "learning rate at the last step, reached along a cosine (default: a tenth of --lr)")
	f.IntVar(&c.Warmup, "warmup", 100, "steps of linear warm-up")
	f.Float64Var(&c.WeightDecay, "weight-decay", 0.1, "AdamW's decay, on tensors of two or more dimensions")
	f.Float64Var(&c.Clip, "clip", 1, "bound on the global gradient norm; 0 turns clipping off")

	f.IntVar(&o.nproc, "nproc", 0, "ranks to start on this machine (default: one per GPU, or 2)")
	f.IntVar(&o.threads, "threads", 0, "compute threads per rank (default: TANDEM_THREADS, or cores / ranks)")
	f.DurationVar(&o.grace, "grace", 10*time.Second, "time that the other ranks get to end after one has failed, before they are killed; a first Ctrl-C or SIGTERM waits for the checkpoint, however long it takes")
	f.StringVar(&o.backend, "backend", "auto", "auto, ring (CPU: shared memory within a host, TCP between hosts) or nccl (GPUs)")
	f.StringVar(&o.bucketCap, "bucket-cap-mb", "", "bucket size in MiB: a number, or a list such as 1,4,25 whose last value repeats, or auto, which tries some over the first 100 steps or so and writes autotune.csv (default: a sixteenth of the model, at most 25, and less where that gives fewer than 8 buckets: at least 8)")
	f.Float64Var(&c.FirstBucketMB, "first-bucket-mb", 0, "size of the first bucket in MiB (default: the cap, at most 1)")
	f.Float64Var(&c.LastBucketMB, "last-bucket-mb", 0, "size of the last bucket, the one that can't be hidden, in MiB (default: that of the first)")

	f.IntVar(&c.EvalEvery, "eval-every", 250, "steps between evaluations on all of the validation part")
	f.IntVar(&c.CheckpointEvery, "checkpoint-every", 250, "steps between checkpoints in DIR/checkpoint of --out; the last step and the best evaluations get one, too; 0 for none")
	f.IntVar(&c.Keep, "keep", 2, "checkpoints that stay, besides the best")
	f.StringVar(&c.Resume, "resume", "", "checkpoint, or run, to continue; auto: what --out holds, or a fresh start where that is nothing")
	f.StringVar(&c.InitFrom, "init-from", "", "model.safetensors of Hugging Face's GPT-2 with the initial parameters; of more positions than --block the first are used")
	f.StringVar(&c.Timeline, "timeline", "", "file for a timeline of all ranks, the last 32768 slices of each: opens in ui.perfetto.dev; \"train timeline FILE\" explains it")
	f.IntVar(&c.SampleTokens, "sample", 200, "tokens to generate at the end; 0 for none")
	f.BoolVar(&o.json, "json", false, "print one JSON object per line instead of text")
	f.BoolVar(&o.quiet, "quiet", false, "print nothing but warnings and errors")

	f.String("config", "", "TOML file whose keys are the names of flags; the command line and TANDEM_TRAIN_<FLAG> come first")
	f.BoolVar(&o.printConfig, "print-config", false, "print each value, with where it comes from, as such a file; train nothing")
	f.BoolVar(&o.explain, "explain", false, "print the plan of a step, kernel by kernel, with shapes, memory, measured times and share of the machine's peaks; train nothing")
}

// fromPreset are the flags whose default is the preset's.
var fromPreset = []string{"layers", "heads", "d-model", "block", "batch", "lr"}

// resolve turns flags into a configuration: preset first, then what was given.
func (o *options) resolve(cmd *cobra.Command) error {
	var err error
	if o.from, err = gather(cmd.Flags(), os.Environ()); err != nil {
		return err
	}
	if o.quiet && o.json {
		return errors.New("--quiet and --json contradict each other")
	}
	p, err := trainer.Preset(o.preset)
	if err != nil {
		return fmt.Errorf("--preset: %w", err)
	}
	if o.nproc < 0 || cmd.Flags().Changed("nproc") && o.nproc == 0 {
		return fmt.Errorf("--nproc %d: at least one rank has to train; leave the flag out for the default", o.nproc)
	}
	if o.threads < 0 || cmd.Flags().Changed("threads") && o.threads == 0 {
		return fmt.Errorf("--threads %d: a rank needs at least one compute thread; leave the flag out for the default", o.threads)
	}
	if o.grace <= 0 {
		return fmt.Errorf("--grace %v: must be positive", o.grace)
	}
	c := &o.train
	given := cmd.Flags().Changed
	for _, f := range []struct {
		name string
		dst  *int
		def  int
	}{{"layers", &c.Layers, p.Layers}, {"heads", &c.Heads, p.Heads}, {"d-model", &c.DModel, p.DModel},
		{"block", &c.Block, p.Block}, {"batch", &c.Batch, p.Batch}} {
		if !given(f.name) {
			*f.dst = f.def
		} else if *f.dst < 1 {
			return fmt.Errorf("--%s %d: must be at least 1", f.name, *f.dst)
		}
	}
	if !given("lr") {
		c.LR = p.LR
	} else if !(c.LR > 0) || math.IsInf(c.LR, 0) {
		return fmt.Errorf("--lr %g: must be positive and finite", c.LR)
	}
	if !given("min-lr") {
		c.MinLR = c.LR / 10
	}
	for _, f := range []struct {
		name string
		n    int
	}{{"steps", c.Steps}, {"grad-accum", c.GradAccum}, {"eval-every", c.EvalEvery}, {"keep", c.Keep}} {
		if f.n < 1 {
			return fmt.Errorf("--%s %d: must be at least 1", f.name, f.n)
		}
	}
	if !slices.Contains([]string{"auto", "ring", "nccl"}, o.backend) {
		return fmt.Errorf("--backend %q: there are auto, ring and nccl", o.backend)
	}
	if c.Resume == trainer.ResumeAuto && o.out == "" {
		return errors.New("--resume auto looks for checkpoints in --out, which isn't given")
	}
	if c.Resume != "" && c.Resume != trainer.ResumeAuto && c.InitFrom != "" {
		return errors.New("--resume and --init-from contradict each other; the checkpoint has the parameters")
	}
	if o.out == "" && c.Resume != "" {
		o.out = trainer.OutOf(c.Resume)
	}
	c.Out = o.out
	if o.bucketCap == "auto" {
		c.TuneBuckets = true
		return nil
	}
	c.BucketCapMB, err = parseCaps("--bucket-cap-mb", o.bucketCap)
	return err
}

func parseCaps(flag, s string) ([]float64, error) {
	if s == "" {
		return nil, nil
	}
	var caps []float64
	for part := range strings.SplitSeq(s, ",") {
		mb, err := strconv.ParseFloat(strings.TrimSpace(part), 64)
		if err != nil || !(mb > 0) {
			return nil, fmt.Errorf("%s %q: %q is not a positive number of MiB", flag, s, part)
		}
		caps = append(caps, mb)
	}
	return caps, nil
}
