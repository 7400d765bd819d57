package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/data"
	"github.com/tandem-go/tandem/launch"
	"github.com/tandem-go/tandem/rendezvous"
	"github.com/tandem-go/tandem/trainer"
)

// newRoot is the command line.
func newRoot(in *interrupts) *cobra.Command {
	o := &options{in: in}
	o.train.Stop = in.stop
	cmd := &cobra.Command{
		Use:   "train",
		Short: "Train GPT-2 on a text, data-parallel, with communication hidden behind the backward pass",
		Long: `Trains GPT-2 on the characters of a text. Without flags it trains the mini
model on Newton's Opticks with 2 ranks on this machine and prints a sample.

The global batch is nproc × batch × grad-accum windows of block characters.
Which windows a step sees depends on --seed and the step alone, so different
numbers of ranks train alike.`,
		Example: `  train --data book.txt --steps 2000 --out run1
  train --preset small --nproc 4 --threads 2
  torchrun --no-python --nproc-per-node 2 ./train --data book.txt`,
		Args:          cobra.NoArgs,
		Version:       version(),
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	o.addFlags(cmd.Flags())
	cmd.Flags().SortFlags = false
	cmd.AddCommand(newSample(in), newBench(), newData(), newTimeline(), newFlight(), newEnv())
	completions(cmd)
	return cmd
}

// version is what `go build` recorded: the module's version or the commit.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v := info.Main.Version
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && !strings.Contains(v, s.Value[:min(12, len(s.Value))]) {
			v += " " + s.Value
		}
	}
	return v + " " + info.GoVersion
}

// run checks everything that can be checked before ranks are started, so that
// a mistake is one line, then trains.
func (o *options) run(cmd *cobra.Command) error {
	if err := o.resolve(cmd); err != nil {
		return err
	}
	if err := o.findText(cmd.Context()); err != nil {
		return err
	}
	if err := o.train.Validate(); err != nil {
		return err
	}
	if o.printConfig {
		return o.from.print(cmd.OutOrStdout(), cmd.Flags(), o.preset, fromPreset)
	}
	if err := o.checkText(cmd.Context()); err != nil {
		return err
	}
	if o.explain {
		return o.explainStep(cmd)
	}
	if o.train.Timeline != "" && ownsFiles() {
		if err := probeFile("--timeline", o.train.Timeline); err != nil {
			return err
		}
	}
	args, err := o.prepareOut(cmd.Context())
	if err != nil {
		return err
	}
	defer o.lock.Close() // only held
	out, closeOut := o.output()
	if startsRanks() && o.nproc != 1 {
		o.in.orderly.Store(true) // the ranks know how
	}
	err = tandem.Run(cmd.Context(), &tandem.Options{
		Backend: o.backend, Threads: o.threads, NProc: o.nproc, Logger: o.logger(out, slog.LevelInfo), FlightDir: o.out,
		Launch: launch.Options{Args: args, Dir: o.out, Append: o.train.Resume != "", Orderly: true, Grace: o.grace, Stdout: out, Ranks: []int{0}, Passthrough: true},
	}, func(ctx context.Context, g *tandem.Group) error { return o.rank(ctx, g, out) })
	return errors.Join(err, closeOut())
}

// startsRanks says that this process is no rank of somebody else's, so that what
// rank 0 will read can be looked at here.
func startsRanks() bool {
	e, err := rendezvous.FromEnv(os.LookupEnv)
	return err == nil && e.Source == rendezvous.SourceNone
}

// findText settles on Newton's Opticks when no text was given.
func (o *options) findText(ctx context.Context) error {
	if o.train.Data != "" {
		return nil
	}
	// runtime.GOROOT is empty in a binary built with -trimpath.
	goroot, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		goroot = []byte(os.Getenv("GOROOT"))
	}
	o.train.Data, err = data.DefaultFile(strings.TrimSpace(string(goroot)))
	return err
}

// prepareOut makes the output directory and returns the ranks' command line,
// which names it and the text, so that all ranks mean the same ones.
func (o *options) prepareOut(ctx context.Context) ([]string, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	if o.out == "" {
		if o.out, err = os.MkdirTemp("", "tandem-train-"); err != nil {
			return nil, fmt.Errorf("--out: %w", err)
		}
	}
	if err := trainer.PrepareOut(o.out); err != nil {
		return nil, err
	}
	o.train.Out = o.out
	if ownsFiles() {
		if o.lock, err = lockOut(o.out); err != nil {
			return nil, err
		}
	}
	if err := o.encodeOnce(ctx); err != nil {
		return nil, err
	}
	return append(append([]string{exe}, os.Args[1:]...), "--out="+o.out, "--data="+o.train.Data), nil
}

// output is where lines for people go: under a progress bar when this process
// owns a terminal.
func (o *options) output() (io.Writer, func() error) {
	if o.quiet {
		return os.Stderr, func() error { return nil }
	}
	if o.json || launch.Launched() || !isTerminal(os.Stdout) {
		return os.Stdout, func() error { return nil }
	}
	w := newBarWriter(os.Stdout)
	return w, w.Close
}

// logger is this process's log from a level on. Of the ranks that we started
// only rank 0 is seen by people, who get its lines and warnings; the others log
// everything, into their own files.
func (o *options) logger(out io.Writer, level slog.Level) *slog.Logger {
	switch {
	case launch.Launched() && os.Getenv("RANK") != "0":
		return slog.New(slog.NewTextHandler(os.Stderr, nil))
	case launch.Launched() || o.json:
		return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	}
	if o.quiet {
		level = slog.LevelWarn
	}
	return slog.New(&lineHandler{out: out, level: level})
}

// rank trains as one rank.
func (o *options) rank(ctx context.Context, g *tandem.Group, out io.Writer) error {
	c := o.train
	c.Logger = o.logger(out, slog.LevelWarn)
	r := &reporter{out: out, json: o.json, quiet: o.quiet, every: 10, total: c.Steps}
	res, err := trainer.Run(ctx, g, c, trainer.Observer{
		Joined:  func() { o.in.orderly.Store(true) },
		Started: func(i *trainer.Info) { r.start(i, c.Data, c.Out) },
		Step:    r.observe,
	})
	if err != nil {
		return err
	}
	if g.Rank == 0 {
		r.finish(res)
	}
	if res.Stopped && !o.in.came() {
		// Whoever started this rank hasn't stopped it: the job isn't done.
		return fmt.Errorf("ended early, after step %d of %d, because another rank was told to: %w",
			res.Steps, c.Steps, &launch.SignalError{Signal: syscall.SIGTERM})
	}
	return nil
}
