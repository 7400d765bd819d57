package engine

import (
	"errors"
	"fmt"

	"gorgonia.org/gorgonia"
)

// BindOutputs binds the loss, Options.Outputs and what each gorgonia.Read points
// at to the values of the last run. The stream must have been synced, and no
// other run enqueued since. The values are copies: they stay as they are until
// the next BindOutputs, which writes to the same objects. Nodes that are inputs
// or constants keep the values they have.
func (p *Plan) BindOutputs() error {
	if !p.resolved {
		return errors.New("engine: BindOutputs before a run")
	}
	for _, o := range p.outputs {
		mem, ok := o.buf.HostBytes()
		if !ok {
			return errors.New("engine: outputs can be bound only where the host can read the device's memory")
		}
		if o.val == nil {
			o.mem = make([]byte, len(mem))
			o.val = header(o.mem, o.v.t.Shape, o.v.dt, o.v.scalar)
		}
		copy(o.mem, mem)
		for _, into := range o.into {
			*into = o.val
		}
		if o.bind && o.v.node.Value() != o.val {
			if err := gorgonia.UnsafeLet(o.v.node, o.val); err != nil {
				return fmt.Errorf("engine: binding %s: %w", o.v.name(), err)
			}
		}
	}
	return nil
}
