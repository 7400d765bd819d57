package cpu

import (
	"fmt"

	"github.com/tandem-go/tandem/device"
)

// program is what a kind of operation is compiled to. run is called with the
// pool held and the memory of the arguments in the order In, State, Out; it may
// keep them in its own fields until it returns, since a kernel runs on one
// stream at a time.
type program interface {
	run(p *pool, a [][]byte) error
}

// kernel implements device.Kernel.
type kernel struct {
	dev  *Device
	op   device.Op
	name string
	prog program
	args []device.Tensor // In, State, Out
	mem  [][]byte        // of the run in progress
}

var _ device.Kernel = (*kernel)(nil)

func (k *kernel) Name() string  { return k.name }
func (k *kernel) Op() device.Op { return k.op }

// Compile returns a kernel for op. Copy and Fill take every type; the other
// kinds are for float32, with int64 for indices and float64 where the kind says
// so, and anything else is device.ErrUnsupported. Shapes that don't fit
// together are an error that is not ErrUnsupported.
func (d *Device) Compile(op device.Op) (device.Kernel, error) {
	d.mu.Lock()
	closed := d.closed
	d.mu.Unlock()
	if closed {
		return nil, ErrClosed
	}
	c, ok := compilers[op.Kind]
	if !ok {
		return nil, fmt.Errorf("cpu: kind %q: %w", op.Kind, device.ErrUnsupported)
	}
	k := &kernel{dev: d, op: op, name: op.String(), args: arguments(op)}
	k.mem = make([][]byte, len(k.args))
	if err := c.signature.check(op); err != nil {
		return nil, fmt.Errorf("cpu: compile %v: %w", op, err)
	}
	prog, err := c.compile(d, op)
	if err != nil {
		return nil, fmt.Errorf("cpu: compile %v: %w", op, err)
	}
	k.prog = prog
	return k, nil
}

// arguments lists the types of a kernel's arguments in their order.
func arguments(op device.Op) []device.Tensor {
	var a []device.Tensor
	a = append(a, op.In...)
	for _, s := range op.State {
		a = append(a, s.Tensor)
	}
	return append(a, op.Out...)
}

// check refuses arguments that the kernel can't run on.
func (k *kernel) check(args []device.Buffer) error {
	if len(args) != len(k.args) {
		return fmt.Errorf("cpu: launch of %s with %d arguments, want %d", k.name, len(args), len(k.args))
	}
	for i, a := range args {
		t := k.args[i]
		if a == nil {
			return fmt.Errorf("cpu: launch of %s: argument %d is nil", k.name, i)
		}
		b, ok := a.HostBytes()
		switch {
		case !ok:
			return fmt.Errorf("cpu: launch of %s: argument %d of type %T is not in host memory", k.name, i, a)
		case len(b) != t.Bytes():
			return fmt.Errorf("cpu: launch of %s: argument %d has %d bytes, want %d for %v", k.name, i, len(b), t.Bytes(), t)
		case !aligned(b, t.Type.Size()):
			return fmt.Errorf("cpu: launch of %s: argument %d is not aligned to its type %v", k.name, i, t.Type)
		}
	}
	return nil
}

// run runs the kernel on arguments that check has seen.
func (k *kernel) run(args []device.Buffer) error {
	for i, a := range args {
		k.mem[i], _ = a.HostBytes()
	}
	err := k.prog.run(k.dev.pool, k.mem)
	clear(k.mem)
	if err != nil {
		return fmt.Errorf("cpu: %s: %w", k.name, err)
	}
	return nil
}
