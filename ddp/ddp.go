// Package ddp makes a single-process gorgonia training loop data-parallel:
// every rank computes gradients on its own part of the batch, and all apply
// their average. New compiles the graph, lays the gradients out in buckets and
// gives all ranks the parameters of rank 0; Step runs forward, backward and the
// exchange, which hides behind the backward pass.
//
//	d, err := ddp.New(ctx, comm, loss, params, nil)
//	for … {
//		gorgonia.Let(x, batch)
//		err = d.Step(ctx)             // averages are in d.ValueGrads()
//		err = solver.Step(d.ValueGrads())
//	}
//
// # Two modes
//
// External optimizer (Options.Optimizer nil): Step returns when the averages can
// be read, and parameters are the caller's to change. Gradients are views of
// bucket memory; gorgonia's solvers square and zero them in place, so they are
// gone afterwards. gorgonia v0.9.18's own AdamW cannot be used: it takes nothing
// but *Node and drops the weights that it has computed. Use the built-in one.
//
// Built-in optimizer: updates run behind the backward pass as well, bucket by
// bucket, and Step returns before they have ended. Parameters are read only
// after Sync. Clipping (Options.MaxNorm) needs the whole gradient and so holds
// all updates back until the last bucket is reduced; one log line says so.
//
// # What all ranks decide together
//
// Each synchronised step begins with a header that every rank sends to all
// others while the forward pass runs: step, micro-steps, schedule, learning
// rate, weight, stop and join flags. Every decision that changes the sequence of
// collectives comes from it, and where ranks contradict each other, all of them
// return the same error instead of hanging.
//
// # Errors
//
// A failing rank aborts the group, so all ranks' Steps fail. After an error
// parameters and gradients are undefined, and every method but Close refuses.
package ddp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync/atomic"
	"time"
	"weak"

	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/ddp/hook"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/engine"
	"github.com/tandem-go/tandem/optim"
	"github.com/tandem-go/tandem/overlap"
)

// ErrClosed is returned by the methods of a closed DDP.
var ErrClosed = errors.New("ddp: closed")

// Options of New. The zero value, or nil, means the defaults. All ranks must
// use the same ones; New compares them.
type Options struct {
	// Device runs the graph. nil means a cpu.Device with its own defaults, which
	// is closed with the DDP.
	Device device.Device
	// Logger gets a few lines at New and warnings. nil discards.
	Logger *slog.Logger
	// Caps bounds the buckets.
	Caps bucket.Caps
	// Autotune, if set, searches for better Caps over the first steps.
	Autotune *Autotune
	// Outputs are further nodes whose values are bound after each Step.
	Outputs gorgonia.Nodes
	// Graphs are further graphs of the same model, such as its conditional
	// branches: StepGraph picks one for each step, and ranks may pick different
	// ones. Parameters are matched by name and live in one place. What no graph
	// of a step uses on any rank keeps its value, moments and gradient.
	Graphs []Graph
	// Buffers are inputs that belong to the model without being trained, such as
	// running means. They need values before New, which moves them; BufferMode
	// says how ranks agree on them. A synchronised step with buffers waits for
	// all ranks before its forward pass.
	Buffers    gorgonia.Nodes
	BufferMode BufferMode
	// WholeEmbeddings reduces the gradients of tied embeddings with the rest. By
	// default the lookup's part, which is the last of all to be final, travels
	// apart as the batch's rows, where that is less than the whole; it is not with
	// Weighted, Graphs or FindUnused. All ranks must have batches of one size.
	WholeEmbeddings bool
	// FindUnused leaves parameters that a loss doesn't reach out of its graph,
	// instead of refusing them by name. They are then unused there, as those that
	// other Graphs have.
	FindUnused bool
	// Optimizer, if set, updates the parameters within Step; they must be float32.
	Optimizer optim.Rule
	// Schedule gives the learning rate of each step for Optimizer. nil means
	// the Optimizer's own, or what SetLR says.
	Schedule optim.Schedule
	// MaxNorm is the global gradient norm above which Optimizer scales gradients
	// down to it. 0 means no clipping.
	MaxNorm float64
	// Norm computes the gradient norm of every step, for Stats and to find
	// gradients that are not finite. Clipping does so anyway.
	Norm bool
	// Weighted averages by the weights that SetWeight gives, such as numbers of
	// tokens, instead of evenly. The loss must then be a mean over that weight.
	Weighted bool
	// CheckParams compares the parameters of all ranks before every step whose
	// number is a multiple of it; where they differ, all ranks get the same
	// *ParamsDifferError. It waits for updates and reads every parameter once, so
	// choose some hundred steps. A value that was newly bound to a node is looked
	// at in the check after. Steps that the schedule overlap.NoComm made differ
	// end the checks. 0 means never.
	CheckParams int
	// Fingerprint compares every collective with those of all other ranks before
	// it starts, for debugging on a backend whose messages carry no headers. It
	// waits for each, so nothing overlaps any more.
	Fingerprint bool
	// Join says what Join does.
	Join JoinOptions
	// Hook reduces the buckets in place of an all-reduce, such as hook.BF16 or
	// hook.PowerSGD. nil is the all-reduce.
	Hook hook.Hook
	// LossScale, if set, scales gradients for hook.FP16. Whether a step has
	// overflowed shows in the whole gradient, so updates wait for it, as they do
	// for clipping.
	LossScale *LossScale
	// Timeout bounds Step, Sync, Join and New where their context has no
	// deadline. 0 means 5 minutes.
	Timeout time.Duration
}

func (o *Options) validate() (Options, error) {
	var v Options
	if o != nil {
		v = *o
	}
	if v.Logger == nil {
		v.Logger = slog.New(slog.DiscardHandler)
	}
	if v.Timeout == 0 {
		v.Timeout = 5 * time.Minute
	}
	switch {
	case v.Timeout < 0:
		return v, fmt.Errorf("ddp: Timeout is %v; it must not be negative", v.Timeout)
	case v.Weighted && v.Join.DivideByInitial:
		return v, errors.New("ddp: Join.DivideByInitial divides by ranks, Weighted by weights: choose one")
	case v.BufferMode > AverageBuffers:
		return v, fmt.Errorf("ddp: BufferMode %d: there are BroadcastBuffers and AverageBuffers", v.BufferMode)
	case v.CheckParams < 0:
		return v, fmt.Errorf("ddp: CheckParams is %d; it must not be negative", v.CheckParams)
	case !(v.MaxNorm >= 0) || math.IsInf(v.MaxNorm, 0):
		return v, fmt.Errorf("ddp: MaxNorm is %v; it must be finite and not negative", v.MaxNorm)
	case v.MaxNorm > 0 && v.Optimizer == nil:
		return v, errors.New("ddp: MaxNorm needs Optimizer; an external optimizer has to clip by itself")
	case v.Schedule != nil && v.Optimizer == nil:
		return v, errors.New("ddp: Schedule needs Optimizer; an external optimizer has its own learning rate")
	}
	_, err := v.lossScaling()
	return v, errors.Join(err, v.Autotune.validate(&v))
}

// whole says that updates need the whole gradient.
func (o *Options) whole() bool { return o.MaxNorm > 0 || o.LossScale != nil }

// signature is what must agree between ranks, besides the layout.
func (o *Options) signature(lossType fmt.Stringer) string {
	return fmt.Sprintf("optimizer %#v, max norm %v, norm %v, weighted %v, loss %v, check params %d, find unused %v, hook %#v, join %+v, loss scale %v, whole embeddings %v, autotune %v",
		o.Optimizer, o.MaxNorm, o.Norm, o.Weighted, lossType, o.CheckParams, o.FindUnused, o.Hook, o.Join, describeOption(o.LossScale), o.WholeEmbeddings, describeOption(o.Autotune))
}

func describeOption[T any](option *T) string {
	if option == nil {
		return "off"
	}
	return fmt.Sprintf("%+v", *option)
}

// DDP is one rank's replica of a model. Its methods are called from one
// goroutine, except RequestStop.
type DDP struct {
	opts   Options
	dev    device.Device
	ownDev *cpu.Device
	comm   comm.Communicator // a child of the caller's, so that their collectives never interleave
	log    *slog.Logger
	watch  *watchdog

	nodes     gorgonia.Nodes
	branches  []*branch    // one a graph
	branch    *branch      // the graph that runs, or ran last
	plan      *engine.Plan // its plan
	order     []int        // production order of all gradients
	layout    *bucket.Layout
	caps      bucket.Caps
	red       *overlap.Reducer
	opt       *optim.Optimizer // nil: external
	norm      *optim.Norm      // nil: not computed
	ready     func(int) error  // the branch's
	usage     usage
	meter     *meter // what the collectives of buckets go through
	lossScale lossScaling
	hook      hook.Reducer // nil: all-reduce
	scale     float64      // what the hook is to multiply gradients by

	arenas        [2]device.Buffer // of the parameters and of the gradients
	params, grads []device.Buffer  // by bucket
	paramBufs     []device.Buffer  // by parameter
	gradBufs      []device.Buffer
	valueGrads    []gorgonia.ValueGrad

	header  header
	loss    lossExchange
	scaling scaling
	begin   device.Event // of each step and micro-step on compute
	end     device.Event
	clipped device.Event // the norm is known

	step     int // synchronised steps so far
	micro    int // micro-steps since the last one
	nosync   bool
	joined   float64 // the join lane of the header
	weight   float64 // of the next micro-step
	schedule overlap.Schedule
	lr       float64 // what SetLR said, NaN before
	stop     atomic.Bool
	stopped  bool
	bad      float64 // laneBad
	hash     float64 // laneHash
	tuner    *tuner  // nil: no search
	splits   []*splitGradient
	buffers  []*modelBuffer
	claimed  []weak.Pointer[gorgonia.Node]
	hashes   []byte // of each parameter
	drifted  bool   // a step without communication made ranks differ
	stats    Stats
	opened   bool // New has ended
	err      error
	closed   atomic.Bool
}

// Rank is this process's number among Size ranks.
func (d *DDP) Rank() int { return d.comm.Rank() }

// Size is the number of ranks.
func (d *DDP) Size() int { return d.comm.Size() }

// Device is where the graph runs.
func (d *DDP) Device() device.Device { return d.dev }

// Layout says which gradients travel together.
func (d *DDP) Layout() *bucket.Layout { return d.layout }

// Caps are the bucket caps in use, defaults filled in.
func (d *DDP) Caps() bucket.Caps { return d.caps }

// ParamBuffers is the memory of each parameter, in the order given to New. It
// may be read after Sync, for example by a plan that evaluates the model.
func (d *DDP) ParamBuffers() []device.Buffer { return d.paramBufs }

// GradBuffers is the memory of each gradient, a part of its bucket.
func (d *DDP) GradBuffers() []device.Buffer { return d.gradBufs }

// Optimizer is the built-in optimizer, nil with an external one.
func (d *DDP) Optimizer() *optim.Optimizer { return d.opt }

// Loss is this rank's loss in its last step or micro-step.
func (d *DDP) Loss() float64 { return d.stats.LocalLoss }

// Steps is the number of synchronised steps so far.
func (d *DDP) Steps() int { return d.step }

// SetSteps continues the count of another run, before the first step: steps
// synchronised steps have been taken, updates of them with the built-in
// optimizer, whose schedule and bias correction go on from there. All ranks must
// set the same numbers; Step finds out where they differ.
func (d *DDP) SetSteps(steps, updates int) error {
	if d.step != 0 || d.micro != 0 {
		return fmt.Errorf("ddp: SetSteps after %d steps; it must come before the first", d.step)
	}
	if steps < 0 || updates < 0 {
		return fmt.Errorf("ddp: SetSteps(%d, %d): neither may be negative", steps, updates)
	}
	d.step = steps
	if d.opt != nil {
		d.opt.SetSteps(updates)
	}
	return nil
}

// SetLR sets the learning rate of the steps that follow and takes the place of
// Options.Schedule. Ranks that set different ones get an error from Step.
func (d *DDP) SetLR(lr float64) { d.lr = lr }

// LR is the learning rate of the next step, 0 with an external optimizer.
func (d *DDP) LR() float64 {
	switch {
	case d.opt == nil:
		return 0
	case !math.IsNaN(d.lr):
		return d.lr
	case d.opts.Schedule != nil:
		return d.opts.Schedule.LR(d.step)
	}
	return d.opt.LR()
}

// SetWeight sets the weight of the next step or micro-step alone, where
// Options.Weighted is set; without a call it is 1. A weight of 0 says that the
// gradient is zero, as it is without a token to learn from.
func (d *DDP) SetWeight(w float64) error {
	if !d.opts.Weighted {
		return errors.New("ddp: SetWeight without Options.Weighted")
	}
	if !(w >= 0 && w <= math.MaxFloat32) {
		return fmt.Errorf("ddp: a weight of %v; it must be finite and not negative", w)
	}
	d.weight = w
	return nil
}

// SetSchedule sets how collectives are arranged in the steps that follow, for
// measurements. Ranks that set different ones get an error from Step.
func (d *DDP) SetSchedule(s overlap.Schedule) { d.schedule = s }

// RequestStop asks all ranks to stop: after the next synchronised step Stopped
// is true on all of them. It may be called from any goroutine.
func (d *DDP) RequestStop() { d.stop.Store(true) }

// Stopped says that a rank had asked to stop before the last synchronised step.
// It changes in the same step on every rank.
func (d *DDP) Stopped() bool { return d.stopped }

// NoSync runs f, in which Step exchanges nothing: gradients add up on each
// rank until the next Step outside. Gradients of micro-steps are summed; scale
// the loss for a mean. Every rank must run the same number of micro-steps.
func (d *DDP) NoSync(f func() error) error {
	if err := d.usable(); err != nil {
		return err
	}
	if d.nosync {
		return errors.New("ddp: NoSync within NoSync")
	}
	d.nosync = true
	defer func() { d.nosync = false }()
	return f()
}

// Sync waits until every update has ended, so that parameters may be read.
func (d *DDP) Sync(ctx context.Context) error {
	if err := d.usable(); err != nil {
		return err
	}
	d.watch.start(ctx, d.opts.Timeout)
	defer d.watch.stop()
	if err := d.red.Sync(d.watch); err != nil {
		return d.fail(err)
	}
	d.takeTimes(d.step)
	return nil
}

// usable is the first error, which makes everything that follows undefined.
func (d *DDP) usable() error {
	if d.closed.Load() {
		return ErrClosed
	}
	return d.err
}

// fail ends the group because of err and returns what all later calls return.
func (d *DDP) fail(err error) error {
	d.comm.Abort(err)
	// What the group agreed on names the culprit; a stream's error may only say
	// that the group is gone.
	if agreed := d.comm.Err(); agreed != nil && !errors.Is(err, agreed) && errors.Is(err, comm.ErrAborted) {
		err = agreed
	}
	d.err = fmt.Errorf("ddp: step %d on rank %d: %w", d.step, d.Rank(), err)
	return d.err
}

// drainTimeout bounds the wait for kernels that a failed step has left behind.
const drainTimeout = 5 * time.Second

// Close waits for what is in flight, unless there was an error, and releases
// everything but what the caller gave. It is idempotent.
func (d *DDP) Close() error {
	if d.closed.Swap(true) {
		return nil
	}
	var errs []error
	if d.err == nil && d.red != nil {
		d.watch.start(context.Background(), d.opts.Timeout)
		errs = append(errs, d.red.Sync(d.watch))
		d.watch.stop()
	}
	d.watch.close()
	d.release()
	errs = append(errs, d.comm.Close())
	if d.err != nil && d.red != nil {
		// Kernels may still run on memory that goes with the communicator.
		ctx, cancel := context.WithTimeout(context.Background(), drainTimeout)
		d.red.Drain(ctx)
		cancel()
	}
	if d.ownDev != nil {
		errs = append(errs, d.ownDev.Close())
	}
	return errors.Join(errs...)
}
