package optim

import (
	"encoding/binary"

	"github.com/tandem-go/tandem/device"
)

// Skip leaves parameters out of the updates that follow: those for which the
// slice, one entry a parameter, is true keep their value and moments, and
// nothing decays. nil leaves none out. The slice is read when updates are
// enqueued. Bias correction counts steps, not a parameter's own updates.
func (o *Optimizer) Skip(params []bool) { o.skipped = params }

func (o *Optimizer) skipsSome(k int) bool {
	if o.skipped == nil {
		return false
	}
	for _, p := range o.cfg.Layout.Buckets[k].Params {
		if o.skipped[p] {
			return true
		}
	}
	return false
}

// updateOthers enqueues one kernel for each parameter of bucket k that is not
// left out.
func (o *Optimizer) updateOthers(s device.Stream, k int) error {
	if o.single == nil {
		o.single = make([]launch, len(o.cfg.Layout.Params))
	}
	kind, _ := o.rule.kind()
	for _, p := range o.cfg.Layout.Buckets[k].Params {
		slot := o.cfg.Layout.Slots[p]
		if o.skipped[p] || slot.Bytes == 0 {
			continue
		}
		l := &o.single[p]
		if l.kernel == nil {
			var err error
			if *l, err = o.update(kind, k, o.decays(p), slot.Offset, slot.Bytes); err != nil {
				return err
			}
		}
		if err := s.Launch(l.kernel, l.args); err != nil {
			return err
		}
	}
	return nil
}

// Skip leaves the gradients of parameters out of the norms that follow, as
// Optimizer.Skip does. No norm may be in flight.
func (n *Norm) Skip(params []bool) {
	n.skipped = params
	for p, skip := range params {
		if skip {
			binary.NativeEndian.PutUint64(n.squares[8*p:], 0)
		}
	}
}
