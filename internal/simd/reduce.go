package simd

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/tandem-go/tandem/dtype"
)

// ReduceOp is how Reduce combines two elements.
type ReduceOp uint8

// The reductions. Integers wrap around. Min and max order −0 before +0, and
// are NaN if either operand is.
const (
	ReduceSum ReduceOp = iota
	ReduceMin
	ReduceMax
	ReduceProd
	reduceOps = iota
)

// Reduce computes dst = a op b on elements of type t, given as their bytes:
// slices of one length, a multiple of the element's size, of any alignment.
// dst may be a or b. float16 and bfloat16 are combined in float32 and rounded
// to nearest even, once. The bits are the same on every instruction set: no
// product is fused, and a NaN comes out as the type's canonical one (quiet,
// positive, no payload). It is element-wise, so any split gives these bits.
func (k *Kernels) Reduce(op ReduceOp, t dtype.Type, dst, a, b []byte) {
	if op >= reduceOps {
		panic(fmt.Sprintf("simd: reduce: unknown operation %d", op))
	}
	a, b = a[:len(dst)], b[:len(dst)]
	switch t {
	case dtype.Float32:
		k.vec.reduceF32[op](view[float32](dst), view[float32](a), view[float32](b))
	case dtype.Float64:
		k.vec.reduceF64[op](view[float64](dst), view[float64](a), view[float64](b))
	case dtype.Float16:
		k.vec.reduceF16[op](view[uint16](dst), view[uint16](a), view[uint16](b))
	case dtype.BFloat16:
		k.vec.reduceBF16[op](view[uint16](dst), view[uint16](a), view[uint16](b))
	case dtype.Int32:
		reduceInt(op, view[int32](dst), view[int32](a), view[int32](b))
	case dtype.Int64:
		reduceInt(op, view[int64](dst), view[int64](a), view[int64](b))
	case dtype.Uint8:
		reduceInt(op, dst, a, b)
	default:
		panic(fmt.Sprintf("simd: reduce: %v has no elements", t))
	}
}

// ScaleBytes computes dst = src / divisor on elements of type t, as Reduce
// takes them: what an average does to a sum. Floats are divided, not multiplied
// with the inverse, and rounded once; integers are truncated towards zero.
// divisor is at least 1. dst may be src.
func (k *Kernels) ScaleBytes(t dtype.Type, dst, src []byte, divisor int) {
	src = src[:len(dst)]
	switch t {
	case dtype.Float32:
		k.vec.divideF32(view[float32](dst), view[float32](src), float32(divisor))
	case dtype.Float64:
		d, s, w := view[float64](dst), view[float64](src), float64(divisor)
		for i := range d {
			d[i] = canonical64(s[i] / w)
		}
	case dtype.Float16:
		k.vec.divideF16(view[uint16](dst), view[uint16](src), float32(divisor))
	case dtype.BFloat16:
		k.vec.divideBF16(view[uint16](dst), view[uint16](src), float32(divisor))
	case dtype.Int32:
		divideInt(view[int32](dst), view[int32](src), divisor)
	case dtype.Int64:
		divideInt(view[int64](dst), view[int64](src), divisor)
	case dtype.Uint8:
		divideInt(dst, src, divisor)
	default:
		panic(fmt.Sprintf("simd: scale: %v has no elements", t))
	}
}

// view is b as elements of type T, whole ones only. amd64 and arm64 load
// unaligned elements as they are.
func view[T float32 | float64 | uint16 | int32 | int64](b []byte) []T {
	var t T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(t)))
}

func reduceInt[T int32 | int64 | uint8](op ReduceOp, dst, a, b []T) {
	a, b = a[:len(dst)], b[:len(dst)]
	switch op {
	case ReduceSum:
		for i := range dst {
			dst[i] = a[i] + b[i]
		}
	case ReduceMin:
		for i := range dst {
			dst[i] = min(a[i], b[i])
		}
	case ReduceMax:
		for i := range dst {
			dst[i] = max(a[i], b[i])
		}
	case ReduceProd:
		for i := range dst {
			dst[i] = a[i] * b[i]
		}
	}
}

func divideInt[T int32 | int64 | uint8](dst, src []T, divisor int) {
	for i := range dst {
		dst[i] = T(int64(src[i]) / int64(divisor))
	}
}

func divideHalfGo(widen func(uint16) float32, narrow func(float32) uint16) func(dst, src []uint16, s float32) {
	return func(dst, src []uint16, s float32) {
		for i := range dst {
			dst[i] = narrow(canonical(widen(src[i]) / s))
		}
	}
}

// reduceFloatGo makes the four reductions, canonical NaNs included. The builtin
// min and max have the order of zeros and the NaNs that ReduceOp promises.
func reduceFloatGo[T float32 | float64]() [reduceOps]func(dst, a, b []T) {
	nan := T(math.Float64frombits(canonicalNaN64))
	quiet := func(v T) T {
		if v != v {
			return nan
		}
		return v
	}
	return [...]func(dst, a, b []T){
		ReduceSum: func(dst, a, b []T) {
			for i := range dst {
				dst[i] = quiet(a[i] + b[i])
			}
		},
		ReduceMin: func(dst, a, b []T) {
			for i := range dst {
				dst[i] = quiet(min(a[i], b[i]))
			}
		},
		ReduceMax: func(dst, a, b []T) {
			for i := range dst {
				dst[i] = quiet(max(a[i], b[i]))
			}
		},
		ReduceProd: func(dst, a, b []T) {
			for i := range dst {
				dst[i] = quiet(a[i] * b[i])
			}
		},
	}
}

// reduceHalfGo makes the reductions of a 16-bit type, in float32.
func reduceHalfGo(widen func(uint16) float32, narrow func(float32) uint16) (fs [reduceOps]func(dst, a, b []uint16)) {
	for op, combine := range [...]func(x, y float32) float32{
		ReduceSum:  func(x, y float32) float32 { return x + y },
		ReduceMin:  func(x, y float32) float32 { return min(x, y) },
		ReduceMax:  func(x, y float32) float32 { return max(x, y) },
		ReduceProd: func(x, y float32) float32 { return x * y },
	} {
		fs[op] = func(dst, a, b []uint16) {
			for i := range dst {
				dst[i] = narrow(canonical(combine(widen(a[i]), widen(b[i]))))
			}
		}
	}
	return fs
}
