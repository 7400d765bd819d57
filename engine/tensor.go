package engine

import (
	"fmt"
	"unsafe"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// typeOf is the element type in which a plan stores dt: an int is 8 bytes on
// every platform that Go trains on, a bool one byte.
func typeOf(dt tensor.Dtype) (dtype.Type, bool) {
	switch dt {
	case tensor.Float32:
		return dtype.Float32, true
	case tensor.Float64:
		return dtype.Float64, true
	case tensor.Int, tensor.Int64:
		return dtype.Int64, true
	case tensor.Int32:
		return dtype.Int32, true
	case tensor.Byte, tensor.Bool:
		return dtype.Uint8, true
	}
	return dtype.Invalid, false
}

// cast sees memory as elements of T.
func cast[T any](b []byte) []T {
	var z T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(z)))
}

// raw sees elements as memory.
func raw[T any](s []T) []byte {
	var z T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(z)))
}

func one[T any](p *T) []byte { return raw(unsafe.Slice(p, 1)) }

// View is a gorgonia value over b's memory: a tensor of the shape given, or a
// scalar such as *gorgonia.F32 when shape is nil. Writing to one changes the
// other. It fails where the host can't address b, or b has another size.
func View(b device.Buffer, shape []int, t dtype.Type) (gorgonia.Value, error) {
	mem, ok := b.HostBytes()
	if !ok {
		return nil, fmt.Errorf("engine: the host can't address this device's memory")
	}
	want := device.Tensor{Shape: shape, Type: t}
	if len(mem) != want.Bytes() {
		return nil, fmt.Errorf("engine: a buffer of %d bytes can't hold %v", len(mem), want)
	}
	var dt tensor.Dtype
	switch t {
	case dtype.Float32:
		dt = tensor.Float32
	case dtype.Float64:
		dt = tensor.Float64
	case dtype.Int64:
		dt = tensor.Int
	case dtype.Int32:
		dt = tensor.Int32
	case dtype.Uint8:
		dt = tensor.Byte
	default:
		return nil, fmt.Errorf("engine: gorgonia has no elements of %v", t)
	}
	return header(mem, shape, dt, len(shape) == 0), nil
}

// header makes a gorgonia value over memory. Every reader gets one of its own:
// ops transpose the header of their operands for a moment.
func header(b []byte, shape []int, dt tensor.Dtype, scalar bool) gorgonia.Value {
	switch dt {
	case tensor.Float32:
		if scalar {
			return (*gorgonia.F32)(&cast[float32](b)[0])
		}
		return dense(cast[float32](b), shape)
	case tensor.Float64:
		if scalar {
			return (*gorgonia.F64)(&cast[float64](b)[0])
		}
		return dense(cast[float64](b), shape)
	case tensor.Int:
		if scalar {
			return (*gorgonia.I)(&cast[int](b)[0])
		}
		return dense(cast[int](b), shape)
	case tensor.Int64:
		if scalar {
			return (*gorgonia.I64)(&cast[int64](b)[0])
		}
		return dense(cast[int64](b), shape)
	case tensor.Int32:
		if scalar {
			return (*gorgonia.I32)(&cast[int32](b)[0])
		}
		return dense(cast[int32](b), shape)
	case tensor.Byte:
		if scalar {
			return (*gorgonia.U8)(&b[0])
		}
		return dense(b, shape)
	default: // tensor.Bool; typeOf let nothing else in
		if scalar {
			return (*gorgonia.B)(&cast[bool](b)[0])
		}
		return dense(cast[bool](b), shape)
	}
}

func dense[T any](s []T, shape []int) gorgonia.Value {
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(s))
}

// memory is what a value holds, in the order of its own strides.
func memory(v gorgonia.Value) ([]byte, error) {
	switch x := v.(type) {
	case *gorgonia.F32:
		return one(x), nil
	case *gorgonia.F64:
		return one(x), nil
	case *gorgonia.I:
		return one(x), nil
	case *gorgonia.I64:
		return one(x), nil
	case *gorgonia.I32:
		return one(x), nil
	case *gorgonia.U8:
		return one(x), nil
	case *gorgonia.B:
		return one(x), nil
	case *tensor.Dense:
		return denseMemory(x)
	}
	return nil, fmt.Errorf("a value of %T, neither a scalar nor a dense tensor", v)
}

func denseMemory(x *tensor.Dense) ([]byte, error) {
	if !x.IsNativelyAccessible() {
		return nil, fmt.Errorf("a tensor whose memory Go can't read")
	}
	switch x.Dtype() {
	case tensor.Float32:
		return raw(x.Float32s()), nil
	case tensor.Float64:
		return raw(x.Float64s()), nil
	case tensor.Int:
		return raw(x.Ints()), nil
	case tensor.Int64:
		return raw(x.Int64s()), nil
	case tensor.Int32:
		return raw(x.Int32s()), nil
	case tensor.Byte:
		return x.Uint8s(), nil
	case tensor.Bool:
		return raw(x.Bools()), nil
	}
	return nil, fmt.Errorf("a tensor of %v", x.Dtype())
}

// copyValue writes v's elements to dst, row major, whatever v's strides are.
// Type and number of elements must be t's and dt's.
func copyValue(dst []byte, v gorgonia.Value, t device.Tensor, dt tensor.Dtype) error {
	src, shape, strides, err := layoutOf(v, t, dt)
	if err != nil {
		return err
	}
	if strides == nil {
		copy(dst, src)
		return nil
	}
	gather(dst, src, shape, strides, t.Type.Size())
	return nil
}

// layoutOf checks v against t and dt, and returns its memory; strides is nil when
// that is row major and without gaps.
func layoutOf(v gorgonia.Value, t device.Tensor, dt tensor.Dtype) (mem []byte, shape, strides []int, err error) {
	if mem, err = memory(v); err != nil {
		return nil, nil, nil, err
	}
	if v.Dtype() != dt {
		return nil, nil, nil, fmt.Errorf("elements of %v, not %v", v.Dtype(), dt)
	}
	x, ok := v.(*tensor.Dense)
	if !ok {
		if t.Elems() != 1 {
			return nil, nil, nil, fmt.Errorf("a scalar, not shape %v", t.Shape)
		}
		return mem, nil, nil, nil
	}
	shape, strides = x.Shape(), x.Strides()
	n := 1
	for _, d := range shape {
		n *= d
	}
	if n != t.Elems() {
		return nil, nil, nil, fmt.Errorf("shape %v, not %v", append([]int(nil), shape...), t.Shape)
	}
	if rowMajor(shape, strides) && len(mem) >= t.Bytes() {
		return mem[:t.Bytes()], nil, nil, nil
	}
	if len(strides) != len(shape) {
		return nil, nil, nil, fmt.Errorf("shape %v with strides %v", append([]int(nil), shape...), append([]int(nil), strides...))
	}
	return mem, shape, strides, nil
}

func rowMajor(shape, strides []int) bool {
	if len(shape) == 0 {
		return true
	}
	if len(strides) != len(shape) {
		return false
	}
	want := 1
	for i := len(shape) - 1; i >= 0; i-- {
		if shape[i] != 1 && strides[i] != want {
			return false
		}
		want *= shape[i]
	}
	return true
}

// gather copies a strided tensor of elements of size bytes to dst, row major.
func gather(dst, src []byte, shape, strides []int, size int) {
	at := make([]int, len(shape))
	off := 0
	for out := 0; out+size <= len(dst); out += size {
		copy(dst[out:out+size], src[off*size:])
		for d := len(shape) - 1; d >= 0; d-- {
			at[d]++
			off += strides[d]
			if at[d] < shape[d] {
				break
			}
			off -= at[d] * strides[d]
			at[d] = 0
		}
	}
}
