package bench

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/models/gpt2mini"
)

// BucketsConfig says what Buckets measures. All ranks use the same one.
type BucketsConfig struct {
	// Preset is the model with its batch, as in StepConfig.
	Preset string
	// Link names what connects the ranks, for reports; "" means "this machine".
	Link string
	// CapMB are the caps in MiB to try, ascending; empty means DefaultCapMB.
	CapMB []float64
	// Ends are the treatments of the first and the last bucket to try with each
	// cap; empty means SmallBoth and SmallNone.
	Ends []Ends
	// Rounds is how often each setting has its turn; 0 means 8. Slow changes of
	// the machine's speed then hit all settings alike.
	Rounds int
	// Steps is how many steps of each mode are timed for each setting, over all
	// rounds and rounded up to a multiple of them; 0 means 24.
	Steps int
	// Warmup is how many steps of each mode run before those of each round; 0 means 1.
	Warmup int
	// Progress, if set, is called on rank 0 after every few steps.
	Progress func(BucketsProgress)
}

// BucketsProgress says how far a sweep is.
type BucketsProgress struct {
	// Done and Total count steps of every mode and setting, warm-up included.
	Done, Total int
	// Elapsed is the time since the first of them, and Left that which the rest
	// will take at the same pace.
	Elapsed, Left time.Duration
	// Setting is the one that runs.
	Setting Setting
}

// DefaultCapMB are the caps in MiB that Buckets tries by default.
func DefaultCapMB() []float64 { return []float64{0.25, 0.5, 1, 2, 5, 10, 25, 50, 100} }

// Validate fills defaults in and names what is out of bounds. Buckets does it
// too; a program may want to complain before it starts other ranks.
func (c *BucketsConfig) Validate() error {
	if c.Link == "" {
		c.Link = "this machine"
	}
	if len(c.CapMB) == 0 {
		c.CapMB = DefaultCapMB()
	}
	if len(c.Ends) == 0 {
		c.Ends = []Ends{SmallBoth, SmallNone}
	}
	c.Rounds = cmp.Or(c.Rounds, 8)
	c.Steps = cmp.Or(c.Steps, 24)
	c.Warmup = cmp.Or(c.Warmup, 1)
	if c.Rounds < 1 || c.Steps < 1 || c.Warmup < 1 {
		return fmt.Errorf("bench: %d steps in %d rounds after %d each for warm-up: all must be at least 1", c.Steps, c.Rounds, c.Warmup)
	}
	if _, err := gpt2mini.Preset(c.Preset); err != nil {
		return err
	}
	for _, e := range c.Ends {
		if !slices.Contains(AllEnds(), e) {
			return fmt.Errorf("bench: small ends %q: want one of %v", e, AllEnds())
		}
	}
	c.CapMB = slices.Clone(c.CapMB)
	slices.Sort(c.CapMB)
	for _, mb := range c.CapMB {
		if !(mb > 0) || mb > maxCapMB {
			return fmt.Errorf("bench: a cap of %v MiB: want more than 0 and at most %d", mb, maxCapMB)
		}
	}
	return nil
}

const maxCapMB = 1 << 20 // a tebibyte

// sweeper is one rank of the sweep.
type sweeper struct {
	*rig
	cfg   BucketsConfig
	tries []*try
	bytes int // of all gradients

	begun time.Time
	done  int
}

// Buckets trains on random tokens with one bucket layout after another and
// measures each as Step does: normal, without communication and without
// overlap, in turn. Every setting has Rounds turns, in an order that is reversed
// from round to round. Settings that give the same buckets are measured once.
// Only one setting's memory is held at a time.
//
// All ranks call it; each gets its own clock's result, and rank 0's is the one
// to report. The default caps are always among the settings.
func Buckets(ctx context.Context, g *tandem.Group, c BucketsConfig) (*BucketsResult, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	s := &sweeper{cfg: c}
	var err error
	if s.rig, err = newRig(g, c.Preset); err != nil {
		return nil, err
	}
	if err := s.plan(ctx); err != nil {
		return nil, err
	}
	s.begun = time.Now()
	for round := range c.Rounds {
		for i := range s.tries {
			if round%2 == 1 {
				i = len(s.tries) - 1 - i
			}
			if err := s.turn(ctx, s.tries[i]); err != nil {
				return nil, fmt.Errorf("bench: %v, round %d: %w", s.tries[i].settings[0], round, err)
			}
		}
	}
	// Who leaves first would look like a failure to those still at work.
	if err := g.Comm.Barrier(ctx); err != nil {
		return nil, err
	}
	return s.result(), nil
}

// turn opens a setting, takes its steps of one round, and closes it.
func (s *sweeper) turn(ctx context.Context, t *try) error {
	if err := s.open(ctx, t.caps); err != nil {
		return err
	}
	err := s.steps(ctx, t)
	if cerr := s.ddp.Close(); err == nil {
		err = cerr
	}
	s.ddp = nil
	// The next setting's arenas should find this one's memory free.
	runtime.GC()
	return err
}

func (s *sweeper) perRound() int { return (s.cfg.Steps + s.cfg.Rounds - 1) / s.cfg.Rounds }

func (s *sweeper) steps(ctx context.Context, t *try) error {
	for i := range s.cfg.Warmup + s.perRound() {
		for m := range modes {
			if err := s.prepare(ctx, m); err != nil {
				return failed(m, i, err)
			}
			wall, err := s.step(ctx)
			if err != nil {
				return failed(m, i, err)
			}
			if i >= s.cfg.Warmup {
				t.record(m, wall, s.ddp.Stats().Times)
			}
		}
		s.report(t)
	}
	return nil
}

func (s *sweeper) report(t *try) {
	s.done += len(modes)
	if s.cfg.Progress == nil || s.g.Rank != 0 {
		return
	}
	p := BucketsProgress{
		Done: s.done, Total: s.cfg.Rounds * len(s.tries) * (s.cfg.Warmup + s.perRound()) * len(modes),
		Elapsed: time.Since(s.begun), Setting: t.settings[0],
	}
	p.Left = time.Duration(float64(p.Elapsed) / float64(p.Done) * float64(p.Total-p.Done))
	s.cfg.Progress(p)
}
