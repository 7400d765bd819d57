package ddp

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// lossExchange gives every rank the losses of all, behind the backward pass.
type lossExchange struct {
	kind dtype.Type
	all  device.Buffer
	in   []byte
	zero device.Buffer // what a rank without data sends
	done device.Event
}

func newLossExchange(dev device.Device, c comm.Communicator, kind dtype.Type) (lossExchange, error) {
	l := lossExchange{kind: kind}
	if kind != dtype.Float32 && kind != dtype.Float64 {
		return l, fmt.Errorf("ddp: the loss is %v; it must be float32 or float64", kind)
	}
	var err error
	if l.all, l.in, err = hostMemory(c, kind.Size()*c.Size()); err != nil {
		return l, err
	}
	if l.zero, _, err = hostMemory(c, kind.Size()); err != nil {
		return l, err
	}
	l.done, err = dev.NewEvent()
	return l, err
}

func (l *lossExchange) enqueue(c comm.Communicator, s device.Stream, mine device.Buffer) error {
	if err := c.AllGather(s, l.all, mine, l.kind, comm.Tag{Name: "loss", Bucket: -1}); err != nil {
		return err
	}
	return s.Record(l.done)
}

// of is the loss of rank r.
func (l *lossExchange) of(r int) float64 { return scalar(l.in, l.kind, r) }

// scalar is element i of memory that holds float32 or float64.
func scalar(b []byte, t dtype.Type, i int) float64 {
	if t == dtype.Float64 {
		return math.Float64frombits(binary.NativeEndian.Uint64(b[8*i:]))
	}
	return float64(math.Float32frombits(binary.NativeEndian.Uint32(b[4*i:])))
}

// putScalar sets element i of such memory.
func putScalar(b []byte, t dtype.Type, i int, v float64) {
	if t == dtype.Float64 {
		binary.NativeEndian.PutUint64(b[8*i:], math.Float64bits(v))
		return
	}
	binary.NativeEndian.PutUint32(b[4*i:], math.Float32bits(float32(v)))
}

func finite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }
