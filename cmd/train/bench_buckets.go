package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/bench"
	"github.com/tandem-go/tandem/bench/plot"
	"github.com/tandem-go/tandem/internal/durable"
	"github.com/tandem-go/tandem/internal/netns"
	"github.com/tandem-go/tandem/launch"
)

// benchBuckets are the flags of bench buckets.
type benchBuckets struct {
	bench.BucketsConfig
	nproc, threads int
	json           bool
	caps, ends     string
	netns, out     string

	// What the starting process tells its ranks: where rank 0 leaves its result,
	// and which of the links this is.
	part string
	link int

	rates    []string
	progress io.Writer
}

func newBenchBuckets() *cobra.Command {
	o := &benchBuckets{}
	cmd := &cobra.Command{
		Use:   "buckets",
		Short: "Find the bucket cap that trains fastest, on this machine or over slower links",
		Long: `Trains on random tokens with one bucket cap after another, each with small first
and last buckets and without, and each as it is, without communication and
without overlap, in turn. Every setting has its turn --rounds times, so that the
machine's moods hit all alike. Caps that give the same buckets are measured once.

The table shows medians, spread and the share of communication that is hidden
(as in bench step), the fastest setting, and its gain over the default caps and
over the fastest one without overlap. docs/tune-buckets.md says how to read it.`,
		Example: `  train bench buckets
  train bench buckets --preset small --caps 1,2,4,8 --out sweep
  sudo train bench buckets --netns 1gbit,200mbit --out sweep`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context(), cmd.OutOrStdout()) },
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&o.Preset, "preset", "mini", "mini (V=256, B=8, T=64), small (V=65, B=4, T=128) or gpt2")
	f.StringVar(&o.caps, "caps", "", "caps to try, MiB (default: 0.25,0.5,1,2,5,10,25,50,100)")
	f.StringVar(&o.ends, "small-ends", "both,none", "which ends of the sequence get a small bucket, each to be tried: both, first, last, none")
	f.IntVar(&o.nproc, "nproc", 2, "ranks on this machine")
	f.IntVar(&o.threads, "threads", 1, "compute threads per rank")
	f.IntVar(&o.Steps, "steps", 24, "timed steps of each setting and mode")
	f.IntVar(&o.Rounds, "rounds", 8, "turns of each setting, over which its steps are spread")
	f.IntVar(&o.Warmup, "warmup", 1, "steps of each mode before those of a turn")
	f.StringVar(&o.netns, "netns", "", "rates such as 1gbit,200mbit: measure over a link of each in turn, every rank in a network namespace of its own (root, Linux)")
	f.StringVar(&o.out, "out", "", "directory for buckets.json, buckets.csv, buckets.png and buckets.svg")
	f.BoolVar(&o.json, "json", false, "print one JSON object instead of the table")
	f.StringVar(&o.part, "part", "", "")
	f.IntVar(&o.link, "link", 0, "")
	for _, name := range []string{"part", "link"} {
		f.Lookup(name).Hidden = true
	}
	return cmd
}

func (o *benchBuckets) run(ctx context.Context, stdout io.Writer) error {
	// There is no half of a sweep that would be worth an orderly end.
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := o.resolve(); err != nil {
		return err
	}
	if o.out != "" {
		if err := os.MkdirAll(o.out, 0o755); err != nil {
			return fmt.Errorf("--out: %w", err)
		}
	}
	closeProgress := o.openProgress()
	results, err := o.measure(ctx)
	if err := errors.Join(err, closeProgress()); err != nil || len(results) == 0 {
		return err
	}
	r := &bench.BucketsReport{Bench: "buckets", Links: results}
	if err := o.save(r); err != nil {
		return err
	}
	return o.print(stdout, r)
}

// resolve reads the lists and checks what can be checked before ranks start.
func (o *benchBuckets) resolve() (err error) {
	if o.nproc < 1 || o.threads < 1 || o.Steps < 1 || o.Rounds < 1 || o.Warmup < 1 {
		return fmt.Errorf("--nproc %d, --threads %d, --steps %d, --rounds %d, --warmup %d: all must be at least 1",
			o.nproc, o.threads, o.Steps, o.Rounds, o.Warmup)
	}
	if o.CapMB, err = parseCaps("--caps", o.caps); err != nil {
		return err
	}
	for _, e := range list(o.ends) {
		o.Ends = append(o.Ends, bench.Ends(e))
	}
	o.rates = list(o.netns)
	for _, rate := range o.rates {
		if err := (&netns.Options{Ranks: o.nproc, Rate: rate}).Validate(); err != nil {
			return fmt.Errorf("--netns: %w", err)
		}
	}
	if len(o.rates) > 0 {
		if o.nproc < 2 {
			return errOneRank
		}
		if o.part == "" && !startsRanks() {
			return errors.New("--netns starts ranks of its own, but this process is already a rank; run it without a launcher")
		}
		o.Link = o.rates[min(max(o.link, 0), len(o.rates)-1)]
	}
	return o.Validate()
}

// list splits a comma-separated list; values that come twice count once.
func list(s string) (items []string) {
	for item := range strings.SplitSeq(s, ",") {
		if item = strings.TrimSpace(item); item != "" && !slices.Contains(items, item) {
			items = append(items, item)
		}
	}
	return items
}

// openProgress draws a bar on a terminal; without one, and in ranks, whose
// lines move their starter's bar, progress is lines.
func (o *benchBuckets) openProgress() func() error {
	if launch.Launched() || !isTerminal(os.Stderr) {
		o.progress = os.Stderr
		return func() error { return nil }
	}
	w := newBarWriter(os.Stderr)
	w.barOnly = true
	o.progress = w
	return w.Close
}

// measure returns the results of all links; none in a rank that leaves its own
// to its starter, or that isn't rank 0.
func (o *benchBuckets) measure(ctx context.Context) (all []*bench.BucketsResult, err error) {
	for i := range max(1, len(o.rates)) {
		if o.part != "" && i > 0 {
			break
		}
		r, err := o.measureLink(ctx, i)
		if err != nil {
			return nil, err
		}
		if r != nil {
			all = append(all, r)
		}
	}
	return all, nil
}

func (o *benchBuckets) measureLink(ctx context.Context, i int) (result *bench.BucketsResult, err error) {
	l := launch.Options{Ranks: []int{0}, Passthrough: true, Stderr: o.progress}
	starter := o.part == "" && startsRanks() && o.nproc > 1
	part := o.part
	if starter {
		dir, err := os.MkdirTemp("", "tandem-bench-")
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
		exe, err := os.Executable()
		if err != nil {
			return nil, err
		}
		part = filepath.Join(dir, "buckets.json")
		l.Args = append(append([]string{exe}, os.Args[1:]...), "--part="+part, "--link="+strconv.Itoa(i))
		if len(o.rates) > 0 {
			down, err := network(ctx, o.nproc, o.rates[i], &l)
			if err != nil {
				return nil, err
			}
			defer func() { err = errors.Join(err, down()) }()
		}
	}
	err = tandem.Run(ctx, &tandem.Options{Backend: tandem.Ring, Threads: o.threads, NProc: o.nproc, Launch: l},
		func(ctx context.Context, g *tandem.Group) error {
			r, err := o.rank(ctx, g)
			result = r
			return err
		})
	if err != nil || !starter {
		return result, err
	}
	return readPart(part)
}

// rank measures as one rank. Rank 0 leaves the result in the file that its
// starter asked for, or returns it.
func (o *benchBuckets) rank(ctx context.Context, g *tandem.Group) (*bench.BucketsResult, error) {
	c := o.BucketsConfig
	c.Progress = o.reportEvery(3 * time.Second)
	r, err := bench.Buckets(ctx, g, c)
	if err != nil || g.Rank != 0 {
		return nil, err
	}
	if o.part == "" {
		return r, nil
	}
	return nil, durable.Write(o.part, func(w io.Writer) error { return json.NewEncoder(w).Encode(r) })
}

func readPart(path string) (*bench.BucketsResult, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("rank 0 left no result: %w", err)
	}
	r := &bench.BucketsResult{}
	if err := json.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("rank 0's result: %w", err)
	}
	return r, nil
}

// reportEvery writes a line about the whole sweep, all links, now and then. The
// pace on links still to come is guessed to be that of this one.
func (o *benchBuckets) reportEvery(d time.Duration) func(bench.BucketsProgress) {
	links := max(1, len(o.rates))
	var last time.Time
	return func(p bench.BucketsProgress) {
		if time.Since(last) < d && p.Done < p.Total {
			return
		}
		last = time.Now()
		left := p.Left + time.Duration(links-1-o.link)*(p.Elapsed+p.Left)
		fmt.Fprintf(o.progress, "step %d/%d  %s: %v; about %v left\n",
			o.link*p.Total+p.Done, links*p.Total, o.Link, p.Setting, left.Round(time.Second))
	}
}

// save writes the files.
func (o *benchBuckets) save(r *bench.BucketsReport) error {
	if o.out == "" {
		return nil
	}
	files := map[string]func(io.Writer) error{
		"buckets.json": func(w io.Writer) error {
			e := json.NewEncoder(w)
			e.SetIndent("", "  ")
			return e.Encode(r)
		},
		"buckets.csv": r.WriteCSV,
	}
	for _, format := range plot.Formats() {
		files["buckets."+format] = func(w io.Writer) error { return plot.Buckets(w, format, r) }
	}
	for name, content := range files {
		if err := durable.Write(filepath.Join(o.out, name), content); err != nil {
			return fmt.Errorf("--out: %w", err)
		}
	}
	return nil
}

func (o *benchBuckets) print(w io.Writer, r *bench.BucketsReport) error {
	if o.json {
		return json.NewEncoder(w).Encode(r)
	}
	for i, l := range r.Links {
		if i > 0 {
			fmt.Fprintln(w)
		}
		if err := l.WriteTable(w); err != nil {
			return err
		}
	}
	if o.out != "" {
		fmt.Fprintf(w, "written: %s, with .csv, .png and .svg\n", filepath.Join(o.out, "buckets.json"))
	}
	return nil
}
