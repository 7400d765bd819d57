package ddp

import (
	"slices"
	"time"

	"github.com/tandem-go/tandem/overlap"
)

// Stats is what is known of the last steps.
type Stats struct {
	// Step is the number of synchronised steps so far.
	Step int
	// Loss is the objective of the last synchronised step, whose gradient was
	// applied: the mean over ranks (weighted by Options.Weighted) of the losses,
	// micro-steps summed. All ranks have the same bits. With the schedule
	// overlap.NoComm it is this rank's.
	Loss float64
	// LocalLoss is this rank's loss in its last step or micro-step.
	LocalLoss float64
	// Norm is the gradient norm before clipping, 0 when it isn't computed.
	Norm float64
	// LossScale is that of the next step, 1 without loss scaling, and Skipped the
	// number of steps so far whose update was left out because of an overflow.
	LossScale float64
	Skipped   int
	// LR is the learning rate that was applied, 0 with an external optimizer.
	LR float64
	// Wall is the time in Step, and Forward and Backward that of the two passes,
	// micro-steps of one accumulation added up.
	Wall, Forward, Backward time.Duration
	// Timed is the step, counted from 1 as Step is, that Times is about. With a
	// built-in optimizer updates end after Step, so Times is one step behind
	// until Sync is called.
	Timed int
	Times overlap.Times
	// Overlapped is the part of Times.Comm that the backward pass hid.
	Overlapped time.Duration
	// WireBytes is what the gradients of the last synchronised step made this rank
	// send: of an all-reduce among P ranks, 2·(P−1)/P of the bytes.
	WireBytes int
	// Buckets is the number of buckets, and Bytes their size.
	Buckets, Bytes int
	// BucketBytes are their sizes, in the order in which they are reduced, and
	// ReadyOrder the parameters, as indices into Layout().Params, in the order in
	// which their gradients become final. They are shared: don't change them.
	BucketBytes, ReadyOrder []int
}

// Stats may be called after any Step. It copies the times of buckets.
func (d *DDP) Stats() Stats {
	s := d.stats
	s.Times.Buckets = slices.Clone(s.Times.Buckets)
	return s
}

func (d *DDP) takeTimes(step int) {
	d.stats.Timed = step
	d.stats.Times = d.red.Times()
	d.stats.Overlapped = d.stats.Times.Comm - d.stats.Times.Exposed
}

// takePhases adds up the times of the passes.
func (d *DDP) takePhases(wall time.Duration) {
	s := &d.stats
	if d.micro == 0 {
		s.Wall, s.Forward, s.Backward = 0, 0, 0
	}
	s.Wall += wall
	if forward, err := d.plan.ForwardDone().Since(d.begin); err == nil {
		s.Forward += forward
	}
	if backward, err := d.end.Since(d.plan.ForwardDone()); err == nil {
		s.Backward += backward
	}
}
