package optim

import (
	"errors"
	"fmt"
	"math"
)

// Schedule gives the learning rate of each step. It must be the same on every
// rank and depend on the step alone.
type Schedule interface {
	// LR is the learning rate of step ≥ 0.
	LR(step int) float64
}

// Constant is one learning rate for ever.
type Constant float64

// LR is the constant.
func (c Constant) LR(int) float64 { return float64(c) }

// WarmupCosine rises linearly to Max during Warmup steps, then falls along half
// a cosine to Min at step Steps (Loshchilov, Hutter, SGDR, 2017; with the
// warm-up that GPT-2 and nanoGPT use), and stays there.
type WarmupCosine struct {
	Max, Min float64
	Warmup   int // steps; step 0 already has Max/Warmup
	Steps    int // of the whole run
}

// Validate names the bound that a field breaks.
func (w WarmupCosine) Validate() error {
	err := errors.Join(within("WarmupCosine.Max", w.Max, 0, math.MaxFloat32), within("WarmupCosine.Min", w.Min, 0, math.MaxFloat32))
	switch {
	case err != nil:
		return err
	case w.Min > w.Max:
		return fmt.Errorf("optim: the lowest learning rate %v is above the highest, %v", w.Min, w.Max)
	case w.Warmup < 0 || w.Steps < 0:
		return fmt.Errorf("optim: warm-up of %d and run of %d steps: neither may be negative", w.Warmup, w.Steps)
	}
	return nil
}

// LR is the learning rate of a step.
func (w WarmupCosine) LR(step int) float64 {
	if step < w.Warmup {
		return w.Max * float64(step+1) / float64(w.Warmup)
	}
	done := min(1, float64(step-w.Warmup)/float64(max(1, w.Steps-w.Warmup)))
	return w.Min + 0.5*(w.Max-w.Min)*(1+math.Cos(math.Pi*done))
}
