// Package hook holds ways to turn the gradients of a bucket into their average
// that move fewer bytes than an all-reduce: half precision, low-rank factors,
// the largest elements only. They lose precision; with error feedback what a
// step lost is added to the next step's gradients, so nothing is lost for good.
//
// A Hook is a plain struct of options. It is opened once for all buckets and
// then called for each bucket, in bucket order, on the stream of collectives,
// while the backward pass goes on. Hooks compose: PowerSGD reduces its factors
// by another hook.
//
// All ranks get the same bits, whatever their instruction sets: what follows
// the last collective is made of exactly rounded operations in a fixed order.
package hook

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/internal/simd"
)

// Hook says how buckets are reduced. Its fields are its options, which must be
// the same on all ranks: they are compared as fmt's %#v prints them, so an
// implementation is best a struct of plain values.
type Hook interface {
	// Open prepares the reduction of env's buckets. It is collective only as far
	// as a hook's documentation says so; those here send nothing.
	Open(env Env) (Reducer, error)
}

// Env is what a hook works on.
type Env struct {
	Device  device.Device
	Comm    comm.Communicator
	Buckets []Bucket
}

// Bucket is a group of gradients that are reduced together.
type Bucket struct {
	// Grad holds the gradients; what lies between two of them is zero.
	Grad   device.Buffer
	Type   dtype.Type
	Params []Param
}

// Param is one gradient in a bucket.
type Param struct {
	Name          string
	Shape         []int // nil for a scalar
	Offset, Bytes int   // in Grad
}

// Step is what is known when a bucket is to be reduced. It is the same for all
// buckets of a step, and Number is the same on all ranks.
type Step struct {
	// Number counts synchronised steps from 0.
	Number int
	// Scale is what this rank's gradients are to be multiplied by, so that the
	// sum over ranks is the average: the hook owns the division.
	Scale float64
	// LossScale is a power of two that hooks which round to float16 multiply by
	// before they round and divide by afterwards, so that small gradients don't
	// vanish. 0 means 1.
	LossScale float64
}

// become takes over what Reduce was given. All buckets of a step bring the same,
// and work that is enqueued already reads it: it is written with a step's first
// bucket only, when the work of the step before has ended.
func (s *Step) become(v Step) {
	if *s != v {
		*s = v
	}
}

func (s Step) lossScale() float64 {
	if s.LossScale == 0 {
		return 1
	}
	return s.LossScale
}

// Reducer is an opened hook.
type Reducer interface {
	// Reduce enqueues on s what replaces the gradients of a bucket by the sum
	// over ranks of Scale·gradient, or by something close. It is called for each
	// bucket of a step, and not again for it before the step has ended.
	Reduce(s device.Stream, bucket int, step Step) error
	// States lists what must survive for a resumed run to go on alike, such as
	// errors to be fed back. They belong to the rank.
	States() []State
}

// State is memory of a Reducer, to be read and written between steps.
type State struct {
	Name string
	Data []byte
}

// open checks what the hooks here need: float32 in the host's memory.
func (e *Env) open(name string) (*simd.Kernels, [][]float32, error) {
	k, err := simd.For(simd.Best())
	if err != nil {
		return nil, nil, err
	}
	all := make([][]float32, len(e.Buckets))
	for i, b := range e.Buckets {
		mem, ok := b.Grad.HostBytes()
		if !ok {
			return nil, nil, fmt.Errorf("hook: %s runs on the host, which cannot reach the memory of %s", name, e.Device.Name())
		}
		if b.Type != dtype.Float32 {
			return nil, nil, fmt.Errorf("hook: %s reduces float32, and bucket %d is %v", name, i, b.Type)
		}
		all[i] = cast[float32](mem)
	}
	return k, all, nil
}

// alloc is memory for collectives, as its elements and as a buffer.
func alloc[T any](c comm.Communicator, n int) (device.Buffer, []T, error) {
	var z T
	b, err := c.Alloc(n * int(unsafe.Sizeof(z)))
	if err != nil {
		return nil, nil, fmt.Errorf("hook: cannot allocate %d bytes: %w", n*int(unsafe.Sizeof(z)), err)
	}
	mem, ok := b.HostBytes()
	if !ok {
		return nil, nil, errors.New("hook: the communicator's memory cannot be addressed by the host")
	}
	return b, cast[T](mem), nil
}

// cast sees memory as elements of T, which its alignment allows.
func cast[T any](b []byte) []T {
	var z T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(z)))
}

// raw sees elements as memory.
func raw[T any](s []T) []byte {
	var z T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(z)))
}

// residual is what a rank has not yet sent of a bucket; nil without feedback.
type residual []float32

// take makes v = scale·g + residual, and scales g. v may be the residual.
func (r residual) take(k *simd.Kernels, v, g []float32, scale float64) {
	k.Scale(g, g, float32(scale))
	if r == nil {
		copy(v, g)
		return
	}
	k.Add(v, g, r)
}

// feedback are the residuals of all buckets.
type feedback []residual

func newFeedback(on bool, buckets [][]float32) feedback {
	f := make(feedback, len(buckets))
	for i, b := range buckets {
		if on {
			f[i] = make(residual, len(b))
		}
	}
	return f
}

func (f feedback) states() []State {
	var all []State
	for i, r := range f {
		if r != nil {
			all = append(all, State{fmt.Sprintf("residual.%d", i), raw(r)})
		}
	}
	return all
}

// AllReduce is the plain reduction as a hook: exact, nothing saved. It is what
// hooks that reduce by another one do by default.
type AllReduce struct{}

// Open implements Hook.
func (AllReduce) Open(env Env) (Reducer, error) {
	k, grads, err := env.open("AllReduce")
	if err != nil {
		return nil, err
	}
	r := &allReduce{env: env}
	for _, g := range grads {
		r.scale = append(r.scale, func() error { k.Scale(g, g, float32(r.step.Scale)); return nil })
	}
	return r, nil
}

type allReduce struct {
	env   Env
	step  Step
	scale []func() error
}

func (r *allReduce) Reduce(s device.Stream, bucket int, step Step) error {
	r.step.become(step)
	if step.Scale != 1 {
		if err := s.HostFunc(r.scale[bucket]); err != nil {
			return err
		}
	}
	b := r.env.Buckets[bucket]
	return r.env.Comm.AllReduce(s, b.Grad, b.Grad, b.Type, comm.Sum, comm.Tag{Name: "bucket", Bucket: bucket})
}

func (r *allReduce) States() []State { return nil }
