// Package bench measures training steps, buckets and collectives, as structs that
// programs can use and JSON that files can hold.
package bench

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/bucket"
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
	// HiddenShare is 1 − (StepMS − NoCommMS)/(NoOverlapMS − NoCommMS): 1 with one
	// rank, null where no communication could be measured.
	HiddenShare Share `json:"hidden_share"`
	// EarlyMin is the least number of buckets, in any timed step, whose
	// collective started before the last gradient was final.
	EarlyMin int `json:"early_buckets_min"`

	TokensPerS float64 `json:"tokens_per_s"` // all ranks
	GFLOPS     float64 `json:"gflops"`       // of a rank's matrix products in the normal step
	// AllocsPerStep are heap allocations of this process in a normal step.
	AllocsPerStep float64 `json:"allocs_per_step"`
}

// stepper is one rank of the measurement.
type stepper struct {
	*rig
	cfg StepConfig

	walls                    walls
	fwd, bwd, opt, comm, mem []float64
	early                    int
}

// Step trains on random tokens and measures. All ranks call it; each gets its
// own clock's result, and rank 0's is the one to report.
func Step(ctx context.Context, g *tandem.Group, c StepConfig) (*StepResult, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	caps, err := bucket.MiB(c.BucketCapMB)
	if err != nil {
		return nil, err
	}
	s := &stepper{cfg: c}
	if s.rig, err = newRig(g, c.Preset); err != nil {
		return nil, err
	}
	if err := s.open(ctx, bucket.Caps{Cap: caps}); err != nil {
		return nil, err
	}
	s.early = len(s.ddp.Layout().Buckets)
	err = s.measure(ctx)
	if cerr := s.ddp.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return nil, err
	}
	return s.result(), nil
}

func (s *stepper) measure(ctx context.Context) error {
	for i := range s.cfg.Warmup + s.cfg.Steps {
		for m := range modes {
			if err := s.turn(ctx, m, i >= s.cfg.Warmup); err != nil {
				return failed(m, i, err)
			}
		}
	}
	// Who leaves first would look like a failure to those still at work.
	return s.g.Comm.Barrier(ctx)
}

func (s *stepper) turn(ctx context.Context, mode int, timed bool) error {
	if err := s.prepare(ctx, mode); err != nil {
		return err
	}
	var before, after runtime.MemStats
	if mode == normal {
		runtime.ReadMemStats(&before)
	}
	wall, err := s.step(ctx)
	if err != nil {
		return err
	}
	if mode == normal {
		runtime.ReadMemStats(&after)
	}
	if timed {
		s.record(mode, wall, after.Mallocs-before.Mallocs)
	}
	return nil
}

func (s *stepper) record(mode int, wall time.Duration, allocs uint64) {
	s.walls[mode] = append(s.walls[mode], ms(wall))
	if mode != normal {
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
		StepMS: s.walls.median(normal), StepP10MS: quantile(s.walls[normal], 0.1), StepP90MS: quantile(s.walls[normal], 0.9),
		ForwardMS: quantile(s.fwd, 0.5), BackwardMS: quantile(s.bwd, 0.5), OptimizerMS: quantile(s.opt, 0.5),
		CommMS: quantile(s.comm, 0.5), NoCommMS: s.walls.median(noComm), NoOverlapMS: s.walls.median(noOverlap),
		EarlyMin: s.early, AllocsPerStep: quantile(s.mem, 0.5),
	}
	r.ExposedCommMS = r.StepMS - r.NoCommMS
	r.HiddenShare = hiddenShare(s.g.WorldSize, r.StepMS, r.NoCommMS, r.NoOverlapMS)
	seconds := r.StepMS / 1000
	r.TokensPerS = float64(s.tokens()) / seconds
	r.GFLOPS = c.StepFLOPs() / seconds / 1e9
	return r
}
