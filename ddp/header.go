package ddp

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// lane is a field of the step header, a float64.
type lane int

// The lanes. The first four must agree between the ranks that have data.
const (
	laneStep     lane = iota // synchronised steps so far
	laneMicro                // micro-steps that this one concludes, itself included
	laneSchedule             // overlap.Schedule
	laneLR                   // learning rate
	laneJoin                 // notJoining, joining or joinDone
	laneStop                 // 1 asks to stop
	laneWeight               // total weight of the micro-steps
	laneLast                 // weight of the last micro-step
	laneLoss                 // weighted sum of the losses of the micro-steps before it
	laneBad                  // 1 + the first parameter whose gradient was not finite in one of those, or 0
	laneHash                 // checksum of the parameters, where one is due
	// lanes is the number of those above, rounded up; the bitmap of used
	// parameters follows.
	lanes = 16
)

// Values of laneJoin.
const (
	notJoining = 0
	joining    = 1 // within Join
	joinDone   = 2 // out of data: follows the others with zeros
)

// mustAgree describes the lanes that must agree.
var mustAgree = [...]struct {
	lane lane
	what string
}{
	{laneStep, "is at step %v"},
	{laneMicro, "has run %v micro-steps"},
	{laneSchedule, "uses schedule %v"},
	{laneLR, "has learning rate %v"},
}

// header is what the ranks tell each other at the start of a synchronised step.
type header struct {
	mine, all device.Buffer
	out, in   []byte // the same, as the host sees them
	done      device.Event
	ranks     int
	lanes     int
}

// newHeader allocates a header with more lanes than the fixed ones.
func newHeader(dev device.Device, c comm.Communicator, more int) (header, error) {
	h := header{ranks: c.Size(), lanes: lanes + more}
	var err error
	if h.mine, h.out, err = hostMemory(c, 8*h.lanes); err != nil {
		return h, err
	}
	if h.all, h.in, err = hostMemory(c, 8*h.lanes*c.Size()); err != nil {
		return h, err
	}
	h.done, err = dev.NewEvent()
	return h, err
}

// hostMemory allocates memory for a collective that the host can address.
func hostMemory(c comm.Communicator, n int) (device.Buffer, []byte, error) {
	b, err := c.Alloc(n)
	if err != nil {
		return nil, nil, fmt.Errorf("ddp: cannot allocate %d bytes: %w", n, err)
	}
	host, ok := b.HostBytes()
	if !ok {
		return nil, nil, fmt.Errorf("ddp: the communicator's memory cannot be addressed by the host")
	}
	return b, host, nil
}

func (h *header) set(l lane, v float64) {
	binary.NativeEndian.PutUint64(h.out[8*l:], math.Float64bits(v))
}

// get is what rank r said.
func (h *header) get(r int, l lane) float64 {
	return math.Float64frombits(binary.NativeEndian.Uint64(h.in[8*(r*h.lanes+int(l)):]))
}

// sum adds a lane over all ranks, in order.
func (h *header) sum(l lane) float64 {
	s := 0.0
	for r := range h.ranks {
		s += h.get(r, l)
	}
	return s
}

// exchange enqueues the collective. Nothing of the previous one may be in use.
func (h *header) exchange(c comm.Communicator, s device.Stream) error {
	if err := c.AllGather(s, h.all, h.mine, dtype.Float64, comm.Tag{Name: "step header", Bucket: -1}); err != nil {
		return err
	}
	return s.Record(h.done)
}

// active is the lowest rank that has data, -1 when there is none.
func (h *header) active() int {
	for r := range h.ranks {
		if h.get(r, laneJoin) != joinDone {
			return r
		}
	}
	return -1
}

// check says where ranks contradict each other. All ranks see the same headers,
// so all return the same error or none.
func (h *header) check() error {
	first := h.active()
	for r := first + 1; r < h.ranks && first >= 0; r++ {
		if h.get(r, laneJoin) == joinDone {
			continue
		}
		for _, a := range mustAgree {
			if u, v := h.get(first, a.lane), h.get(r, a.lane); u != v {
				return fmt.Errorf("ranks disagree: rank %d "+a.what+", rank %d "+a.what+
					"; all ranks must call Step, NoSync, SetSchedule and SetLR alike", first, u, r, v)
			}
		}
	}
	return nil
}
