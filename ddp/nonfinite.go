package ddp

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/overlap"
)

// NonFiniteError says that a loss or a gradient is NaN or infinite. All ranks
// get the same one, in the same step.
type NonFiniteError struct {
	// Step counts synchronised steps from 0; the text counts from 1, as people do.
	Step int
	// Rank is the first rank concerned, -1 where only the average shows it.
	Rank int
	// Param is the parameter whose gradient was the first in production order
	// that was not finite, "" when all were finite.
	Param string
	// Loss is that rank's loss, or the mean where Rank is -1.
	Loss float64
	// Clipped says that gradients are clipped (Options.MaxNorm).
	Clipped bool
}

// Culprit is Rank: the one whose numbers are to blame.
func (e *NonFiniteError) Culprit() int { return e.Rank }

func (e *NonFiniteError) Error() string {
	where := fmt.Sprintf("on rank %d", e.Rank)
	if e.Rank < 0 {
		where = "on an unknown rank"
	}
	what := fmt.Sprintf("in the gradient of %q first", e.Param)
	if e.Param == "" {
		what = "while every gradient is finite"
	}
	advice := "try a lower learning rate, or clipping"
	if e.Clipped {
		advice = "try a lower learning rate"
	}
	return fmt.Sprintf("ddp: step %d: not a finite number (loss %v) %s, %s; %s", e.Step+1, e.Loss, where, what, advice)
}

// nonFinite looks at what a synchronised step gave. Loss and norm are
// bit-identical on all ranks, so they agree on whether to go into diagnose,
// which is collective.
func (d *DDP) nonFinite() error {
	bad := -1
	if d.norm != nil {
		bad = d.norm.NonFinite(d.order)
	}
	if finite(d.stats.Loss) && (d.lossScale.overflowed(bad >= 0) || bad < 0) {
		return nil
	}
	if d.schedule == overlap.NoComm {
		return &NonFiniteError{Step: d.step, Rank: d.Rank(), Param: d.paramName(bad), Loss: d.stats.LocalLoss, Clipped: d.opts.MaxNorm > 0}
	}
	return d.diagnose()
}

// noteNonFinite remembers, for the header of the next synchronised step, that a
// micro-step failed: the other ranks know nothing of it yet.
func (d *DDP) noteNonFinite() error {
	if d.bad == 0 && !finite(d.stats.LocalLoss) {
		d.bad = float64(1 + d.firstNonFinite())
	}
	return nil
}

// nonFiniteBefore is the error where a micro-step's loss was not finite.
func (d *DDP) nonFiniteBefore() error {
	h := &d.header
	for r := range h.ranks {
		if l := h.get(r, laneLoss); !finite(l) {
			return &NonFiniteError{Step: d.step, Rank: r, Param: d.paramName(int(h.get(r, laneBad)) - 1), Loss: l, Clipped: d.opts.MaxNorm > 0}
		}
	}
	return nil
}

// diagnose finds the rank and the parameter. Gradients were reduced in place,
// so each rank computes its own once more, alone, where its inputs are still
// there and its parameters unchanged. It is collective.
func (d *DDP) diagnose() error {
	if err := d.red.WaitReduced(d.watch); err != nil {
		return err
	}
	e := &NonFiniteError{Step: d.step, Rank: -1, Loss: d.stats.Loss, Clipped: d.opts.MaxNorm > 0}
	for r := d.Size() - 1; r >= 0; r-- {
		if l := d.loss.of(r); !finite(l) {
			e.Rank, e.Loss = r, l
		}
	}
	e.Param = d.paramName(d.firstNonFinite())
	local := -1
	if d.micro == 0 && d.joined != joinDone && (d.opt == nil || d.opts.whole()) {
		if err := d.rerun(); err != nil {
			return err
		}
		local = d.firstNonFinite()
	}
	found, err := d.gatherIndex(local)
	if err != nil {
		return err
	}
	for r := len(found) - 1; r >= 0; r-- {
		if found[r] >= 0 {
			e.Rank, e.Param, e.Loss = r, d.paramName(found[r]), d.loss.of(r)
		}
	}
	return e
}

// rerun computes this rank's own gradients of the step once more.
func (d *DDP) rerun() error {
	if err := d.red.Begin(d.watch, false, d.schedule); err != nil {
		return err
	}
	if err := d.startUsage(); err != nil {
		return err
	}
	d.plan.Accumulate(false)
	d.plan.SplitRuns(false)
	if err := d.plan.Run(d.red.Compute(), d.ready); err != nil {
		return err
	}
	if err := d.red.End(); err != nil {
		return err
	}
	return d.red.Compute().Sync(d.watch)
}

// gatherIndex gives every rank the index that each rank has found.
func (d *DDP) gatherIndex(mine int) ([]int, error) {
	src, out, err := hostMemory(d.comm, 8)
	if err != nil {
		return nil, err
	}
	dst, in, err := hostMemory(d.comm, 8*d.Size())
	if err != nil {
		return nil, err
	}
	binary.NativeEndian.PutUint64(out, uint64(mine))
	if err := d.comm.AllGather(d.red.Comm(), dst, src, dtype.Int64, comm.Tag{Name: "diagnosis", Bucket: -1}); err != nil {
		return nil, err
	}
	if err := d.red.Comm().Sync(d.watch); err != nil {
		return nil, err
	}
	all := make([]int, d.Size())
	for r := range all {
		all[r] = int(int64(binary.NativeEndian.Uint64(in[8*r:])))
	}
	return all, nil
}

// firstNonFinite is the first parameter, in production order, whose gradient
// memory holds a NaN or an infinity; -1 when none does.
func (d *DDP) firstNonFinite() int {
	for _, p := range d.order {
		b, ok := d.gradBufs[p].HostBytes()
		if !ok {
			continue
		}
		t := d.layout.Params[p].Type
		for i := range len(b) / t.Size() {
			if v := scalar(b, t, i); math.IsNaN(v) || math.IsInf(v, 0) {
				return p
			}
		}
	}
	return -1
}

func (d *DDP) paramName(p int) string {
	if p < 0 {
		return ""
	}
	return d.layout.Params[p].Name
}
