package asmsim

import (
	"bytes"
	"fmt"
	"math"
	"reflect"
	"unsafe"
)

// Func makes a Go function of type t that runs the function name. It panics
// where the machine would fault. Parameters are integers, floats, slices and
// structs of them, and pointers, whose object is the memory that they give access to; a
// struct behind a pointer also gives access to what its slices hold.
func (p *Program) Func(name string, t reflect.Type) (reflect.Value, error) {
	return p.shim(name, t, func(args []reflect.Value) []reflect.Value {
		results, _ := p.call(name, t, args)
		return results
	})
}

// Compare is Func for a function that this machine can run, too: it does so with
// the same arguments and memory, and panics unless memory and results agree to
// the bit.
func (p *Program) Compare(name string, real reflect.Value) (reflect.Value, error) {
	return p.shim(name, real.Type(), func(args []reflect.Value) []reflect.Value {
		before := newCall(real.Type(), args).snapshot()
		results, c := p.call(name, real.Type(), args)
		after := c.snapshot()
		for i, r := range c.mem {
			copy(r.Data, before[i])
		}
		want := real.Call(args)
		for i, r := range c.mem {
			if j := mismatch(r.Data, after[i]); j >= 0 {
				panic(fmt.Sprintf("asmsim: %s: byte %d of region %d is %#x, the processor says %#x", name, j, i, after[i][j], r.Data[j]))
			}
		}
		for i := range want {
			if j := mismatch(object(results[i]), object(addressable(want[i]))); j >= 0 {
				panic(fmt.Sprintf("asmsim: %s: result %d is %v, the processor says %v", name, i, results[i], want[i]))
			}
		}
		return want
	})
}

func (p *Program) shim(name string, t reflect.Type, f func([]reflect.Value) []reflect.Value) (reflect.Value, error) {
	if p.funcs[name] == nil {
		return reflect.Value{}, fmt.Errorf("asmsim: no function %s", name)
	}
	return reflect.MakeFunc(t, f), nil
}

// call runs a function.
func (p *Program) call(name string, t reflect.Type, args []reflect.Value) ([]reflect.Value, *call) {
	c := newCall(t, args)
	results := make([]reflect.Value, t.NumOut())
	offs := make([]int, len(results))
	for i := range results {
		results[i] = reflect.New(t.Out(i)).Elem()
		c.align(t.Out(i).Align())
		offs[i] = len(c.frame)
		for range t.Out(i).Size() {
			c.frame = append(c.frame, 0xa5) // a result that isn't written shows
		}
	}
	if err := p.Run(name, c.frame, c.mem); err != nil {
		panic(err)
	}
	for i, r := range results {
		copy(object(r), c.frame[offs[i]:])
	}
	return results, c
}

// object is the memory of an addressable value.
func object(v reflect.Value) []byte {
	return unsafe.Slice((*byte)(v.Addr().UnsafePointer()), v.Type().Size())
}

func addressable(v reflect.Value) reflect.Value {
	p := reflect.New(v.Type()).Elem()
	p.Set(v)
	return p
}

// mismatch is the first index at which a and b differ, −1 without.
func mismatch(a, b []byte) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}

// call is a frame of arguments under construction.
type call struct {
	frame []byte
	mem   []Region
}

// newCall lays out the arguments of a call. Results begin at a multiple of 8.
func newCall(t reflect.Type, args []reflect.Value) *call {
	c := &call{}
	for _, a := range args {
		c.argument(a)
	}
	if t.NumOut() > 0 {
		c.align(8)
	}
	return c
}

// snapshot copies the memory.
func (c *call) snapshot() [][]byte {
	s := make([][]byte, len(c.mem))
	for i, r := range c.mem {
		s[i] = bytes.Clone(r.Data)
	}
	return s
}

func (c *call) align(n int) {
	for len(c.frame)%n != 0 {
		c.frame = append(c.frame, 0)
	}
}

func (c *call) word(v uint64, n int) {
	c.align(n)
	for range n {
		c.frame = append(c.frame, byte(v))
		v >>= 8
	}
}

func (c *call) argument(a reflect.Value) {
	switch a.Kind() {
	case reflect.Slice:
		c.word(uint64(a.Pointer()), 8)
		c.word(uint64(a.Len()), 8)
		c.word(uint64(a.Cap()), 8)
		c.slice(a)
	case reflect.Pointer:
		c.word(uint64(a.Pointer()), 8)
		c.pointer(a)
	case reflect.Int, reflect.Int64:
		c.word(uint64(a.Int()), 8)
	case reflect.Int32:
		c.word(uint64(a.Int()), 4)
	case reflect.Uint64:
		c.word(a.Uint(), 8)
	case reflect.Uint32:
		c.word(a.Uint(), 4)
	case reflect.Float32:
		c.word(uint64(math.Float32bits(float32(a.Float()))), 4)
	case reflect.Float64:
		c.word(math.Float64bits(a.Float()), 8)
	case reflect.Struct:
		c.align(a.Type().Align())
		for i := range a.NumField() {
			c.argument(a.Field(i))
		}
	default:
		panic(fmt.Sprintf("asmsim: an argument of type %v", a.Type()))
	}
}

// slice gives access to the elements of a slice.
func (c *call) slice(s reflect.Value) {
	if n := s.Len() * int(s.Type().Elem().Size()); n > 0 {
		c.mem = append(c.mem, Region{uint64(s.Pointer()), unsafe.Slice((*byte)(s.UnsafePointer()), n)})
	}
}

// pointer gives access to an object, and to the slices in it.
func (c *call) pointer(p reflect.Value) {
	n := p.Type().Elem().Size()
	c.mem = append(c.mem, Region{uint64(p.Pointer()), unsafe.Slice((*byte)(p.UnsafePointer()), n)})
	if p.Type().Elem().Kind() != reflect.Struct {
		return
	}
	for i := range p.Elem().NumField() {
		if f := p.Elem().Field(i); f.Kind() == reflect.Slice {
			c.slice(f)
		}
	}
}
