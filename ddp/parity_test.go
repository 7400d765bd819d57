package ddp

import (
	"context"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/ddp/hook"
	"github.com/tandem-go/tandem/models/gpt2mini"
	"github.com/tandem-go/tandem/models/gpt2mini/parity"
	"github.com/tandem-go/tandem/optim"
	"github.com/tandem-go/tandem/overlap"
)

// split is how a reference batch is shared out: Batch/(ranks·micro) sequences
// for each rank and micro-step.
type split struct {
	ranks, micro int
	caps         bucket.Caps
	ring         bool
}

// Without it the average over ranks and micro-steps, whatever the buckets, could
// differ from what PyTorch computes on the whole batch.
func TestParityOfRanks(t *testing.T) {
	files, err := parity.Files()
	require.NoError(t, err)
	caps := map[string]bucket.Caps{"one tensor": bucket.Each(), "default": {}, "all in one": bucket.One()}
	for _, path := range files {
		f, err := parity.Load(path)
		require.NoError(t, err)
		for name, c := range caps {
			for _, s := range []split{
				{ranks: 1, micro: 1}, {ranks: 2, micro: 1}, {ranks: 4, micro: 1}, {ranks: 1, micro: 2}, {ranks: 2, micro: 2},
				{ranks: 2, micro: 1, ring: true}, {ranks: 4, micro: 1, ring: true},
			} {
				s.caps = c
				t.Run(fmt.Sprintf("%s/%s/%d ranks, %d micro-steps, ring %v", filepath.Base(path), name, s.ranks, s.micro, s.ring), func(t *testing.T) {
					if f.Config.Batch%(s.ranks*s.micro) != 0 {
						t.Skipf("a batch of %d sequences can't be shared out", f.Config.Batch)
					}
					s.checkGradients(t, f)
					s.checkTraining(t, f)
				})
			}
		}
	}
}

// model is the graph of one micro-step, with the reference's parameters on rank
// 0 and others elsewhere.
func (s split) model(f *parity.File, rank int) (*gpt2mini.Model, error) {
	c := f.Config
	c.Batch /= s.ranks * s.micro
	m, err := gpt2mini.New(c)
	if err != nil || rank > 0 {
		return m, errors.Join(err, m.Init(uint64(rank)))
	}
	for name, p := range f.Params {
		if err := m.SetParam(name, p.Data); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// step runs the micro-steps of a step. Gradients of micro-steps are summed.
func (s split) step(ctx context.Context, d *DDP, m *gpt2mini.Model, f *parity.File, step, rank int) error {
	n := len(f.Tokens[step]) / (s.ranks * s.micro)
	one := func(i int) error {
		at := (rank*s.micro + i) * n
		return errors.Join(m.SetBatch(f.Tokens[step][at:at+n], f.Targets[step][at:at+n]), d.Step(ctx))
	}
	err := d.NoSync(func() error {
		var err error
		for i := range s.micro - 1 {
			err = errors.Join(err, one(i))
		}
		return err
	})
	return errors.Join(err, one(s.micro-1))
}

// checkGradients compares the averages of step 0, and the norm and loss.
func (s split) checkGradients(t *testing.T, f *parity.File) {
	o := Options{Caps: s.caps, Norm: true}
	group{ranks: s.ranks, ring: s.ring, opts: o}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m, err := s.model(f, rank)
		if err != nil {
			return err
		}
		d, err := New(ctx, c, m.Loss, m.Params, o)
		if err != nil {
			return err
		}
		defer d.Close()
		if err := s.step(ctx, d, m, f, 0, rank); err != nil {
			return err
		}
		require.InDelta(t, f.Losses[0], d.Stats().Loss/float64(s.micro), 1e-5)
		require.InEpsilon(t, f.Norms[0], d.Stats().Norm/float64(s.micro), 1e-5)
		for i, g := range gradients(d) {
			for j := range g {
				g[j] /= float32(s.micro)
			}
			name := d.Layout().Params[i].Name
			require.LessOrEqual(t, parity.Compare(name, g, f.Grads[name]).Rel, 2e-5, "gradient of %s", name)
		}
		return s.checkOwnGradients(ctx, d, m, f, rank)
	})
}

// checkOwnGradients compares each rank's own gradient, where the reference has
// it, before any exchange.
func (s split) checkOwnGradients(ctx context.Context, d *DDP, m *gpt2mini.Model, f *parity.File, rank int) error {
	if s.ranks != 2 || s.micro != 1 {
		return nil
	}
	return d.NoSync(func() error {
		n := len(f.Tokens[0]) / 2
		if err := errors.Join(m.SetBatch(f.Tokens[0][rank*n:rank*n+n], f.Targets[0][rank*n:rank*n+n]), d.Step(ctx)); err != nil {
			return err
		}
		for i, g := range gradients(d) {
			name := d.Layout().Params[i].Name
			if rel := parity.Compare(name, g, f.RankGrads[rank][name]).Rel; !(rel <= 2e-5) {
				return fmt.Errorf("rank %d: gradient of %s is off by %v", rank, name, rel)
			}
		}
		return nil
	})
}

// checkTraining compares the losses, norms and parameters of clipped AdamW steps.
// Summed micro-steps have a gradient, and so a norm, micro times as large; AdamW
// doesn't see the factor but for eps.
func (s split) checkTraining(t *testing.T, f *parity.File) {
	micro := float64(s.micro)
	o := Options{Caps: s.caps, MaxNorm: micro, Optimizer: optim.AdamW{
		LR: 1e-3, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8 * micro, WeightDecay: 0.1,
	}}
	var mu sync.Mutex
	all := make([][][]float32, s.ranks)
	group{ranks: s.ranks, ring: s.ring, opts: o}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m, err := s.model(f, rank)
		if err != nil {
			return err
		}
		d, err := New(ctx, c, m.Loss, m.Params, o)
		if err != nil {
			return err
		}
		defer d.Close()
		for step := range f.Steps {
			if err := s.step(ctx, d, m, f, step, rank); err != nil {
				return err
			}
			require.InDelta(t, f.Losses[step], d.Stats().Loss/micro, 1e-4, "loss of step %d", step)
			require.InEpsilon(t, f.Norms[step], d.Stats().Norm/micro, 1e-5, "norm of step %d", step)
		}
		if err := d.Sync(ctx); err != nil {
			return err
		}
		mu.Lock()
		all[rank] = snapshot(d.ValueGrads())
		mu.Unlock()
		for i, v := range all[rank] {
			name := d.Layout().Params[i].Name
			require.LessOrEqual(t, parity.Compare(name, v, f.After[name]).Abs, 1e-4, "%s after training", name)
		}
		return nil
	})
	for rank := range all {
		require.Equal(t, all[0], all[rank], "rank %d", rank)
	}
}

// Without it a step could allocate, and a long run would pay for the collector:
// 100 steps of two ranks together, after a few that warm up, must not allocate
// on our side.
func TestStepAllocatesNothing(t *testing.T) {
	cfg := gpt2mini.Config{Vocab: 11, Block: 8, Layers: 2, Heads: 2, DModel: 16, Batch: 2}
	for name, o := range map[string]Options{
		"external":   {},
		"per bucket": {Optimizer: optim.AdamW{}},
		"clipped":    {Optimizer: optim.AdamW{}, MaxNorm: 1, Schedule: optim.WarmupCosine{Max: 1e-3, Steps: 200}},
		"split":      {Optimizer: optim.AdamW{}},
		"bf16":       {Optimizer: optim.AdamW{}, Hook: hook.BF16{ErrorFeedback: true, Float32Sum: true}},
		"PowerSGD":   {Optimizer: optim.AdamW{}, Hook: hook.PowerSGD{Rank: 2}},
		"top-k":      {Optimizer: optim.AdamW{}, Hook: hook.TopK{}},
	} {
		t.Run(name, func(t *testing.T) {
			const steps = 100
			cfg := cfg
			if name == "split" {
				cfg.Vocab = 300
			}
			warm := newMeeting(2)
			group{ranks: 2, opts: o}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
				m, err := gpt2mini.New(cfg)
				if err != nil {
					return err
				}
				d, err := New(ctx, c, m.Loss, m.Params, o)
				if err != nil {
					return err
				}
				defer d.Close()
				tokens := make([]int, cfg.Batch*cfg.Block)
				run := func(n int) error {
					for range n {
						if err := errors.Join(m.SetBatch(tokens, tokens), d.Step(ctx)); err != nil {
							return err
						}
					}
					return d.Sync(ctx)
				}
				if err := run(20); err != nil {
					return err
				}
				var before, after runtime.MemStats
				warm.wait()
				runtime.ReadMemStats(&before)
				warm.wait()
				err = run(steps)
				warm.wait()
				runtime.ReadMemStats(&after)
				warm.wait()
				perStep := float64(after.Mallocs-before.Mallocs) / steps
				require.Less(t, perStep, 1.0, "%v objects of %v bytes a step", perStep, float64(after.TotalAlloc-before.TotalAlloc)/steps)
				require.False(t, math.IsNaN(d.Loss()))
				return err
			})
		})
	}
}

// meeting lets goroutines wait for one another, again and again.
type meeting struct {
	mu      sync.Mutex
	n, here int
	open    chan struct{}
}

func newMeeting(n int) *meeting { return &meeting{n: n, open: make(chan struct{})} }

func (m *meeting) wait() {
	m.mu.Lock()
	m.here++
	open := m.open
	if m.here == m.n {
		m.here, m.open = 0, make(chan struct{})
		close(open)
	}
	m.mu.Unlock()
	<-open
}

// Without the wait for the last reader an update would change weights that the
// backward pass still reads: dX = dY·Wᵀ comes after dW. Kernels dawdle and every
// gradient has a bucket of its own, so an update that doesn't wait comes first.
// The reference starts collectives, and so updates, after the backward pass.
func TestUpdateWaitsForLastReader(t *testing.T) {
	cfg := gpt2mini.Config{Vocab: 11, Block: 4, Layers: 1, Heads: 2, DModel: 8, Batch: 2}
	run := func(g group, schedule overlap.Schedule) [][]float32 {
		all := make([][][]float32, g.ranks)
		g.opts = Options{Optimizer: optim.SGD{LR: 0.5}, Caps: bucket.Each()}
		g.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
			m, err := gpt2mini.New(cfg)
			if err != nil {
				return err
			}
			if err := m.Init(1); err != nil {
				return err
			}
			d, err := New(ctx, c, m.Loss, m.Params, o)
			if err != nil {
				return err
			}
			defer d.Close()
			d.SetSchedule(schedule)
			for s := range 3 {
				tokens := []int{s, rank, 2, 3, 4, 5, 6, 7}
				if err := errors.Join(m.SetBatch(tokens, []int{1, 2, 3, 4, 5, 6, 7, s}), d.Step(ctx)); err != nil {
					return err
				}
			}
			err = d.Sync(ctx)
			all[rank] = snapshot(d.ValueGrads())
			return err
		})
		require.Equal(t, all[0], all[1])
		return all[0]
	}
	want := run(group{ranks: 2}, overlap.NoOverlap)
	require.Equal(t, want, run(group{ranks: 2, slow: 300 * time.Microsecond}, overlap.Normal))
}
