package ddp

import (
	"fmt"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// usage keeps account of which parameters a step uses, where graphs lack some.
//
// A parameter that this rank's graph doesn't use contributes zeros: its slot is
// saved and zeroed when an accumulation begins. Whether any rank uses it is in
// the step header. If none does, the slot gets back what was saved, and the
// optimizer leaves the parameter alone.
type usage struct {
	on      bool
	used    []bool // by this rank, since the last synchronised step
	unused  []bool // by all ranks, in the last synchronised step
	some    bool   // unused has a true entry
	saved   []device.Buffer
	zero    []device.Kernel // by parameter; nil where every graph uses it
	zeroArg [][]device.Buffer
}

// bitsPerLane is how many bits of the bitmap a float64 of the header carries.
const bitsPerLane = 32

// usageLanes is the number of header lanes for the bitmap of used parameters.
func (d *DDP) usageLanes() int {
	if !d.usage.on {
		return 0
	}
	return (len(d.order) + bitsPerLane - 1) / bitsPerLane
}

// prepareUsage allocates and compiles what parameters without a gradient need,
// if any graph lacks some.
func (d *DDP) prepareUsage() error {
	u := &d.usage
	n := len(d.order)
	u.used, u.unused = make([]bool, n), make([]bool, n)
	if !u.on {
		return nil
	}
	u.saved, u.zero, u.zeroArg = make([]device.Buffer, n), make([]device.Kernel, n), make([][]device.Buffer, n)
	for p, slot := range d.layout.Slots {
		var err error
		if u.saved[p], err = d.dev.Alloc(slot.Bytes); err != nil {
			return fmt.Errorf("cannot allocate %d bytes: %w", slot.Bytes, err)
		}
		t := device.Tensor{Shape: []int{slot.Bytes / d.layout.Params[p].Type.Size()}, Type: d.layout.Params[p].Type}
		if u.zero[p], err = d.dev.Compile(device.Op{Kind: device.Fill, Out: []device.Tensor{t}}); err != nil {
			return fmt.Errorf("cannot compile zeros for %q: %w", d.paramName(p), err)
		}
		u.zeroArg[p] = []device.Buffer{d.gradBufs[p]}
	}
	return nil
}

// count notes, before the header is sent, what the graph about to run uses.
func (u *usage) count(b *branch, first bool) {
	if first {
		clear(u.used)
	}
	for _, p := range b.params {
		u.used[p] = true
	}
}

// startUsage enqueues, ahead of the passes, zeros for what this graph lacks.
func (d *DDP) startUsage() error {
	d.branch.begun = false
	for _, p := range d.branch.others {
		if err := d.red.LastRead(p); err != nil {
			return err
		}
		if d.micro > 0 {
			continue // saved, and zeroed or added to, in an earlier micro-step
		}
		if err := d.red.Write(p); err != nil {
			return err
		}
		if err := d.saveAndZero(p); err != nil {
			return err
		}
	}
	return nil
}

func (d *DDP) saveAndZero(p int) error {
	s, u := d.red.Compute(), &d.usage
	if err := s.Copy(u.saved[p], d.gradBufs[p]); err != nil {
		return err
	}
	return s.Launch(u.zero[p], u.zeroArg[p])
}

// sendUsage writes the bitmap into the header.
func (d *DDP) sendUsage() {
	for l := range d.usageLanes() {
		bits := uint32(0)
		for i := range bitsPerLane {
			if p := l*bitsPerLane + i; p < len(d.order) && d.usage.used[p] {
				bits |= 1 << i
			}
		}
		d.header.set(lanes+lane(l), float64(bits))
	}
}

// agreeUsage finds what no rank uses, from the headers.
func (d *DDP) agreeUsage() {
	u := &d.usage
	if !u.on {
		return
	}
	u.some = false
	for p := range u.unused {
		bits := uint32(0)
		for r := range d.header.ranks {
			bits |= uint32(d.header.get(r, lanes+lane(p/bitsPerLane)))
		}
		u.unused[p] = bits>>(p%bitsPerLane)&1 == 0
		u.some = u.some || u.unused[p]
	}
	skip := u.unused
	if !u.some {
		skip = nil
	}
	if d.opt != nil {
		d.opt.Skip(skip)
	}
	if d.norm != nil {
		d.norm.Skip(skip)
	}
}

// restore follows a bucket's collective: what no rank uses keeps its gradient.
func (d *DDP) restore(s device.Stream, k int) error {
	if !d.usage.some {
		return nil
	}
	for _, p := range d.layout.Buckets[k].Params {
		if d.usage.unused[p] {
			if err := s.Copy(d.gradBufs[p], d.usage.saved[p]); err != nil {
				return err
			}
		}
	}
	return nil
}

// Unused says whether no rank used parameter p, an index into Layout().Params,
// in the last synchronised step. Its gradient is then an old one; an external
// optimizer should leave the parameter out.
func (d *DDP) Unused(p int) bool { return d.usage.unused[p] }

// lossType is the element type of a plan's loss, which its buffer shows.
func lossType(p interface{ LossBuffer() device.Buffer }) dtype.Type {
	if p.LossBuffer().Len() == dtype.Float64.Size() {
		return dtype.Float64
	}
	return dtype.Float32
}
