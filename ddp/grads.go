package ddp

import (
	"context"

	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem/engine"
)

// valueGrad is a parameter for a solver. The gradient is a view of the bucket,
// never the gradient's node: two parameters may share one node, and a constant
// gradient's node can't be bound, but every parameter has a slot of its own.
type valueGrad struct {
	node *gorgonia.Node
	grad gorgonia.Value
}

func (v *valueGrad) Value() gorgonia.Value         { return v.node.Value() }
func (v *valueGrad) Grad() (gorgonia.Value, error) { return v.grad, nil }
func (v *valueGrad) Name() string                  { return v.node.Name() }

// ValueGrads is what gorgonia's solvers take: for each parameter, in the order
// given to New, its value and a view of its gradient in bucket memory. Solvers
// write to both in place. With a built-in optimizer it is for reading, after
// Sync. The same slice is returned every time.
func (d *DDP) ValueGrads() []gorgonia.ValueGrad { return d.valueGrads }

func (d *DDP) makeValueGrads() error {
	fresh := d.valueGrads == nil
	for i, p := range d.layout.Params {
		view, err := engine.View(d.gradBufs[i], p.Shape, p.Type)
		if err != nil {
			return err
		}
		if !fresh {
			d.valueGrads[i].(*valueGrad).grad = view
			continue
		}
		d.valueGrads = append(d.valueGrads, &valueGrad{d.nodes[i], view})
	}
	return nil
}

// vm adapts a DDP to gorgonia.VM.
type vm struct{ d *DDP }

// VM adapts d to gorgonia.VM, for training loops written against it: RunAll is
// Step with the default deadline; Reset does nothing, and Close leaves d open.
// After RunAll the loss, the targets of gorgonia.Read and Options.Outputs are
// bound; other intermediate nodes are not.
func (d *DDP) VM() gorgonia.VM { return vm{d} }

func (v vm) RunAll() error { return v.d.Step(context.Background()) }
func (v vm) Reset()        {}
func (v vm) Close() error  { return nil }
