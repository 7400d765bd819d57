package engine

import (
	"errors"
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// Unreached lists the indices of those params that loss doesn't depend on
// differentiably. Compile refuses them; leave them out where that is intended.
func Unreached(loss *gorgonia.Node, params gorgonia.Nodes) ([]int, error) {
	if loss == nil || loss.Graph() == nil {
		return nil, errors.New("engine: the loss is nil or in no graph")
	}
	for _, n := range params {
		if n == nil || n.Graph() != loss.Graph() {
			return nil, fmt.Errorf("engine: a parameter is nil or in another graph than the loss %s", nodeName(loss))
		}
	}
	mend(loss.Graph())
	gr, err := collect(loss, params, nil)
	if err != nil {
		return nil, err
	}
	f, err := analyse(gr, Options{})
	if err != nil {
		return nil, err
	}
	return f.unreached(), nil
}

// unreached lists the parameters that the loss doesn't depend on.
func (f *forward) unreached() []int {
	var missing []int
	for i, n := range f.gr.params {
		if v := f.gr.byID[n.ID()]; v == nil || !f.toLoss[v] {
			missing = append(missing, i)
		}
	}
	return missing
}

// TypeOf is the element type under which gorgonia's dt is held.
func TypeOf(dt tensor.Dtype) (dtype.Type, error) {
	t, ok := typeOf(dt)
	if !ok {
		return t, fmt.Errorf("engine: no plan holds elements of %v", dt)
	}
	return t, nil
}

// Store copies v, of the shape and type given, to b. It fails where v is
// something else or the host can't address b.
func Store(b device.Buffer, v gorgonia.Value, shape []int, t dtype.Type) error {
	mem, ok := b.HostBytes()
	if !ok {
		return fmt.Errorf("engine: the host can't address this device's memory")
	}
	if v == nil {
		return errors.New("engine: no value to store")
	}
	if err := shapeFits(v, shape); err != nil {
		return fmt.Errorf("engine: a value of %w", err)
	}
	if err := copyValue(mem, v, device.Tensor{Shape: shape, Type: t}, v.Dtype()); err != nil {
		return fmt.Errorf("engine: a value with %w", err)
	}
	return nil
}
