package optim

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// Norm computes the global gradient norm: a sum of squares for each parameter,
// added in parameter order, so that its bits depend neither on the buckets nor
// on the order in which they were reduced.
type Norm struct {
	layout  *bucket.Layout
	sums    [][]square // by bucket, one for each parameter with elements
	skipped []bool     // by parameter; nil: none
	clip    launch
	squares []byte // one float64 for each parameter, as the host sees them
	hyper   []byte
}

// square is the square sum of one parameter's gradient.
type square struct {
	param int
	launch
}

// NewNorm prepares the norm of float32 gradients that lie in grads, one buffer
// for each bucket. hyper is where the norm and the clip factor are written:
// Optimizer.Hyper, or nil for memory of its own.
func NewNorm(dev device.Device, layout *bucket.Layout, grads []device.Buffer, hyper device.Buffer) (*Norm, error) {
	n := &Norm{layout: layout, sums: make([][]square, len(layout.Buckets))}
	var err error
	if hyper == nil {
		if hyper, err = dev.Alloc(4 * device.HyperLen); err != nil {
			return nil, fmt.Errorf("optim: cannot allocate the gradient norm: %w", err)
		}
	}
	squares, err := dev.Alloc(8 * max(1, len(layout.Params)))
	if err != nil {
		return nil, fmt.Errorf("optim: cannot allocate the gradients' squares: %w", err)
	}
	var ok, ok2 bool
	n.squares, ok = squares.HostBytes()
	n.hyper, ok2 = hyper.HostBytes()
	if !ok || !ok2 {
		return nil, fmt.Errorf("optim: %s: the gradient norm needs memory that the host can read", dev.Name())
	}
	for p, param := range layout.Params {
		if err := n.addSum(dev, grads, squares, p, param); err != nil {
			return nil, err
		}
	}
	hyperT := device.Tensor{Shape: []int{device.HyperLen}, Type: dtype.Float32}
	all := device.Tensor{Shape: []int{len(layout.Params)}, Type: dtype.Float64}
	k, err := dev.Compile(device.Op{Kind: device.ClipScale, In: []device.Tensor{all, hyperT}, Out: []device.Tensor{hyperT}})
	if err != nil {
		return nil, fmt.Errorf("optim: cannot compile the gradient norm: %w", err)
	}
	n.clip = launch{k, []device.Buffer{squares.Slice(0, all.Bytes()), hyper, hyper}}
	return n, nil
}

func (n *Norm) addSum(dev device.Device, grads []device.Buffer, squares device.Buffer, p int, param bucket.Param) error {
	if param.Type != dtype.Float32 {
		return fmt.Errorf("optim: parameter %q is %v; the gradient norm needs float32", param.Name, param.Type)
	}
	slot := n.layout.Slots[p]
	if slot.Bytes == 0 {
		return nil // its square stays zero
	}
	k, err := dev.Compile(device.Op{
		Kind: device.SumSquares,
		In:   []device.Tensor{{Shape: []int{param.Elems()}, Type: param.Type}},
		Out:  []device.Tensor{{Shape: []int{1}, Type: dtype.Float64}},
	})
	if err != nil {
		return fmt.Errorf("optim: cannot compile the square sum of %q: %w", param.Name, err)
	}
	args := []device.Buffer{grads[slot.Bucket].Slice(slot.Offset, slot.Bytes), squares.Slice(8*p, 8)}
	n.sums[slot.Bucket] = append(n.sums[slot.Bucket], square{p, launch{k, args}})
	return nil
}

// Squares enqueues the square sums of the gradients of bucket k.
func (n *Norm) Squares(s device.Stream, k int) error {
	for i := range n.sums[k] {
		q := &n.sums[k][i]
		if n.skipped != nil && n.skipped[q.param] {
			continue
		}
		if err := s.Launch(q.kernel, q.args); err != nil {
			return err
		}
	}
	return nil
}

// Clip enqueues, after the squares of every bucket, the norm and the factor
// that updates multiply gradients by.
func (n *Norm) Clip(s device.Stream) error { return s.Launch(n.clip.kernel, n.clip.args) }

// Value is the norm before clipping, once Clip has run. Where it overflows
// float32 it is +Inf, which is not a sign of a gradient that is not finite.
func (n *Norm) Value() float64 {
	return float64(math.Float32frombits(binary.NativeEndian.Uint32(n.hyper[4*device.HyperNorm:])))
}

// NonFinite is the first parameter in the given order whose gradient holds a
// NaN or an infinity, or -1, once Clip has run.
func (n *Norm) NonFinite(order []int) int {
	for _, p := range order {
		sq := math.Float64frombits(binary.NativeEndian.Uint64(n.squares[8*p:]))
		if math.IsNaN(sq) || math.IsInf(sq, 0) {
			return p
		}
	}
	return -1
}
