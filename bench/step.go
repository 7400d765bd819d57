// Package bench measures training steps, as structs that programs can use and
// JSON that files can hold.
package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/ddp"
	"github.com/tandem-go/tandem/models/gpt2mini"
	"github.com/tandem-go/tandem/optim"
	"github.com/tandem-go/tandem/overlap"
)

// StepConfig says what Step measures.
type StepConfig struct {
	// Preset is the model with its batch: mini (V=256, B=8, T=64), small (V=65,
	// B=4, T=128) or gpt2.
	Preset string
	// Steps is how many steps of each mode are timed; 0 means 60.
	Steps int
	// Warmup is how many steps of each mode run before that; 0 means 5.
	Warmup int
	// BucketCapMB are the caps in MiB; empty means the library's default.
	BucketCapMB []float64
}

func (c *StepConfig) validate() error {
	if c.Steps == 0 {
		c.Steps = 60
	}
	if c.Warmup == 0 {
		c.Warmup = 5
	}
	if c.Steps < 1 || c.Warmup < 1 {
		return fmt.Errorf("bench: %d steps after %d for warm-up: both must be at least 1", c.Steps, c.Warmup)
	}
	return nil
}

// StepResult is what a step costs. Times are medians over the timed steps of
// rank 0, in milliseconds, of the normal mode unless they say otherwise. The
// three modes run in turn, step by step, each behind a barrier, so that slow
// changes of the machine's speed hit all alike.
type StepResult struct {
	Bench     string `json:"bench"`
	Preset    string `json:"preset"`
	Device    string `json:"device"`
	WorldSize int    `json:"world_size"`
	Threads   int    `json:"threads"`
	Steps     int    `json:"steps"`
	Params    int    `json:"params"`
	Buckets   int    `json:"buckets"`

	StepMS float64 `json:"step_ms"`
	// StepP10MS and StepP90MS are the spread of StepMS.
	StepP10MS   float64 `json:"step_p10_ms"`
	StepP90MS   float64 `json:"step_p90_ms"`
	ForwardMS   float64 `json:"forward_ms"`
	BackwardMS  float64 `json:"backward_ms"`
	OptimizerMS float64 `json:"optimizer_ms"`
	// CommMS is the time with a bucket at the head of the queue and bytes still to move.
	CommMS float64 `json:"comm_ms"`
	// NoCommMS and NoOverlapMS are whole steps of the other two modes.
	NoCommMS    float64 `json:"no_comm_step_ms"`
	NoOverlapMS float64 `json:"no_overlap_step_ms"`
	// ExposedCommMS is StepMS − NoCommMS.
	ExposedCommMS float64 `json:"exposed_comm_ms"`
	// HiddenShare is 1 − (StepMS − NoCommMS)/(NoOverlapMS − NoCommMS); 1 where
	// there is nothing to hide.
	HiddenShare float64 `json:"hidden_share"`
	// EarlyMin is the least number of buckets, in any timed step, whose
	// collective started before the last gradient was final.
	EarlyMin int `json:"early_buckets_min"`

	TokensPerS float64 `json:"tokens_per_s"` // all ranks
	GFLOPS     float64 `json:"gflops"`       // of a rank's matrix products in the normal step
	// AllocsPerStep are heap allocations of this process in a normal step.
	AllocsPerStep float64 `json:"allocs_per_step"`
}

// modes in the order in which they take turns.
var modes = [...]overlap.Schedule{overlap.Normal, overlap.NoComm, overlap.NoOverlap}

// stepper is one rank of the measurement.
type stepper struct {
	cfg   StepConfig
	g     *tandem.Group
	model *gpt2mini.Model
	ddp   *ddp.DDP
	rng   *rand.Rand
	in    []int

	wall                     [len(modes)][]float64
	fwd, bwd, opt, comm, mem []float64
	early                    int
}

// Step trains on random tokens and measures. All ranks call it; each gets its
// own clock's result, and rank 0's is the one to report.
func Step(ctx context.Context, g *tandem.Group, c StepConfig) (*StepResult, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	s := &stepper{cfg: c, g: g}
	if err := s.open(ctx); err != nil {
		return nil, err
	}
	err := s.measure(ctx)
	if cerr := s.ddp.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return nil, err
	}
	return s.result(), nil
}

func (s *stepper) open(ctx context.Context) error {
	mc, err := gpt2mini.Preset(s.cfg.Preset)
	if err != nil {
		return err
	}
	if s.model, err = gpt2mini.New(mc); err != nil {
		return err
	}
	if err := s.model.Init(1); err != nil {
		return err
	}
	caps, err := bucket.MiB(s.cfg.BucketCapMB)
	if err != nil {
		return err
	}
	// The settings of the peers' measurements. Without clipping every bucket is
	// updated as soon as it may.
	s.ddp, err = ddp.New(ctx, s.g.Comm, s.model.Loss, s.model.Params, &ddp.Options{
		Device: s.g.Device, Caps: bucket.Caps{Cap: caps},
		Optimizer: optim.AdamW{LR: 1e-4, Beta1: 0.9, Beta2: 0.95, WeightDecay: 0.1},
	})
	if err != nil {
		return err
	}
	s.rng = rand.New(rand.NewPCG(100, uint64(s.g.Rank)))
	s.in = make([]int, 2*s.model.Config.Batch*s.model.Config.Seq)
	s.early = len(s.ddp.Layout().Buckets)
	return nil
}

func (s *stepper) measure(ctx context.Context) error {
	for i := range s.cfg.Warmup + s.cfg.Steps {
		for m := range modes {
			if err := s.step(ctx, m, i >= s.cfg.Warmup); err != nil {
				return fmt.Errorf("bench: %v step %d: %w", modes[m], i, err)
			}
		}
	}
	// Who leaves first would look like a failure to those still at work.
	return s.g.Comm.Barrier(ctx)
}

func (s *stepper) step(ctx context.Context, mode int, timed bool) error {
	for i := range s.in {
		s.in[i] = s.rng.IntN(s.model.Config.Vocab)
	}
	if err := s.model.SetBatch(s.in[:len(s.in)/2], s.in[len(s.in)/2:]); err != nil {
		return err
	}
	s.ddp.SetSchedule(modes[mode])
	if err := s.g.Comm.Barrier(ctx); err != nil {
		return err
	}
	var before, after runtime.MemStats
	if mode == 0 {
		runtime.ReadMemStats(&before)
	}
	start := time.Now()
	if err := s.ddp.Step(ctx); err != nil {
		return err
	}
	if err := s.ddp.Sync(ctx); err != nil {
		return err
	}
	wall := time.Since(start)
	if mode == 0 {
		runtime.ReadMemStats(&after)
	}
	if timed {
		s.record(mode, wall, after.Mallocs-before.Mallocs)
	}
	return nil
}

func (s *stepper) record(mode int, wall time.Duration, allocs uint64) {
	s.wall[mode] = append(s.wall[mode], ms(wall))
	if mode != 0 {
		return
	}
	t := s.ddp.Stats()
	s.fwd = append(s.fwd, ms(t.Forward))
	s.bwd = append(s.bwd, ms(t.Backward))
	s.opt = append(s.opt, ms(t.Times.Update))
	s.comm = append(s.comm, ms(t.Times.Comm))
	s.mem = append(s.mem, float64(allocs))
	s.early = min(s.early, t.Times.Early)
}

func (s *stepper) result() *StepResult {
	c := s.model.Config
	r := &StepResult{
		Bench: "step", Preset: s.cfg.Preset, Device: s.g.Device.Name(), WorldSize: s.g.WorldSize, Threads: s.g.Threads,
		Steps: s.cfg.Steps, Params: c.ParamCount(), Buckets: len(s.ddp.Layout().Buckets),
		StepMS: quantile(s.wall[0], 0.5), StepP10MS: quantile(s.wall[0], 0.1), StepP90MS: quantile(s.wall[0], 0.9),
		ForwardMS: quantile(s.fwd, 0.5), BackwardMS: quantile(s.bwd, 0.5), OptimizerMS: quantile(s.opt, 0.5),
		CommMS: quantile(s.comm, 0.5), NoCommMS: quantile(s.wall[1], 0.5), NoOverlapMS: quantile(s.wall[2], 0.5),
		EarlyMin: s.early, AllocsPerStep: quantile(s.mem, 0.5), HiddenShare: 1,
	}
	r.ExposedCommMS = r.StepMS - r.NoCommMS
	if hidable := r.NoOverlapMS - r.NoCommMS; s.g.WorldSize > 1 && hidable > 0 {
		r.HiddenShare = 1 - r.ExposedCommMS/hidable
	}
	seconds := r.StepMS / 1000
	r.TokensPerS = float64(s.g.WorldSize*c.Batch*c.Seq) / seconds
	r.GFLOPS = c.StepFLOPs() / seconds / 1e9
	return r
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// quantile is the q-quantile of x by nearest rank.
func quantile(x []float64, q float64) float64 {
	if len(x) == 0 {
		return 0
	}
	s := slices.Clone(x)
	slices.Sort(s)
	return s[min(len(s)-1, int(q*float64(len(s))))]
}
