package cpu

import (
	"bytes"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/internal/simd"
)

// rig is a device for each instruction set of this machine and each of some
// thread counts, so that every property is tested on all of them.
type rig struct {
	devices []*Device
	streams []device.Stream
}

func newRig(t testing.TB) *rig {
	r := new(rig)
	for _, isa := range simd.Supported() {
		for _, threads := range []int{1, 2, 3} {
			d := open(t, &Options{Threads: threads, ISA: isa.String()})
			s, err := d.NewStream(device.Normal)
			require.NoError(t, err)
			r.devices, r.streams = append(r.devices, d), append(r.streams, s)
		}
	}
	return r
}

// arg is an argument of an operation with its contents before the launch.
type arg struct {
	t    device.Tensor
	data []byte
}

func bytesOf[T any](s []T) []byte {
	var t T
	return bytes.Clone(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(t))))
}

func floats(s []float32, shape ...int) arg {
	return arg{device.Tensor{Shape: shape, Type: dtype.Float32}, bytesOf(s)}
}

func doubles(s []float64, shape ...int) arg {
	return arg{device.Tensor{Shape: shape, Type: dtype.Float64}, bytesOf(s)}
}

func ints(s []int64, shape ...int) arg {
	return arg{device.Tensor{Shape: shape, Type: dtype.Int64}, bytesOf(s)}
}

// garbage is an output: NaN, so that what is read instead of written shows.
func garbage(shape ...int) arg {
	a := floats(make([]float32, device.Tensor{Shape: shape}.Elems()), shape...)
	for i := range a.data {
		a.data[i] = 0xff
	}
	return a
}

// call is an operation with its arguments.
type call struct {
	kind           device.Kind
	attr           device.Attr
	in, state, out []arg
}

func (c call) op() device.Op {
	op := device.Op{Kind: c.kind, Attr: c.attr}
	for _, a := range c.in {
		op.In = append(op.In, a.t)
	}
	for _, a := range c.state {
		op.State = append(op.State, &device.State{Tensor: a.t})
	}
	for _, a := range c.out {
		op.Out = append(op.Out, a.t)
	}
	return op
}

// buffers copies the arguments to memory of d.
func (c call) buffers(t require.TestingT, d *Device) []device.Buffer {
	var bufs []device.Buffer
	for _, list := range [][]arg{c.in, c.state, c.out} {
		for _, a := range list {
			b, err := d.Alloc(len(a.data))
			require.NoError(t, err)
			h, _ := b.HostBytes()
			copy(h, a.data)
			bufs = append(bufs, b)
		}
	}
	return bufs
}

// result is what the states and outputs hold afterwards.
type result [][]byte

func (r result) f32(i int) []float32 { return view[float32](r[i]) }

// run runs the call on every device, twice on each to catch what is left over
// from the first time, and hands the results to check. All thread counts must
// give the same bits, and all instruction sets, too, if everywhere is set.
func (r *rig) run(t *rapid.T, c call, everywhere bool, check func(t *rapid.T, r result)) {
	t.Helper()
	op := c.op()
	var first result
	for i, d := range r.devices {
		k, err := d.Compile(op)
		if err != nil {
			t.Fatalf("%s: %v", d.Name(), err)
		}
		if d.opts.Threads == 1 && !everywhere {
			first = nil
		}
		for range 2 {
			bufs := c.buffers(t, d)
			if err := r.streams[i].Launch(k, bufs); err != nil {
				t.Fatalf("%s: %v", d.Name(), err)
			}
			if err := r.streams[i].Sync(t.Context()); err != nil {
				t.Fatalf("%s: %v", d.Name(), err)
			}
			got := collect(t, c, bufs, d)
			if first == nil {
				first = got
			}
			for j := range got {
				if !bytes.Equal(got[j], first[j]) {
					t.Fatalf("%s: %v: argument %d of states and outputs differs from that of another device", d.Name(), op, j)
				}
			}
			check(t, got)
		}
	}
}

// collect takes the states and outputs, and looks whether inputs changed.
func collect(t *rapid.T, c call, bufs []device.Buffer, d *Device) result {
	var got result
	for i, b := range bufs {
		h, _ := b.HostBytes()
		if i >= len(c.in) {
			got = append(got, h)
		} else if !bytes.Equal(h, c.in[i].data) {
			t.Fatalf("%s: %v changed input %d", d.Name(), c.op(), i)
		}
	}
	return got
}

// seeded is a source of data; shapes are drawn by rapid, which shrinks them,
// contents are not.
func seeded(t *rapid.T) *rand.Rand {
	return rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
}

func normal(r *rand.Rand, n int) []float32 {
	s := make([]float32, n)
	for i := range s {
		s[i] = float32(r.NormFloat64())
	}
	return s
}

func indices(r *rand.Rand, n, lo, hi int) []int64 {
	s := make([]int64, n)
	for i := range s {
		s[i] = int64(lo + r.IntN(hi-lo))
	}
	return s
}

func widen(s []float32) []float64 {
	w := make([]float64, len(s))
	for i, v := range s {
		w[i] = float64(v)
	}
	return w
}

// near requires |got−want| ≤ tol·max(1, max|want|).
func near(t *rapid.T, what string, got []float32, want []float64, tol float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d elements, want %d", what, len(got), len(want))
	}
	top := 1.0
	for _, w := range want {
		top = max(top, math.Abs(w))
	}
	for i, w := range want {
		if d := math.Abs(float64(got[i]) - w); !(d <= tol*top) {
			t.Fatalf("%s: element %d is %v, want %v (off by %.3g, allowed %.3g)", what, i, got[i], w, d, tol*top)
		}
	}
}
