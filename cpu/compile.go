package cpu

import (
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// compiler turns operations of one kind into programs. compile is called with
// operations that agree with the signature.
type compiler struct {
	signature
	compile func(d *Device, op device.Op) (program, error)
}

// types shortens the table below.
func types(t ...dtype.Type) []dtype.Type { return t }

const (
	f32 = dtype.Float32
	f64 = dtype.Float64
	i64 = dtype.Int64
)

// compilers holds every kind of package device.
var compilers = map[device.Kind]compiler{
	device.Copy: {signature{in: types(anyType), out: types(anyType)}, compileCopy},
	device.Fill: {signature{out: types(anyType)}, compileFill},
}
