package trainer

import (
	"errors"
	"os"
	"path/filepath"
	"time"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/ddp"
	"github.com/tandem-go/tandem/optim"
)

const mib = 1 << 20

// ddpOptions translates the configuration.
func (c *Config) ddpOptions() (*ddp.Options, error) {
	schedule := optim.WarmupCosine{Max: c.LR, Min: c.MinLR, Warmup: c.Warmup, Steps: c.Steps}
	if err := schedule.Validate(); err != nil {
		return nil, err
	}
	caps, err := bucket.MiB(c.BucketCapMB)
	if err != nil {
		return nil, err
	}
	var tune *ddp.Autotune
	if c.TuneBuckets {
		tune = new(ddp.Autotune)
	}
	return &ddp.Options{
		Autotune:  tune,
		Logger:    c.Logger,
		Optimizer: optim.AdamW{LR: c.LR, Beta1: 0.9, Beta2: 0.95, WeightDecay: c.WeightDecay},
		Schedule:  schedule,
		MaxNorm:   c.Clip,
		Norm:      true,
		Caps: bucket.Caps{
			Cap: caps, First: int(c.FirstBucketMB * mib), Last: int(c.LastBucketMB * mib),
		},
	}, nil
}

// writeTrials leaves what the search for bucket sizes has seen.
func (r *run) writeTrials() error {
	if !r.c.TuneBuckets || r.c.Out == "" || r.g.Rank != 0 {
		return nil
	}
	f, err := os.Create(filepath.Join(r.c.Out, "autotune.csv"))
	if err != nil {
		return err
	}
	return errors.Join(ddp.WriteTrials(f, r.ddp.Trials()), f.Close())
}

// started tells the observer what the ranks have agreed on.
func (r *run) started() {
	if r.g.Rank != 0 || r.obs.Started == nil {
		return
	}
	caps := r.ddp.Caps()
	r.obs.Started(&Info{
		Resumed: r.from.Dir, Step: r.first(), Notes: r.remarks(),
		Device: r.g.Device.Name(), WorldSize: r.g.WorldSize,
		Params: r.model.Config.ParamCount(), Vocab: r.model.Config.Vocab,
		Buckets: len(r.ddp.Layout().Buckets), BucketCap: float64(caps.Cap[0]) / mib,
		TokensStep: r.tokensPerStep(),
	})
}

// remarks are about the checkpoint that the run continues, or would.
func (r *run) remarks() []string {
	switch {
	case r.from.State != nil:
		return r.notes(r.from.State)
	case r.c.Resume == ResumeAuto:
		return []string{"no checkpoint in " + r.c.Out + " yet: starting at step 0"}
	}
	return nil
}

func (r *run) tokensPerStep() int {
	return r.g.WorldSize * r.c.GradAccum * r.c.Batch * r.c.Block
}

// measure makes a finished step's line; the returned value is reused.
func (r *run) measure(step int, wall time.Duration) *Metrics {
	s := r.ddp.Stats()
	ms := milliseconds
	r.line = Metrics{
		Step: step + 1, Loss: s.Loss, LR: s.LR, GradNorm: s.Norm,
		StepMS: ms(wall), ForwardMS: ms(s.Forward), BackwardMS: ms(s.Backward),
		OptimizerMS: ms(s.Times.Update), CommMS: ms(s.Times.Comm), ExposedCommMS: ms(s.Times.Exposed),
		TokensPerS: float64(r.tokensPerStep()) / wall.Seconds(), WorldSize: r.g.WorldSize,
		Buckets: s.Buckets, BucketCapMB: float64(r.ddp.Caps().Cap[0]) / mib,
	}
	return &r.line
}
