package ddp

import (
	"errors"
	"fmt"
	"math"
)

// LossScale are the options of dynamic loss scaling: gradients are multiplied by
// a scale before a hook rounds them to float16 and divided by it afterwards, so
// that small ones don't vanish. Where a sum overflows, all ranks skip the step's
// update, in the same step, and the scale is lowered; after Interval steps
// without that it is raised. Scales are powers of two, so they change no bit of
// what float32 can hold. The zero value means the defaults.
type LossScale struct {
	Initial  float64 // a power of two; 0 means 65536
	Interval int     // steps without an overflow until the scale doubles; 0 means 2000
}

// Bounds on the scale. At the lower one an overflow is an error: it isn't the
// scale's.
const (
	minLossScale = 1
	maxLossScale = 1 << 24
)

// lossScaling is the state; it changes alike on all ranks, because the reduced
// gradients by which it changes are bit-identical.
type lossScaling struct {
	on       bool
	scale    float64
	interval int
	good     int // steps since the last overflow
	skipped  int // steps so far
	skip     bool
}

func (o *Options) lossScaling() (lossScaling, error) {
	if o.LossScale == nil {
		return lossScaling{scale: 1}, nil
	}
	l := lossScaling{on: true, scale: o.LossScale.Initial, interval: o.LossScale.Interval}
	if l.scale == 0 {
		l.scale = 65536
	}
	if l.interval == 0 {
		l.interval = 2000
	}
	frac, _ := math.Frexp(l.scale)
	switch {
	case o.Hook == nil:
		return l, errors.New("ddp: LossScale needs a Hook that rounds to float16; without one nothing vanishes")
	case frac != 0.5 || l.scale < minLossScale || l.scale > maxLossScale:
		return l, fmt.Errorf("ddp: LossScale.Initial is %v; it must be a power of two from %d to %d", l.scale, minLossScale, maxLossScale)
	case l.interval < 0:
		return l, fmt.Errorf("ddp: LossScale.Interval is %d; it must not be negative", l.interval)
	}
	return l, nil
}

// overflowed takes account of a step in which a gradient was not finite, or all
// were, and says whether it is the scale that is at fault.
func (l *lossScaling) overflowed(bad bool) bool {
	l.skip = false
	if !l.on {
		return false
	}
	if !bad {
		if l.good++; l.good >= l.interval && l.scale < maxLossScale {
			l.scale, l.good = 2*l.scale, 0
		}
		return false
	}
	if l.scale <= minLossScale {
		return false
	}
	l.scale, l.good, l.skip = l.scale/2, 0, true
	l.skipped++
	return true
}

// Skipped says that the last synchronised step overflowed, on all ranks: the
// built-in optimizer has left the parameters alone, and an external one must.
func (d *DDP) Skipped() bool { return d.lossScale.skip }
