package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/ddp"
	"github.com/tandem-go/tandem/models/gpt2mini"
	"github.com/tandem-go/tandem/optim"
	"github.com/tandem-go/tandem/overlap"
)

// modes in the order in which they take turns.
var modes = [...]overlap.Schedule{overlap.Normal, overlap.NoComm, overlap.NoOverlap}

// Indices in modes; normal is the step as users have it.
const (
	normal = iota
	noComm
	noOverlap
)

// rig is one rank with a model, random tokens and a DDP that can be exchanged.
type rig struct {
	g     *tandem.Group
	model *gpt2mini.Model
	ddp   *ddp.DDP
	rng   *rand.Rand
	in    []int
}

func newRig(g *tandem.Group, preset string) (*rig, error) {
	mc, err := gpt2mini.Preset(preset)
	if err != nil {
		return nil, err
	}
	r := &rig{g: g, rng: rand.New(rand.NewPCG(100, uint64(g.Rank)))}
	if r.model, err = gpt2mini.New(mc); err != nil {
		return nil, err
	}
	r.in = make([]int, 2*r.model.Config.Batch*r.model.Config.Seq)
	return r, nil
}

// open makes the DDP, from fresh parameters: whoever ran before may have left
// some that differ between ranks. The settings are those of the peers'
// measurements. Without clipping every bucket is updated as soon as it may.
func (r *rig) open(ctx context.Context, caps bucket.Caps) (err error) {
	if err := r.model.Init(1); err != nil {
		return err
	}
	r.ddp, err = ddp.New(ctx, r.g.Comm, r.model.Loss, r.model.Params, &ddp.Options{
		Device: r.g.Device, Caps: caps,
		Optimizer: optim.AdamW{LR: 1e-4, Beta1: 0.9, Beta2: 0.95, WeightDecay: 0.1},
	})
	return err
}

// prepare binds a batch and waits for the other ranks, so that what follows
// begins at the same time on all.
func (r *rig) prepare(ctx context.Context, mode int) error {
	for i := range r.in {
		r.in[i] = r.rng.IntN(r.model.Config.Vocab)
	}
	if err := r.model.SetBatch(r.in[:len(r.in)/2], r.in[len(r.in)/2:]); err != nil {
		return err
	}
	r.ddp.SetSchedule(modes[mode])
	return r.g.Comm.Barrier(ctx)
}

// step takes a step to its very end, the updates, and says how long that was.
func (r *rig) step(ctx context.Context) (time.Duration, error) {
	start := time.Now()
	if err := r.ddp.Step(ctx); err != nil {
		return 0, err
	}
	if err := r.ddp.Sync(ctx); err != nil {
		return 0, err
	}
	return time.Since(start), nil
}

// tokens of all ranks in a step.
func (r *rig) tokens() int {
	return r.g.WorldSize * r.model.Config.Batch * r.model.Config.Seq
}

// walls are the lengths of the timed steps of each mode, in milliseconds.
type walls [len(modes)][]float64

// median of a mode's steps.
func (w *walls) median(mode int) float64 { return quantile(w[mode], 0.5) }

// Share is a part of a whole, 1 for all of it; NaN, and null in JSON, where it
// can't be told.
type Share float64

func (s Share) String() string {
	if math.IsNaN(float64(s)) {
		return "n/a"
	}
	return fmt.Sprintf("%.0f %%", 100*float64(s))
}

// MarshalJSON writes null for NaN.
func (s Share) MarshalJSON() ([]byte, error) {
	if math.IsNaN(float64(s)) {
		return []byte("null"), nil
	}
	return json.Marshal(float64(s))
}

// UnmarshalJSON reads what MarshalJSON writes.
func (s *Share) UnmarshalJSON(b []byte) error {
	if string(b) == "null" {
		*s = Share(math.NaN())
		return nil
	}
	return json.Unmarshal(b, (*float64)(s))
}

// hiddenShare is 1 − (step − without)/(after − without), where step, without
// communication and with communication after the backward pass are medians. One
// rank has nothing to hide. Where steps with communication were not even slower
// than those without, the machine's unrest was larger than what was to be
// measured, and nothing can be told.
func hiddenShare(worldSize int, step, without, after float64) Share {
	if worldSize == 1 {
		return 1
	}
	hidable := after - without
	if hidable <= 0 {
		return Share(math.NaN())
	}
	return Share(1 - (step-without)/hidable)
}

// failed says in which step of which mode err happened.
func failed(mode, step int, err error) error {
	return fmt.Errorf("bench: %v step %d: %w", modes[mode], step, err)
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// quantile is the q-quantile of x by nearest rank.
func quantile(x []float64, q float64) float64 {
	if len(x) == 0 {
		return 0
	}
	s := slices.Clone(x)
	slices.Sort(s)
	return s[min(len(s)-1, int(q*float64(len(s))))]
}
