package ddp

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// scaling multiplies gradients by weights where an even average isn't enough.
//
// Micro-steps of weights w₁, w₂, … whose losses are means add up to Σ wᵢ·gᵢ in
// units of the last weight, u: before a micro-step of weight w the sum is
// multiplied by u/w, and w becomes the unit. So nothing is multiplied as long as
// weights don't change. Before the exchange the sum is multiplied by u/W, with W
// the total weight of all ranks and micro-steps, and then the ranks' sums are
// added up.
type scaling struct {
	last  float64 // the weight of the current micro-step
	unit  float64 // the weight in whose units the accumulated gradients are
	total float64 // weight accumulated since the last synchronised step
	loss  float64 // weighted losses accumulated before the current micro-step
	on    bool    // this step's average is a weighted one

	local, shared scaler // on compute, and on the comm stream
	zeros         []launch
}

// scaler multiplies buckets by a factor in memory.
type scaler struct {
	host    []byte // the factor, as the host sees it
	buckets []launch
}

// launch is a kernel with its arguments.
type launch struct {
	kernel device.Kernel
	args   []device.Buffer
}

// prepareScaling compiles what weighted averages need, once.
func (d *DDP) prepareScaling() error {
	for _, s := range []*scaler{&d.scaling.local, &d.scaling.shared} {
		if s.host != nil {
			continue
		}
		if err := d.compileScaler(s); err != nil {
			return err
		}
	}
	return nil
}

func (d *DDP) compileScaler(s *scaler) error {
	factor, host, err := hostMemory(d.comm, 4)
	if err != nil {
		return err
	}
	for k, b := range d.layout.Buckets {
		t := device.Tensor{Shape: []int{b.Bytes / b.Type.Size()}, Type: b.Type}
		op := device.Op{Kind: device.Scale, In: []device.Tensor{t, {Shape: []int{1}, Type: dtype.Float32}}, Out: []device.Tensor{t}}
		kernel, err := d.dev.Compile(op)
		if err != nil {
			return fmt.Errorf("ddp: bucket %d of %v cannot be weighted: %w", k, b.Type, err)
		}
		s.buckets = append(s.buckets, launch{kernel, []device.Buffer{d.grads[k], factor, d.grads[k]}})
	}
	s.host = host
	return nil
}

// set gives the factor of launches that are enqueued from now on; none of the
// earlier ones may be in flight.
func (s *scaler) set(factor float64) {
	binary.NativeEndian.PutUint32(s.host, math.Float32bits(float32(factor)))
}

func (s *scaler) enqueue(st device.Stream, k int) error {
	return st.Launch(s.buckets[k].kernel, s.buckets[k].args)
}

// weigh takes account of the weight of the micro-step that begins.
func (d *DDP) weigh() error {
	s := &d.scaling
	w := 1.0
	if d.opts.Weighted {
		w = d.weight
		d.weight = 1
	}
	if d.micro == 0 {
		s.unit, s.total, s.loss = w, 0, 0
	}
	if d.opts.Weighted {
		s.total += w
	} else {
		s.total = 1 // micro-steps are summed, ranks averaged
	}
	s.last = w
	if d.micro == 0 || w == 0 || w == s.unit {
		return nil
	}
	s.local.set(s.unit / w)
	s.unit = w
	for k := range s.local.buckets {
		if err := s.local.enqueue(d.red.Compute(), k); err != nil {
			return err
		}
	}
	return nil
}

// zeroGradients enqueues zeros in every bucket, for a rank without data.
func (d *DDP) zeroGradients() error {
	if d.scaling.zeros == nil {
		for k, b := range d.layout.Buckets {
			t := device.Tensor{Shape: []int{b.Bytes / b.Type.Size()}, Type: b.Type}
			kernel, err := d.dev.Compile(device.Op{Kind: device.Fill, Out: []device.Tensor{t}})
			if err != nil {
				return fmt.Errorf("ddp: cannot compile zeros for bucket %d: %w", k, err)
			}
			d.scaling.zeros = append(d.scaling.zeros, launch{kernel, []device.Buffer{d.grads[k]}})
		}
	}
	for _, z := range d.scaling.zeros {
		if err := d.red.Compute().Launch(z.kernel, z.args); err != nil {
			return err
		}
	}
	return nil
}
