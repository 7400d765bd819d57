// Package dtype names the element types that buffers and collectives carry.
package dtype

import "fmt"

// Type is an element type. The zero value is not a type: an unset field is noticed.
type Type uint8

// The element types. Float16 is IEEE 754 binary16, BFloat16 the upper half of
// a binary32; both are stored as two bytes, little endian.
const (
	Invalid Type = iota
	Float32
	Float64
	Float16
	BFloat16
	Int32
	Int64
	Uint8
)

var types = [...]struct {
	name string
	size int
}{
	Invalid:  {"invalid", 0},
	Float32:  {"float32", 4},
	Float64:  {"float64", 8},
	Float16:  {"float16", 2},
	BFloat16: {"bfloat16", 2},
	Int32:    {"int32", 4},
	Int64:    {"int64", 8},
	Uint8:    {"uint8", 1},
}

// All lists every valid type, in declaration order.
func All() []Type {
	return []Type{Float32, Float64, Float16, BFloat16, Int32, Int64, Uint8}
}

// Valid reports whether t is one of the declared types.
func (t Type) Valid() bool { return t > Invalid && int(t) < len(types) }

// Size is the size of one element in bytes, 0 for an invalid type.
func (t Type) Size() int {
	if !t.Valid() {
		return 0
	}
	return types[t].size
}

// Float reports whether t is a floating-point type.
func (t Type) Float() bool { return t >= Float32 && t <= BFloat16 }

func (t Type) String() string {
	if !t.Valid() {
		return fmt.Sprintf("dtype(%d)", uint8(t))
	}
	return types[t].name
}
