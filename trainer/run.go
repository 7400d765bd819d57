package trainer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/data"
	"github.com/tandem-go/tandem/ddp"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/models/gpt2mini"
)

// Observer is told how a run goes, on rank 0 only but for Joined. Nil fields are
// skipped.
type Observer struct {
	// Joined is called on every rank once the ranks have met and agreed: from here
	// on Config.Stop is heeded.
	Joined func()
	// Started is called once the ranks have met and agreed.
	Started func(*Info)
	// Step is called after every optimizer step; the value is reused.
	Step func(*Metrics)
}

// Info describes a run that is about to start.
type Info struct {
	// Resumed is the checkpoint that the run continues, at step Step; "" for a
	// run that begins. Notes say what differs from it, or why there is none.
	Resumed    string
	Step       int
	Notes      []string
	Device     string
	WorldSize  int
	Params     int // trainable elements
	Vocab      int
	Buckets    int
	BucketCap  float64 // MiB
	TokensStep int     // of all ranks
}

// Run trains on this rank until Config.Steps or an error, and evaluates. All
// ranks call it with the same configuration.
func Run(ctx context.Context, g *tandem.Group, c Config, obs Observer) (*Result, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	if c.Out == "" && (c.CheckpointEvery > 0 || c.Resume == ResumeAuto) {
		return nil, errors.New("checkpoints need a directory; pass --out DIR")
	}
	text, err := c.LoadText(ctx)
	if err != nil {
		return nil, err
	}
	defer text.Close() // only read
	r := &run{c: c, g: g, text: text, obs: obs}
	if err := r.open(ctx); err != nil {
		return nil, err
	}
	res, err := r.train(ctx)
	if terr := r.timeline.write(ctx, r, err); err == nil {
		err = terr
	}
	if cerr := r.close(); err == nil {
		err = cerr
	}
	return res, err
}

// run is one rank's state.
type run struct {
	c     Config
	g     *tandem.Group
	text  *data.Source
	obs   Observer
	model *gpt2mini.Model
	ddp   *ddp.DDP
	eval  *evaluator
	// timeline is nil unless one was asked for.
	timeline *timeline
	from     begin
	ckpt     *checkpointer // on rank 0, if checkpoints are wanted
	own      device.Stream // see stream

	sampler data.Sampler
	tokens  []int // one micro-step's
	targets []int
	metrics *metricsFile
	line    Metrics
	rates   []float64
}

func (r *run) open(ctx context.Context) (err error) {
	c := &r.c
	if r.model, err = gpt2mini.New(c.model(r.text.VocabSize(), c.Batch)); err != nil {
		return err
	}
	if err := r.model.Init(uint64(c.Seed)); err != nil {
		return err
	}
	from, err := r.loadOrigin(ctx)
	if err != nil {
		return err
	}
	if from != nil {
		defer func() { err = errors.Join(err, from.close()) }()
	}
	loss, err := scaled(r.model.Loss, c.GradAccum)
	if err != nil {
		return err
	}
	opts, err := c.ddpOptions()
	if err != nil {
		return err
	}
	opts.Device = r.g.Device
	if r.ddp, err = ddp.New(ctx, r.g.Comm, loss, r.model.Params, opts); err != nil {
		return err
	}
	if err := r.restore(ctx, from); err != nil {
		return err
	}
	n := c.Batch * c.Block
	r.tokens, r.targets = make([]int, n), make([]int, n)
	r.sampler = data.Sampler{Tokens: r.text.Train, Block: c.Block, Seed: c.Seed}
	if r.eval, err = newEvaluator(r); err != nil {
		return err
	}
	if r.timeline, err = r.openTimeline(ctx); err != nil {
		return err
	}
	return r.openFiles()
}

// openFiles opens what rank 0 writes.
func (r *run) openFiles() (err error) {
	if r.g.Rank != 0 || r.c.Out == "" {
		r.metrics = &metricsFile{}
		return nil
	}
	if r.metrics, err = openMetrics(r.c.Out, r.first()); err != nil || r.c.CheckpointEvery == 0 {
		return err
	}
	if r.ckpt, err = newCheckpointer(r); err == nil && r.from.State != nil {
		r.ckpt.best = r.from.State.Best
	}
	return err
}

// scaled divides the loss by the number of micro-steps, whose gradients are
// summed: the step then equals one on the joined batch.
func scaled(loss *gorgonia.Node, accum int) (*gorgonia.Node, error) {
	if accum == 1 {
		return loss, nil
	}
	return gorgonia.Mul(loss, gorgonia.NewConstant(1/float32(accum), gorgonia.WithName("1/grad-accum")))
}

func (r *run) close() error {
	var err error
	if r.ckpt != nil {
		err = r.ckpt.wait()
	}
	err = errors.Join(err, r.metrics.close(), r.writeTrials())
	if cerr := r.ddp.Close(); err == nil {
		err = cerr
	}
	return err
}

func (r *run) train(ctx context.Context) (*Result, error) {
	if r.obs.Joined != nil {
		r.obs.Joined()
	}
	r.started()
	defer r.heedStop()()
	c := &r.c
	res, err := r.before(ctx)
	if err != nil {
		return nil, err
	}
	for step := r.first(); step < c.Steps && !res.Stopped; step++ {
		m, err := r.step(ctx, step)
		if err != nil {
			return nil, err
		}
		res.Stopped = step+1 < c.Steps && r.stopped()
		last := step+1 == c.Steps || res.Stopped
		if res.Stopped {
			// Whoever stops the run may not wait for more than the checkpoint.
			if err := r.finish(ctx, func(context.Context) error { return r.saveNow(m) }); err != nil {
				return nil, err
			}
		}
		if last || (step+1)%c.EvalEvery == 0 {
			loss, err := r.eval.run(ctx)
			if err != nil {
				return nil, fmt.Errorf("evaluating after step %d: %w", step+1, err)
			}
			m.ValLoss, res.ValLoss = &loss, loss
		}
		res.Steps, res.Loss = m.Step, m.Loss
		if res.Stopped {
			err = r.metrics.amend(m)
		} else {
			err = r.report(m, last)
		}
		if err != nil {
			r.g.Comm.Abort(err)
			return nil, err
		}
	}
	res.TokensPerS = median(r.rates)
	return res, r.finish(ctx, func(ctx context.Context) error { return r.conclude(ctx, res) })
}

// heedStop passes Config.Stop on as soon as it is closed: the ranks then agree in
// the step under way, if its last micro-step hasn't begun, or else in the next.
func (r *run) heedStop() (end func()) {
	over, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		select {
		case <-r.c.Stop:
			r.ddp.RequestStop()
		case <-over:
		}
	}()
	return func() { close(over); <-done }
}

// stopped says that the ranks have agreed to stop. A rank that is alone has
// nobody to agree with, so it needs no further step.
func (r *run) stopped() bool { return r.ddp.Stopped() || r.g.WorldSize == 1 && r.toldToStop() }

func (r *run) toldToStop() bool {
	select {
	case <-r.c.Stop:
		return true
	default:
		return false
	}
}

// saveNow reports the last step of a run that is stopped early and writes its
// checkpoint to the end, on rank 0.
func (r *run) saveNow(m *Metrics) error {
	if r.ckpt == nil {
		return r.report(m, true)
	}
	if err := r.ckpt.wait(); err != nil {
		return err
	}
	if err := r.report(m, true); err != nil {
		return err
	}
	return r.ckpt.wait()
}

// before is the result of the steps that a checkpoint has behind it. Where no
// step is left, it is evaluated, unless that was done when it was written.
func (r *run) before(ctx context.Context) (*Result, error) {
	res := &Result{}
	s := r.from.State
	if s == nil {
		return res, nil
	}
	res.Steps, res.Loss = s.Step, s.Loss
	if s.ValLoss != nil {
		res.ValLoss = *s.ValLoss
	} else if s.Step >= r.c.Steps {
		var err error
		if res.ValLoss, err = r.eval.run(ctx); err != nil {
			return nil, fmt.Errorf("evaluating the checkpoint of step %d: %w", s.Step, err)
		}
	}
	return res, nil
}

// conclude is rank 0's work after the last step.
func (r *run) conclude(ctx context.Context, res *Result) error {
	if r.c.SampleTokens > 0 && !res.Stopped {
		var err error
		if res.Sample, err = r.sample(ctx); err != nil {
			return fmt.Errorf("sampling: %w", err)
		}
	}
	if r.ckpt == nil {
		return nil
	}
	if err := r.ckpt.wait(); err != nil {
		return err
	}
	if r.ckpt.owed {
		r.ckpt.snapshot()
		r.ckpt.start(r.state(&r.line, nil))
	}
	return r.ckpt.wait()
}

// step runs one optimizer step, its micro-steps included, to its end.
func (r *run) step(ctx context.Context, step int) (*Metrics, error) {
	if r.toldToStop() {
		r.ddp.RequestStop()
	}
	start := time.Now()
	perRank := r.c.Batch * r.c.GradAccum
	var err error
	for micro := range r.c.GradAccum {
		first := r.g.Rank*perRank + micro*r.c.Batch
		if err := r.sampler.Fill(r.tokens, r.targets, step, first); err != nil {
			return nil, err
		}
		if err := r.model.SetBatch(r.tokens, r.targets); err != nil {
			return nil, err
		}
		if err := r.model.SetDropoutKey(r.c.Seed, step, first); err != nil {
			return nil, err
		}
		if micro < r.c.GradAccum-1 {
			began := time.Now()
			err = r.ddp.NoSync(func() error { return r.ddp.Step(ctx) })
			r.timeline.micro(r, step+1, began)
		} else {
			err = r.ddp.Step(ctx)
		}
		if err != nil {
			return nil, err
		}
	}
	if err := r.ddp.Sync(ctx); err != nil {
		return nil, err
	}
	r.timeline.record(r, step+1)
	return r.measure(step, time.Since(start)), nil
}

// report makes a finished step known and, if one is due, takes a checkpoint: its
// line is in the metrics before the checkpoint can be complete.
func (r *run) report(m *Metrics, last bool) error {
	r.c.Logger.Info("step", "step", m.Step, "loss", m.Loss, "ms", m.StepMS, "exposed_ms", m.ExposedCommMS)
	if r.g.Rank != 0 {
		return nil
	}
	r.rates = append(r.rates, m.TokensPerS)
	take, err := r.takeCheckpoint(m, last)
	if err != nil {
		return err
	}
	if r.obs.Step != nil {
		r.obs.Step(m)
	}
	if err := r.metrics.write(m); err != nil {
		return err
	}
	if take {
		r.ckpt.start(r.state(m, nil))
	}
	return nil
}

// takeCheckpoint copies what a checkpoint holds if one is due and the last one is
// on disk. The error is the last one's.
func (r *run) takeCheckpoint(m *Metrics, last bool) (bool, error) {
	if r.ckpt == nil {
		return false, nil
	}
	idle, err := r.ckpt.idle()
	if err != nil || !r.ckpt.due(m, last) || !idle {
		return false, err
	}
	ms := milliseconds(r.ckpt.snapshot())
	m.CheckpointStallMS = &ms
	return true, nil
}

func median(x []float64) float64 {
	if len(x) == 0 {
		return 0
	}
	s := slices.Clone(x)
	slices.Sort(s)
	return s[len(s)/2]
}
