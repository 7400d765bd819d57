package ddp

import (
	"context"
	"time"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/overlap"
)

// Step runs forward and backward on the inputs that are bound, and unless it is
// called within NoSync averages the gradients, and applies them with the
// built-in optimizer. Inputs are copied first. When it returns, the loss and the
// outputs are bound to their nodes; with an external optimizer the averages are
// in ValueGrads.
//
// Where the loss is not finite, or the gradient norm, if it is computed, every
// rank gets the same *NonFiniteError. Parameters are then unchanged with an
// external optimizer or with clipping; otherwise updates have run.
//
// When ctx ends, or its time is over, the group is aborted on all ranks.
func (d *DDP) Step(ctx context.Context) error {
	return d.StepGraph(ctx, 0)
}

// step1 is a step or a micro-step on the graph in use.
func (d *DDP) step1(ctx context.Context) error {
	d.watch.start(ctx, d.opts.Timeout)
	defer d.watch.stop()
	err := d.run()
	if err == nil {
		return nil
	}
	if isVerdict(err) && d.schedule != overlap.NoComm {
		d.err = err
		return err
	}
	return d.fail(err)
}

// run is a step or a micro-step.
func (d *DDP) run() error {
	started := time.Now()
	sync := !d.nosync
	if sync {
		if err := d.hashParams(); err != nil {
			return err
		}
	}
	if err := d.red.Begin(d.watch, sync, d.schedule); err != nil {
		return err
	}
	if err := d.weigh(); err != nil {
		return err
	}
	d.usage.count(d.branch, d.micro == 0)
	if sync {
		if err := d.sendHeader(); err != nil {
			return err
		}
		if err := d.syncBuffers(); err != nil {
			return err
		}
	}
	if err := d.compute(); err != nil {
		return err
	}
	if err := d.conclude(sync); err != nil {
		return err
	}
	d.takePhases(time.Since(started))
	if !sync {
		d.micro++
		return nil
	}
	// The next step overwrites the gradients instead of adding to them.
	d.micro = 0
	d.step++
	return d.tune()
}

// sendHeader tells the other ranks about this step, behind the forward pass.
func (d *DDP) sendHeader() error {
	h := &d.header
	h.set(laneStep, float64(d.step))
	h.set(laneMicro, float64(d.micro+1))
	h.set(laneSchedule, float64(d.schedule))
	h.set(laneLR, d.LR())
	h.set(laneJoin, d.joined)
	h.set(laneStop, 0)
	if d.stop.Load() {
		h.set(laneStop, 1)
	}
	h.set(laneWeight, d.scaling.total)
	h.set(laneLast, d.scaling.last)
	h.set(laneLoss, d.scaling.loss)
	h.set(laneBad, d.bad)
	h.set(laneHash, d.hash)
	d.sendUsage()
	return h.exchange(d.comm, d.red.Comm())
}

// compute enqueues forward, backward and, as gradients become final, the
// exchange, and waits for the passes to end.
func (d *DDP) compute() error {
	s := d.red.Compute()
	if err := s.Record(d.begin); err != nil {
		return err
	}
	if err := d.startUsage(); err != nil {
		return err
	}
	d.plan.Accumulate(d.micro > 0)
	d.plan.SplitRuns(d.red.Tails())
	if err := d.plan.Run(s, d.ready); err != nil {
		return err
	}
	if err := s.Record(d.end); err != nil {
		return err
	}
	if err := d.red.End(); err != nil {
		return err
	}
	if err := s.Sync(d.watch); err != nil {
		return err
	}
	loss, ok := d.plan.LossBuffer().HostBytes()
	if ok {
		d.stats.LocalLoss = scalar(loss, d.loss.kind, 0)
	}
	return d.plan.BindOutputs()
}

// agree waits for all headers, before the first bucket's collective, and draws
// the conclusions, which are the same on every rank.
func (d *DDP) agree() (comm.Op, error) {
	h := &d.header
	if err := h.done.Sync(d.watch); err != nil {
		return 0, err
	}
	if err := h.check(); err != nil {
		return 0, err
	}
	if err := d.endedEarly(); err != nil {
		return 0, err
	}
	if err := d.nonFiniteBefore(); err != nil {
		return 0, err
	}
	if err := d.sameParams(); err != nil {
		return 0, err
	}
	// Collectives of the last step ended before this header; its updates end
	// before the forward pass that is enqueued. Hyper-parameters are free then.
	if err := d.red.FinishPrevious(d.watch); err != nil {
		return 0, err
	}
	d.takeTimes(d.step)
	if d.opt != nil {
		d.opt.Begin(h.get(h.active(), laneLR))
	}
	d.agreeUsage()
	d.meter.bytes = 0
	d.stopped = h.sum(laneStop) > 0
	if err := d.sendLoss(); err != nil {
		return 0, err
	}
	return d.divide()
}

// divide says how the sum over ranks becomes an average. It is the only place
// that does.
func (d *DDP) divide() (comm.Op, error) {
	h, s := &d.header, &d.scaling
	total := d.totalWeight()
	s.on = d.opts.Weighted || total != float64(h.ranks)
	if !s.on {
		d.scale = 1 / float64(h.ranks)
		return comm.Avg, nil
	}
	d.scale = 0 // without any weight anywhere there is nothing to learn
	if total > 0 {
		d.scale = s.unit / total
	}
	if d.hook != nil {
		s.on = false // the hook multiplies
		return comm.Sum, nil
	}
	if err := d.prepareScaling(); err != nil {
		return 0, err
	}
	s.shared.set(d.scale)
	return comm.Sum, nil
}

// sendLoss enqueues the exchange of losses behind the first gradients.
func (d *DDP) sendLoss() error {
	if d.schedule == overlap.NoComm {
		return nil
	}
	if d.joined == joinDone {
		return d.loss.enqueue(d.comm, d.red.Comm(), d.loss.zero)
	}
	if err := d.red.Comm().Wait(d.plan.ForwardDone()); err != nil {
		return err
	}
	return d.loss.enqueue(d.comm, d.red.Comm(), d.plan.LossBuffer())
}

// prepare precedes a bucket's collective on the comm stream.
func (d *DDP) prepare(s device.Stream, k int) error {
	if !d.scaling.on {
		return nil
	}
	return d.scaling.shared.enqueue(s, k)
}

// conclude waits for what Step promises.
func (d *DDP) conclude(sync bool) error {
	if !sync {
		d.scaling.loss += d.scaling.last * d.stats.LocalLoss
		return d.noteNonFinite()
	}
	if d.schedule != overlap.NoComm {
		if err := d.loss.done.Sync(d.watch); err != nil {
			return err
		}
	}
	d.stats.Loss = d.meanLoss()
	if d.norm != nil {
		if err := d.awaitNorm(); err != nil {
			return err
		}
	}
	if d.opt == nil {
		// External optimizer: the caller reads the averages next.
		if err := d.red.WaitReduced(d.watch); err != nil {
			return err
		}
	}
	if err := d.nonFinite(); err != nil {
		return err
	}
	d.stats.LR = d.LR()
	d.stats.Step = d.step + 1
	d.stats.WireBytes = d.meter.bytes
	d.stats.LossScale, d.stats.Skipped = d.lossScale.scale, d.lossScale.skipped
	if d.opt != nil && d.lossScale.skip {
		d.opt.SetSteps(d.opt.Steps() - 1)
		return nil
	}
	if d.opt != nil && d.opts.whole() {
		return d.red.Updates()
	}
	if d.opt == nil {
		if err := d.red.Finish(d.watch); err != nil {
			return err
		}
		d.takeTimes(d.step + 1)
	}
	return nil
}

// awaitNorm enqueues the gradient norm behind the last reduction and waits for it.
func (d *DDP) awaitNorm() error {
	s := d.red.UpdateStream()
	if err := d.norm.Clip(s); err != nil {
		return err
	}
	if err := s.Record(d.clipped); err != nil {
		return err
	}
	if err := d.clipped.Sync(d.watch); err != nil {
		return err
	}
	d.stats.Norm = d.norm.Value()
	return nil
}

// meanLoss is the objective whose gradient the averages are: the weighted mean
// of the ranks' losses, micro-steps summed as their gradients are.
func (d *DDP) meanLoss() float64 {
	if d.schedule == overlap.NoComm {
		return d.stats.LocalLoss
	}
	h := &d.header
	sum, total := 0.0, d.totalWeight()
	for r := range h.ranks {
		if h.get(r, laneJoin) != joinDone {
			sum += h.get(r, laneLoss) + h.get(r, laneLast)*d.loss.of(r)
		}
	}
	if total == 0 {
		return 0
	}
	return sum / total
}
