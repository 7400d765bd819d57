package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/bench"
	"github.com/tandem-go/tandem/launch"
	"github.com/tandem-go/tandem/models/gpt2mini"
)

func newBench() *cobra.Command {
	cmd := &cobra.Command{Use: "bench", Short: "Measure training steps", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(newBenchStep(), newBenchBuckets(), newBenchCollectives())
	return cmd
}

// benchStep are the flags of bench step.
type benchStep struct {
	bench.StepConfig
	nproc, threads  int
	json            bool
	rate, bucketCap string
}

func newBenchStep() *cobra.Command {
	o := &benchStep{}
	cmd := &cobra.Command{
		Use:   "step",
		Short: "Time a training step: normal, without communication, without overlap, interleaved",
		Long: `Times a training step on random tokens in three modes that take turns, step by
step: normal, without communication (what remains is compute) and without
overlap (communication starts after the backward pass).

hidden_share = 1 − (step − step_without_comm) / (step_without_overlap − step_without_comm)

The last line is one JSON object; all times are medians in milliseconds.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) },
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&o.Preset, "preset", "mini", "mini (V=256, B=8, T=64), small (V=65, B=4, T=128) or gpt2")
	f.IntVar(&o.nproc, "nproc", 2, "ranks on this machine")
	f.IntVar(&o.threads, "threads", 1, "compute threads per rank")
	f.IntVar(&o.Steps, "steps", 60, "timed steps of each mode")
	f.StringVar(&o.bucketCap, "bucket-cap-mb", "", "bucket size in MiB: a number or a list whose last value repeats (default: a sixteenth of the model)")
	f.StringVar(&o.rate, "netns", "", "put each rank into a network namespace of its own behind a link of this rate, such as 1gbit (root, Linux)")
	f.BoolVar(&o.json, "json", false, "print the JSON object only")
	return cmd
}

func (o *benchStep) run(ctx context.Context) (err error) {
	if o.nproc < 1 || o.threads < 1 || o.Steps < 1 {
		return fmt.Errorf("--nproc %d, --threads %d, --steps %d: all must be at least 1", o.nproc, o.threads, o.Steps)
	}
	if _, err := gpt2mini.Preset(o.Preset); err != nil {
		return fmt.Errorf("--preset: %w", err)
	}
	if o.BucketCapMB, err = parseCaps("--bucket-cap-mb", o.bucketCap); err != nil {
		return err
	}
	l := launch.Options{Ranks: []int{0}, Passthrough: true}
	if o.rate != "" && !launch.Launched() {
		down, upErr := network(ctx, o.nproc, o.rate, &l)
		if upErr != nil {
			return upErr
		}
		defer func() { err = errors.Join(err, down()) }()
	}
	return tandem.Run(ctx, &tandem.Options{Backend: tandem.Ring, Threads: o.threads, NProc: o.nproc, Launch: l},
		func(ctx context.Context, g *tandem.Group) error {
			r, err := bench.Step(ctx, g, o.StepConfig)
			if err != nil || g.Rank != 0 {
				return err
			}
			return o.print(os.Stdout, r)
		})
}

func (o *benchStep) print(w io.Writer, r *bench.StepResult) error {
	if !o.json {
		fmt.Fprintf(w, "%s, %d ranks × %s threads on %s, %d buckets, medians of %d steps\n",
			r.Preset, r.WorldSize, strconv.Itoa(r.Threads), r.Device, r.Buckets, r.Steps)
		fmt.Fprintf(w, "step %.2f ms (forward %.2f, backward %.2f, update %.2f); without communication %.2f, without overlap %.2f\n",
			r.StepMS, r.ForwardMS, r.BackwardMS, r.OptimizerMS, r.NoCommMS, r.NoOverlapMS)
		fmt.Fprintf(w, "communication %.2f ms, exposed %.2f, hidden: %v; %s tokens/s, %.1f GFLOP/s a rank\n",
			r.CommMS, r.ExposedCommMS, r.HiddenShare, thousands(r.TokensPerS), r.GFLOPS)
	}
	return json.NewEncoder(w).Encode(r)
}
