package ddp

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/overlap"
)

// Autotune are the options of a search for bucket caps over the first steps.
// Candidates take turns of Steps steps; after each round the slower half is
// dropped (successive halving), Options.Caps never, until one is left beside
// them. It wins where it is faster by more than the noise. Times are medians,
// of the slowest rank; all ranks switch in the same steps. Training goes on
// meanwhile.
type Autotune struct {
	// Candidates are tried beside Options.Caps. Empty means a quarter to four
	// times its cap, each also with smaller first and last buckets; what
	// Options.Caps sets stays as it is.
	Candidates []bucket.Caps
	// Steps is the length of a turn; its first step isn't timed. 0 means 6.
	Steps int
}

// Trial is what a candidate has shown so far.
type Trial struct {
	Caps    bucket.Caps // defaults filled in
	Buckets int
	// Steps is how many steps were timed, Median the median of the slowest rank
	// in the last round that it took part in.
	Steps  int
	Median time.Duration
	// Chosen says that this is what the search has settled on.
	Chosen bool
}

// tuner is a search under way.
type tuner struct {
	trials  []Trial
	samples [][]float64 // by trial, seconds
	alive   []int       // trials that are still in, the default first
	turn    int         // index into alive
	steps   int         // of a turn
	step    int         // within the turn
	last    time.Time   // when the step before ended
	done    bool
	clock   func() time.Time
}

func (a *Autotune) validate(o *Options) error {
	switch {
	case a == nil:
		return nil
	case o.Hook != nil:
		return errors.New("ddp: Autotune with a Hook, which keeps state by bucket: choose Caps")
	case a.Steps < 0 || a.Steps == 1:
		return fmt.Errorf("ddp: Autotune.Steps is %d; a turn takes at least 2, its first isn't timed", a.Steps)
	}
	return nil
}

// startTuning prepares the search, if one is asked for.
func (d *DDP) startTuning() error {
	a := d.opts.Autotune
	if a == nil {
		return nil
	}
	t := &tuner{steps: a.Steps, clock: time.Now}
	if t.steps == 0 {
		t.steps = 6
	}
	caps := a.Candidates
	if len(caps) == 0 {
		caps = variants(d.opts.Caps, d.caps)
	}
	seen := map[[32]byte]bool{}
	for _, c := range append([]bucket.Caps{d.opts.Caps}, caps...) {
		l, err := bucket.Assign(d.layout.Params, d.order, c)
		if err != nil {
			return err
		}
		if c, err = c.Resolve(d.layout.Params, d.order); err != nil {
			return err
		}
		if seen[l.Hash()] {
			continue
		}
		seen[l.Hash()] = true
		t.alive = append(t.alive, len(t.trials))
		t.trials = append(t.trials, Trial{Caps: c, Buckets: len(l.Buckets)})
	}
	t.samples = make([][]float64, len(t.trials))
	t.done = len(t.trials) == 1
	d.tuner = t
	return nil
}

// variants are the default candidates: set is what the user has set, base the
// caps in use.
func variants(set, base bucket.Caps) []bucket.Caps {
	factors := []float64{0.25, 0.5, 1, 2, 4}
	if len(set.Cap) > 0 {
		factors = []float64{1}
	}
	var all []bucket.Caps
	for _, f := range factors {
		for _, share := range []int{1, 4} {
			c := set
			if len(set.Cap) == 0 {
				c.Cap = []int{max(1, int(f*float64(base.Cap[0])))}
			}
			if set.First == 0 {
				c.First = max(1, c.Cap[0]/share)
			}
			if set.Last == 0 {
				c.Last = max(1, c.Cap[0]/share)
			}
			all = append(all, c)
		}
	}
	return all
}

// tune takes account of a synchronised step that has ended, on every rank.
func (d *DDP) tune() error {
	t := d.tuner
	if t == nil || t.done || d.schedule != overlap.Normal {
		return nil
	}
	now := t.clock()
	if t.step > 0 {
		i := t.alive[t.turn]
		t.samples[i] = append(t.samples[i], now.Sub(t.last).Seconds())
	}
	t.last = now
	if t.step++; t.step < t.steps {
		return nil
	}
	t.step = 0
	if t.turn++; t.turn == len(t.alive) {
		t.turn = 0
		noise, err := d.score()
		if err != nil {
			return err
		}
		if len(t.alive) <= 2 {
			return d.settleTuning(noise)
		}
		t.halve()
	}
	return d.relayout(t.trials[t.alive[t.turn]].Caps)
}

// score gives all ranks the same medians, those of the slowest rank, and the
// noise: half the spread of the default's middle half, at least a hundredth.
func (d *DDP) score() (noise float64, err error) {
	t := d.tuner
	mine := make([]byte, 8*(len(t.trials)+1))
	for i, s := range t.samples {
		putScalar(mine, dtype.Float64, i, quantile(s, 0.5))
	}
	def := t.samples[0]
	putScalar(mine, dtype.Float64, len(t.trials), (quantile(def, 0.75)-quantile(def, 0.25))/2/quantile(def, 0.5))
	all, err := d.gather(d.watch, d.red.Comm(), mine, "autotune")
	if err != nil {
		return 0, err
	}
	worst := func(i int) float64 {
		w := 0.0
		for r := range d.Size() {
			w = max(w, scalar(all[r*len(mine):], dtype.Float64, i))
		}
		return w
	}
	for _, i := range t.alive {
		t.trials[i].Steps = len(t.samples[i])
		t.trials[i].Median = time.Duration(worst(i) * float64(time.Second))
	}
	return max(0.01, worst(len(t.trials))), nil
}

// halve keeps the default and the faster half of the others.
func (t *tuner) halve() {
	others := slices.Clone(t.alive[1:])
	slices.SortStableFunc(others, func(a, b int) int { return int(t.trials[a].Median - t.trials[b].Median) })
	t.alive = append(t.alive[:1], others[:len(others)/2]...)
	slices.Sort(t.alive)
}

func (d *DDP) settleTuning(noise float64) error {
	t := d.tuner
	def, best := t.alive[0], t.alive[len(t.alive)-1]
	if float64(t.trials[best].Median) >= (1-noise)*float64(t.trials[def].Median) {
		best = def
	}
	t.done = true
	c := &t.trials[best]
	c.Chosen = true
	if err := d.relayout(c.Caps); err != nil {
		return err
	}
	d.log.Info("ddp: autotune has settled", "rank", d.Rank(), "caps", c.Caps, "buckets", c.Buckets, "step", c.Median,
		"default", t.trials[def].Median, "gain", 1-float64(c.Median)/float64(t.trials[def].Median), "noise", noise)
	return nil
}

// quantile is that of unsorted values, 0 of none.
func quantile(v []float64, q float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := slices.Clone(v)
	slices.Sort(s)
	return s[min(len(s)-1, int(math.Floor(q*float64(len(s)))))]
}

// Tuned says that the search of Options.Autotune has ended, or that there is
// none: Caps are then final, and what a resumed run should be given.
func (d *DDP) Tuned() bool { return d.tuner == nil || d.tuner.done }

// Trials is what Options.Autotune has tried so far, Options.Caps first.
func (d *DDP) Trials() []Trial {
	if d.tuner == nil {
		return nil
	}
	return slices.Clone(d.tuner.trials)
}

// WriteTrials writes trials as CSV with a header line; sizes are in bytes.
func WriteTrials(w io.Writer, trials []Trial) error {
	c := csv.NewWriter(w)
	rows := [][]string{{"first", "cap", "last", "buckets", "steps", "median_ms", "chosen"}}
	for _, t := range trials {
		rows = append(rows, []string{
			strconv.Itoa(t.Caps.First), fmt.Sprint(t.Caps.Cap), strconv.Itoa(t.Caps.Last), strconv.Itoa(t.Buckets),
			strconv.Itoa(t.Steps), strconv.FormatFloat(t.Median.Seconds()*1e3, 'f', 3, 64), strconv.FormatBool(t.Chosen),
		})
	}
	return c.WriteAll(rows)
}
