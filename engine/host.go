package engine

import (
	"errors"
	"fmt"
	"hash/maphash"

	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// hostOp runs an op through its own Do. The op sees headers of its own over the
// operands' memory; what it returns may be a view, transposed, a scalar, or one
// of its operands, and is copied to where the plan wants it.
type hostOp struct {
	v        *value
	args     []gorgonia.Value
	mems     [][]byte // of the operands
	dst      []byte
	sum      []byte // takes the result first when it is added to dst, else nil
	training bool
}

func (p *Plan) hostCall(v *value, out device.Buffer, add bool) func() error {
	h := &hostOp{v: v, training: !p.opts.ForwardOnly}
	h.dst, _ = out.HostBytes()
	for _, w := range v.in {
		mem, _ := p.of(w).HostBytes()
		h.mems = append(h.mems, mem)
		h.args = append(h.args, header(mem, w.t.Shape, w.dt, w.scalar))
	}
	if add {
		h.sum = make([]byte, len(h.dst))
	}
	if p.opts.Poison {
		return h.runGuarded
	}
	return h.run
}

func (h *hostOp) run() error {
	if m, ok := h.v.op.(gorgonia.TrainModeOp); ok {
		if err := m.SetTraining(h.training); err != nil {
			return failed(h.v, h.args, err)
		}
	}
	r, err := do(h.v, h.args)
	if err != nil {
		return err
	}
	to := h.dst
	if h.sum != nil {
		to = h.sum
	}
	if err := copyValue(to, r, h.v.t, h.v.dt); err != nil {
		return failed(h.v, h.args, fmt.Errorf("its Do returned %w", err))
	}
	if h.sum != nil {
		addTo(h.dst, h.sum, h.v.t.Type)
	}
	return nil
}

// runGuarded also checks that the op leaves its operands alone.
func (h *hostOp) runGuarded() error {
	seed := maphash.MakeSeed()
	before := digest(seed, h.mems)
	if err := h.run(); err != nil {
		return err
	}
	if digest(seed, h.mems) != before {
		return failed(h.v, h.args, errors.New("its Do changed an operand"))
	}
	return nil
}

// do calls v's Do and turns a panic into an error.
func do(v *value, args []gorgonia.Value) (r gorgonia.Value, err error) {
	defer func() {
		if x := recover(); x != nil {
			err = failed(v, args, fmt.Errorf("panic: %v", x))
		}
	}()
	if r, err = v.op.Do(args...); err != nil {
		return nil, failed(v, args, err)
	}
	if r == nil {
		return nil, failed(v, args, errors.New("its Do returned nothing"))
	}
	return r, nil
}

func failed(v *value, args []gorgonia.Value, err error) error {
	shapes := make([]string, len(args))
	for i, a := range args {
		shapes[i] = fmt.Sprintf("%v%v", a.Dtype(), a.Shape())
	}
	return fmt.Errorf("engine: %s: %s of %v → %v: %w", v.name(), v.op, shapes, v.t, err)
}

// addTo adds float elements.
func addTo(dst, src []byte, t dtype.Type) {
	if t == dtype.Float64 {
		sumTo(cast[float64](dst), cast[float64](src))
		return
	}
	sumTo(cast[float32](dst), cast[float32](src))
}

func sumTo[T float32 | float64](dst, src []T) {
	for i, x := range src {
		dst[i] += x
	}
}

func digest(seed maphash.Seed, mems [][]byte) uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	for _, m := range mems {
		h.Write(m)
	}
	return h.Sum64()
}

// poison fills what is no longer in use with bytes that are NaN as a float and
// out of range as an index.
func (p *Plan) poison(items []*item) error {
	mem, _ := p.arena.HostBytes()
	for _, it := range items {
		fill(mem[it.off : it.off+it.size])
	}
	return nil
}

func (p *Plan) poisonAll() error {
	mem, _ := p.arena.HostBytes()
	fill(mem)
	return nil
}

func fill(b []byte) {
	for i := range b {
		b[i] = 0xff
	}
}
