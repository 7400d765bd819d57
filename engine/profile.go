package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// Peak is the most that a device was seen to do: the roof that Explain holds
// kernels against (Williams, Waterman and Patterson, "Roofline", 2009).
type Peak struct {
	GFLOPS float64 // of a matrix product that fits its caches
	GBs    float64 // of a copy that doesn't, read and written bytes together
}

// time is the least that a piece of work can take, in nanoseconds.
func (k Peak) time(flops, bytes int64) float64 {
	return max(float64(flops)/k.GFLOPS, float64(bytes)/k.GBs)
}

// profile holds what a plan with Options.Profile measures.
type profile struct {
	marks []device.Event  // before step 0, and behind each step
	best  []time.Duration // of each step
	runs  int
	peak  Peak
}

func (p *Plan) startProfile() error {
	if !p.opts.Profile {
		return nil
	}
	p.prof.best = make([]time.Duration, len(p.steps))
	for range len(p.steps) + 1 {
		e, err := p.dev.NewEvent()
		if err != nil {
			return fmt.Errorf("engine: event of the profile: %w", err)
		}
		p.prof.marks = append(p.prof.marks, e)
	}
	return nil
}

// mark records that the stream has done all before step at.
func (p *Plan) mark(s device.Stream, at int) error {
	if p.prof.marks == nil {
		return nil
	}
	return s.Record(p.prof.marks[at])
}

// TakeTimes adds the last run, whose stream the caller has synced, to the
// profile that Explain prints: of each step the shortest time counts, so that
// what disturbed a run doesn't. The plan needs Options.Profile.
func (p *Plan) TakeTimes() error {
	if p.prof.marks == nil {
		return errors.New("engine: the plan was compiled without Options.Profile")
	}
	for at := range p.steps {
		d, err := p.prof.marks[at+1].Since(p.prof.marks[at])
		if err != nil {
			return fmt.Errorf("engine: time of step %d: %w", at, err)
		}
		if p.prof.runs == 0 || d < p.prof.best[at] {
			p.prof.best[at] = d
		}
	}
	p.prof.runs++
	return nil
}

// SetPeak gives Explain the roof to compare with: see MeasurePeak.
func (p *Plan) SetPeak(k Peak) { p.prof.peak = k }

// cost is an estimate of what a step computes and moves (see device.Cost).
func (st *step) cost() (flops, bytes int64) {
	switch {
	case st.copy:
		return 0, 2 * int64(st.v.t.Bytes())
	case st.v.kernel != nil:
		return device.Cost(st.v.desc)
	}
	bytes = int64(st.v.t.Bytes())
	for _, w := range st.v.in {
		bytes += int64(w.t.Bytes())
	}
	return 0, bytes
}

// Sizes of what MeasurePeak runs, and how often.
const (
	peakSide  = 512
	peakBytes = 64 << 20
	peakRuns  = 20
)

// MeasurePeak runs a float32 matrix product of side 512 and a copy of 64 MiB a
// few times on a stream of its own, and takes the fastest of each.
func MeasurePeak(ctx context.Context, dev device.Device) (Peak, error) {
	square := device.Tensor{Shape: []int{peakSide, peakSide}, Type: dtype.Float32}
	bytes := device.Tensor{Shape: []int{peakBytes / 4}, Type: dtype.Float32}
	product := device.Op{Kind: device.MatMul, In: []device.Tensor{square, square}, Out: []device.Tensor{square}}
	move := device.Op{Kind: device.Copy, In: []device.Tensor{bytes}, Out: []device.Tensor{bytes}}
	s, err := dev.NewStream(device.Normal)
	if err != nil {
		return Peak{}, fmt.Errorf("engine: stream to measure on: %w", err)
	}
	var rate [2]float64 // units a nanosecond, that is, 10⁹ a second
	for i, op := range []device.Op{product, move} {
		best, err := fastest(ctx, dev, s, op)
		if err != nil {
			return Peak{}, fmt.Errorf("engine: measuring %v: %w", op, err)
		}
		flops, moved := device.Cost(op)
		rate[i] = float64(max(flops, 1)) / float64(best)
		if op.Kind == device.Copy {
			rate[i] = float64(moved) / float64(best)
		}
	}
	return Peak{GFLOPS: rate[0], GBs: rate[1]}, nil
}

// fastest is the shortest time of op.
func fastest(ctx context.Context, dev device.Device, s device.Stream, op device.Op) (time.Duration, error) {
	k, err := dev.Compile(op)
	if err != nil {
		return 0, err
	}
	var args []device.Buffer
	for _, t := range append(append([]device.Tensor{}, op.In...), op.Out...) {
		b, err := dev.Alloc(t.Bytes())
		if err != nil {
			return 0, err
		}
		args = append(args, b)
	}
	var ends [2]device.Event
	for i := range ends {
		if ends[i], err = dev.NewEvent(); err != nil {
			return 0, err
		}
	}
	best := time.Duration(0)
	for range peakRuns {
		if err := errors.Join(s.Record(ends[0]), s.Launch(k, args), s.Record(ends[1]), s.Sync(ctx)); err != nil {
			return 0, err
		}
		d, err := ends[1].Since(ends[0])
		if err != nil {
			return 0, err
		}
		if best == 0 || d < best {
			best = d
		}
	}
	return max(best, 1), nil
}
