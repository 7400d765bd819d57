package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/bench"
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/comm/inmem"
	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/launch"
)

// benchCollectives are the flags of bench collectives.
type benchCollectives struct {
	bench.CollectivesConfig
	nproc, sizes, types, names, op string
	backend, transport, netns      string
	seconds                        float64
	rounds, threads                int
	json, compare                  bool

	ranks []int
}

func newBenchCollectives() *cobra.Command {
	o := &benchCollectives{}
	cmd := &cobra.Command{
		Use:   "collectives",
		Short: "Measure collectives as nccl-tests does, and beside Gloo and Open MPI",
		Long: `Measures collectives between ranks on this machine and prints nccl-tests' columns.
Every result is checked, before and after the timed calls. Times are of one
blocking call, in microseconds: average, median, 99th percentile and largest, of
the slowest rank; bandwidths come from the median. Lines that begin with * had
more ranks than cores: they measure the scheduler, too.

--compare runs Gloo (torch.distributed) and Open MPI where they are installed,
in turn with ours, --rounds times, and prints ratios of the medians. On one
machine the peers' TCP uses cubic, as ours does, if this is run as root.`,
		Example: `  train bench collectives --nproc 2,4
  train bench collectives --op all-gather,reduce-scatter --type float32,bfloat16 --sizes 4K,1M
  sudo train bench collectives --netns 1gbit --sizes 1M,25M
  sudo train bench collectives --compare --nproc 2,4`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context(), cmd.OutOrStdout()) },
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&o.nproc, "nproc", "2", "numbers of ranks on this machine, such as 2,4")
	f.StringVar(&o.sizes, "sizes", "4K,64K,1M,25M,100M", "bytes of the larger buffer, with K, M or G (powers of 1024)")
	f.StringVar(&o.names, "op", bench.AllReduce, "collectives: "+strings.Join(bench.CollectiveNames(), ", "))
	f.StringVar(&o.types, "type", "float32", "element types: float32, float64, float16, bfloat16, int32, int64, uint8")
	f.StringVar(&o.op, "redop", "sum", "reduction: sum, avg, min, max or prod")
	f.StringVar(&o.backend, "backend", tandem.Ring, "ring, or inmem (ranks as goroutines)")
	f.StringVar(&o.transport, "transport", "auto", "of the ring: auto, shm or tcp")
	f.StringVar(&o.netns, "netns", "", "put each rank into a network namespace of its own behind a link of this rate, such as 1gbit (root, Linux)")
	f.Float64Var(&o.seconds, "seconds", 1, "time for each line, at least 5 calls")
	f.IntVar(&o.threads, "threads", 1, "compute threads per rank")
	f.BoolVar(&o.OutOfPlace, "out-of-place", false, "give source and destination buffers of their own")
	f.BoolVar(&o.compare, "compare", false, "run Gloo and Open MPI as well, in turn, and print ratios")
	f.IntVar(&o.rounds, "rounds", 3, "turns of each implementation with --compare")
	f.BoolVar(&o.json, "json", false, "print one JSON object per line instead of the table")
	return cmd
}

func (o *benchCollectives) run(ctx context.Context, out io.Writer) error {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := o.resolve(); err != nil {
		return err
	}
	switch {
	case !startsRanks(): // this is one
		return o.start(ctx, 0, o.transport, out)
	case o.compare:
		return o.comparison(ctx, out)
	}
	for _, n := range o.ranks {
		if err := o.start(ctx, n, o.transport, out); err != nil {
			return err
		}
	}
	return nil
}

// resolve reads the lists and checks what can be checked before ranks start.
func (o *benchCollectives) resolve() (err error) {
	for _, s := range list(o.nproc) {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 {
			return fmt.Errorf("--nproc %s: %q is not a number of ranks", o.nproc, s)
		}
		o.ranks = append(o.ranks, n)
	}
	for _, s := range list(o.sizes) {
		n, err := parseSize(s)
		if err != nil {
			return fmt.Errorf("--sizes %s: %w", o.sizes, err)
		}
		o.Bytes = append(o.Bytes, n)
	}
	for _, s := range list(o.types) {
		i := slices.IndexFunc(dtype.All(), func(t dtype.Type) bool { return t.String() == s })
		if i < 0 {
			return fmt.Errorf("--type %q: there are %v", s, dtype.All())
		}
		o.Types = append(o.Types, dtype.All()[i])
	}
	for o.Op = comm.Sum; o.Op.String() != o.op; o.Op++ {
		if o.Op == comm.Prod {
			return fmt.Errorf("--redop %q: there are sum, avg, min, max and prod", o.op)
		}
	}
	o.Names, o.Time, o.Cores = list(o.names), time.Duration(o.seconds*float64(time.Second)), cpu.AllowedCores()
	switch {
	case len(o.ranks) == 0 || len(o.Bytes) == 0:
		return errors.New("--nproc and --sizes: nothing to measure")
	case !(o.seconds > 0) || o.rounds < 1 || o.threads < 1:
		return fmt.Errorf("--seconds %g, --rounds %d, --threads %d: all must be positive", o.seconds, o.rounds, o.threads)
	case o.backend != tandem.Ring && o.backend != "inmem":
		return fmt.Errorf("--backend %q: there are ring and inmem", o.backend)
	case o.backend == "inmem" && (o.netns != "" || o.compare):
		return errors.New("--backend inmem is within one process: it takes neither --netns nor --compare")
	case o.compare && (o.names != bench.AllReduce || o.types != "float32" || o.op != "sum" || o.OutOfPlace):
		return errors.New("--compare measures allreduce of float32, sum, in place, as the peers do")
	}
	return nil
}

// parseSize reads 4096, 4K, 25M or 1G.
func parseSize(s string) (int, error) {
	unit := 1
	for i, u := range []string{"K", "M", "G"} {
		if t, ok := strings.CutSuffix(strings.TrimSuffix(strings.ToUpper(s), "IB"), u); ok {
			s, unit = t, 1<<(10*(i+1))
		}
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 || n > 1<<34/unit {
		return 0, fmt.Errorf("%q is not a size of at most 16G", s)
	}
	return n * unit, nil
}

// start measures with n ranks that it starts, or as the rank that this process is.
func (o *benchCollectives) start(ctx context.Context, n int, transport string, out io.Writer) (err error) {
	if o.backend == "inmem" {
		return o.goroutines(ctx, n, out)
	}
	l := launch.Options{Ranks: []int{0}, Passthrough: true, Stdout: out}
	if n > 0 {
		if l.Args, err = o.args(transport); err != nil {
			return err
		}
		if o.netns != "" {
			down, upErr := network(ctx, n, o.netns, &l)
			if upErr != nil {
				return upErr
			}
			defer func() { err = errors.Join(err, down()) }()
		}
	}
	return tandem.Run(ctx, &tandem.Options{Backend: tandem.Ring, Transport: transport, Threads: o.threads, NProc: n, Launch: l},
		func(ctx context.Context, g *tandem.Group) error {
			o.Backend = o.label(transport)
			p := o.printer(out, g.Rank, g.WorldSize)
			return bench.Collectives(ctx, g.Device, g.Comm, o.CollectivesConfig, p)
		})
}

// args are a rank's, which measures as this process was told.
func (o *benchCollectives) args(transport string) ([]string, error) {
	exe, err := os.Executable()
	return []string{exe, "bench", "collectives", "--sizes=" + o.sizes, "--op=" + o.names, "--type=" + o.types, "--redop=" + o.op,
		"--transport=" + transport, "--netns=" + o.netns, fmt.Sprintf("--seconds=%g", o.seconds), fmt.Sprintf("--threads=%d", o.threads),
		fmt.Sprintf("--out-of-place=%t", o.OutOfPlace), fmt.Sprintf("--json=%t", o.json)}, err
}

// label is what rows and ratios call ours.
func (o *benchCollectives) label(transport string) string {
	if transport == "auto" {
		return "tandem"
	}
	return "tandem-" + transport
}

// goroutines measures comm/inmem, whose ranks share this process.
func (o *benchCollectives) goroutines(ctx context.Context, n int, out io.Writer) error {
	dev, err := cpu.New(&cpu.Options{Threads: o.threads})
	if err != nil {
		return err
	}
	all, err := inmem.New(dev, n, nil)
	if err != nil {
		return errors.Join(err, dev.Close())
	}
	o.Backend = "inmem"
	errs := make(chan error, n)
	for r, g := range all {
		go func() { errs <- bench.Collectives(ctx, dev, g, o.CollectivesConfig, o.printer(out, r, n)) }()
	}
	for range all {
		err = errors.Join(err, <-errs)
	}
	for _, g := range all {
		err = errors.Join(err, g.Close())
	}
	return errors.Join(err, dev.Close())
}

// printer writes the rows that rank 0 gets.
func (o *benchCollectives) printer(out io.Writer, rank, size int) func(bench.CollectiveRow) error {
	first := true
	return func(r bench.CollectiveRow) error {
		if rank != 0 {
			return nil
		}
		if o.json {
			return json.NewEncoder(out).Encode(r)
		}
		if first {
			first = false
			if err := bench.CollectivesHeader(out, r.Backend, size, o.Cores); err != nil {
				return err
			}
		}
		return r.Write(out)
	}
}
