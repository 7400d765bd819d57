package ddp

import (
	"context"
	"errors"
	"fmt"

	"github.com/tandem-go/tandem/comm"
)

// JoinOptions say how ranks without data count. The zero value is the default.
type JoinOptions struct {
	// DivideByInitial divides by the number of all ranks also after some have
	// ended, as PyTorch does by default; the last batches then count less. By
	// default averages are over the ranks that still have data.
	DivideByInitial bool
	// ThrowOnEarlyTermination gives all ranks the same *EarlyTerminationError as
	// soon as some have ended and others have not.
	ThrowOnEarlyTermination bool
}

// EarlyTerminationError says that inputs were not equally many on all ranks.
type EarlyTerminationError struct {
	// Step counts synchronised steps from 0: the first that some could not take.
	Step int
	// Ranks are those that had no more data.
	Ranks []int
}

func (e *EarlyTerminationError) Error() string {
	return fmt.Sprintf("ddp: step %d: ranks %v have no more data, and others have: give all ranks as many batches, "+
		"or leave out Join.ThrowOnEarlyTermination", e.Step, e.Ranks)
}

// endedEarly is that error where it is wanted. All ranks see the same headers.
func (d *DDP) endedEarly() error {
	if !d.opts.Join.ThrowOnEarlyTermination || d.header.active() < 0 {
		return nil
	}
	var ended []int
	for r := range d.header.ranks {
		if d.header.get(r, laneJoin) == joinDone {
			ended = append(ended, r)
		}
	}
	if ended == nil {
		return nil
	}
	return &EarlyTerminationError{Step: d.step, Ranks: ended}
}

// totalWeight is what the ranks' weighted sums are divided by.
func (d *DDP) totalWeight() float64 {
	if d.opts.Join.DivideByInitial {
		return float64(d.header.ranks)
	}
	return d.header.sum(laneWeight)
}

// Join trains on inputs that need not be equally many on all ranks. next binds
// the inputs of a step and returns true, or false when this rank has no more;
// Join then follows the other ranks' steps with zeros until all have ended, so
// that nobody hangs. Averages are over the ranks that still have data, unless
// Options.Join says otherwise. Join is for synchronised steps: next must not be
// called within NoSync.
//
// With a built-in optimizer a rank without data applies the same updates as the
// others. With an external one, next applies the solver to the previous step's
// averages before it binds new inputs; solvers of ranks that ended early miss
// steps, so at the end all take the parameters of the lowest of the ranks that
// ended last.
//
// An error of next aborts the group.
func (d *DDP) Join(ctx context.Context, next func() (bool, error)) error {
	if err := d.usable(); err != nil {
		return err
	}
	if d.nosync || d.micro > 0 {
		return errors.New("ddp: Join within an accumulation: call Step outside NoSync first")
	}
	d.joined = joining
	defer func() { d.joined = notJoining }()
	last := -1 // the lowest rank with data in the last step, which all ranks saw alike
	for {
		more, err := next()
		if err != nil {
			return d.fail(err)
		}
		if !more {
			break
		}
		if err := d.Step(ctx); err != nil {
			return err
		}
		last = d.header.active()
	}
	d.joined = joinDone
	for {
		active, err := d.shadow(ctx)
		if err != nil {
			return err
		}
		if active < 0 {
			return d.adopt(ctx, max(last, 0))
		}
		last = active
	}
}

// shadow takes part in one step of the others and returns the lowest rank that
// had data, or -1 when none had, and then there was no step.
func (d *DDP) shadow(ctx context.Context) (active int, err error) {
	if err := d.usable(); err != nil {
		return 0, err
	}
	d.watch.start(ctx, d.opts.Timeout)
	defer d.watch.stop()
	if active, err = d.follow(); err == nil || isVerdict(err) {
		d.err = err
		return active, err
	}
	return 0, d.fail(err)
}

func (d *DDP) follow() (active int, err error) {
	if err := d.hashParams(); err != nil {
		return 0, err
	}
	if err := d.red.Begin(d.watch, true, d.schedule); err != nil {
		return 0, err
	}
	d.scaling.total, d.scaling.last, d.scaling.loss, d.scaling.unit = 0, 0, 0, 0
	clear(d.usage.used)
	if err := d.sendHeader(); err != nil {
		return 0, err
	}
	if err := d.header.done.Sync(d.watch); err != nil {
		return 0, err
	}
	if active = d.header.active(); active < 0 {
		return active, nil
	}
	if err := d.syncBuffers(); err != nil {
		return 0, err
	}
	if err := d.contributeZeros(); err != nil {
		return 0, err
	}
	if err := d.conclude(true); err != nil {
		return 0, err
	}
	d.step++
	return active, d.tune()
}

// contributeZeros is the backward pass of a rank without data.
func (d *DDP) contributeZeros() error {
	for p := range d.layout.Params {
		if err := d.red.Write(p); err != nil {
			return err
		}
	}
	if d.usage.on {
		for p := range d.layout.Params {
			if err := d.saveAndZero(p); err != nil {
				return err
			}
		}
	}
	if err := d.zeroGradients(); err != nil {
		return err
	}
	for _, p := range d.order {
		if err := d.red.LastRead(p); err != nil {
			return err
		}
		if err := d.red.Ready(p); err != nil {
			return err
		}
	}
	if err := d.zeroRows(); err != nil {
		return err
	}
	if err := d.red.End(); err != nil {
		return err
	}
	return d.red.Compute().Sync(d.watch)
}

// adopt ends a Join: with an external optimizer every rank takes the parameters
// of rank root.
func (d *DDP) adopt(ctx context.Context, root int) error {
	if d.opt != nil {
		return d.Sync(ctx)
	}
	d.watch.start(ctx, d.opts.Timeout)
	defer d.watch.stop()
	if err := d.broadcast(d.watch, root, comm.Tag{Name: "join", Bucket: -1}); err != nil {
		return d.fail(err)
	}
	return nil
}
