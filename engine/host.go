package engine

import (
	"fmt"
	"hash/maphash"

	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// hostCall runs v's op through its own Do and copies the result to out, or adds
// it. The op sees headers of its own over the operands' memory; what it returns
// may be a view, transposed, a scalar, or one of its operands.
func (p *Plan) hostCall(v *value, out device.Buffer, add bool) func() error {
	dst, _ := out.HostBytes()
	args := make([]gorgonia.Value, len(v.in))
	mems := make([][]byte, len(v.in))
	for i, w := range v.in {
		mems[i], _ = p.of(w).HostBytes()
		args[i] = header(mems[i], w.t.Shape, w.dt, w.scalar)
	}
	training := !p.opts.ForwardOnly
	var sum []byte // of float gradients
	if add {
		sum = make([]byte, len(dst))
	}
	run := func() error {
		if m, ok := v.op.(gorgonia.TrainModeOp); ok {
			if err := m.SetTraining(training); err != nil {
				return failed(v, args, err)
			}
		}
		r, err := do(v, args)
		if err != nil {
			return err
		}
		to := dst
		if add {
			to = sum
		}
		if err := copyValue(to, r, v.t, v.dt); err != nil {
			return failed(v, args, fmt.Errorf("its Do returned %w", err))
		}
		if add {
			addTo(dst, sum, v.t.Type)
		}
		return nil
	}
	if !p.opts.Poison {
		return run
	}
	seed := maphash.MakeSeed()
	return func() error {
		before := digest(seed, mems)
		if err := run(); err != nil {
			return err
		}
		if digest(seed, mems) != before {
			return failed(v, args, fmt.Errorf("its Do changed an operand"))
		}
		return nil
	}
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
		return nil, failed(v, args, fmt.Errorf("its Do returned nothing"))
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
