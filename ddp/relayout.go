package ddp

import (
	"context"
	"errors"
	"fmt"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/engine"
)

// Relayout continues with other bucket caps: parameters, gradients and moments
// move, and nothing else changes. It is collective, between steps; all ranks
// must give the same caps. It waits for what is in flight, and buffers that were
// taken from the DDP before (ParamBuffers, GradBuffers, Optimizer().States())
// are to be taken anew; ValueGrads stays the same slice. Hooks keep state by
// bucket, so with Options.Hook it is refused.
func (d *DDP) Relayout(ctx context.Context, caps bucket.Caps) error {
	if err := d.usable(); err != nil {
		return err
	}
	if d.micro > 0 || d.nosync {
		return errors.New("ddp: Relayout within an accumulation: call Step outside NoSync first")
	}
	if d.hook != nil {
		return errors.New("ddp: Relayout with a Hook, which keeps state by bucket")
	}
	if _, err := caps.Resolve(d.layout.Params, d.order); err != nil {
		return err
	}
	d.watch.start(ctx, d.opts.Timeout)
	defer d.watch.stop()
	if err := d.relayout(caps); err != nil {
		return d.fail(err)
	}
	return nil
}

// relayout is Relayout within the bounds of a step.
func (d *DDP) relayout(caps bucket.Caps) error {
	resolved, err := caps.Resolve(d.layout.Params, d.order)
	if err != nil {
		return err
	}
	layout, err := bucket.Assign(d.layout.Params, d.order, caps)
	if err != nil {
		return err
	}
	if err := d.red.Sync(d.watch); err != nil {
		return err
	}
	d.takeTimes(d.step)
	if err := d.rearrange(layout); err != nil {
		return err
	}
	d.caps = resolved
	return nil
}

func (d *DDP) rearrange(layout *bucket.Layout) error {
	err := d.compare(d.watch, d.red.Comm(), "layout", layout.Encode(), diffLayouts)
	if err != nil || layout.Hash() == d.layout.Hash() {
		return err
	}
	if err := d.move(layout); err != nil {
		return err
	}
	d.place()
	if err := d.bindMoved(); err != nil {
		return err
	}
	for _, x := range d.splits {
		x.add.args[2] = d.gradBufs[x.Param]
	}
	if d.usage.on {
		for p := range d.usage.zeroArg {
			d.usage.zeroArg[p][0] = d.gradBufs[p]
		}
	}
	d.scaling.local, d.scaling.shared, d.scaling.zeros = scaler{}, scaler{}, nil
	if err := d.makeValueGrads(); err != nil {
		return err
	}
	d.noteLayout()
	return d.wire(d.red.Comm())
}

// move rearranges both arenas. Values that were bound to nodes since the last
// step come along.
func (d *DDP) move(layout *bucket.Layout) error {
	for p, n := range d.nodes {
		q := d.layout.Params[p]
		if err := engine.Store(d.paramBufs[p], n.Value(), q.Shape, q.Type); err != nil {
			return fmt.Errorf("parameter %q: %w", q.Name, err)
		}
	}
	for _, a := range d.arenas {
		mem, ok := a.HostBytes()
		if !ok {
			return fmt.Errorf("memory of %s that the host cannot reach cannot be rearranged", d.dev.Name())
		}
		if err := bucket.Move(mem, d.layout, layout); err != nil {
			return err
		}
	}
	d.layout = layout
	return nil
}

// bindMoved binds nodes and plans to where parameters and gradients are now.
func (d *DDP) bindMoved() error {
	for p, n := range d.nodes {
		if err := d.letNode(p, n); err != nil {
			return err
		}
	}
	for _, b := range d.branches {
		var params, grads []device.Buffer
		for i, p := range b.params {
			if err := d.letNode(p, b.nodes[i]); err != nil {
				return err
			}
			params, grads = append(params, d.paramBufs[p]), append(grads, d.gradBufs[p])
		}
		if err := errors.Join(b.plan.BindParams(params), b.plan.BindGrads(grads)); err != nil {
			return err
		}
	}
	return nil
}
