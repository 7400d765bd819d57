package ddp

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/optim"
)

// Without it a run that is continued from saved parameters and moments would
// have another learning rate or bias correction than one that was never stopped.
func TestSetStepsContinues(t *testing.T) {
	const cut, steps = 3, 7
	o := Options{
		Optimizer: optim.AdamW{WeightDecay: 0.1}, MaxNorm: 0.3,
		Schedule: optim.WarmupCosine{Max: 0.05, Min: 0.01, Warmup: 4, Steps: steps},
	}
	want := group{ranks: 2, opts: o}.train(t, steps, nil)
	var values [2][][]byte // by rank: parameters, then moments
	got := make([][][]float32, 2)
	memory := func(d *DDP) (all [][]byte) {
		for _, b := range d.ParamBuffers() {
			host, _ := b.HostBytes()
			all = append(all, host)
		}
		for _, s := range d.Optimizer().States() {
			host, _ := s.Buffer.HostBytes()
			all = append(all, host)
		}
		return all
	}
	for _, part := range [][2]int{{0, cut}, {cut, steps}} {
		group{ranks: 2, opts: o}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
			m := buildModel(batch, uint64(9+rank))
			if part[0] == 0 {
				m = buildModel(batch, uint64(rank))
			}
			d, err := New(ctx, c, m.loss, m.params, o)
			if err != nil {
				return err
			}
			defer d.Close()
			if part[0] > 0 {
				for i, b := range memory(d) {
					copy(b, values[rank][i])
				}
				if err := d.SetSteps(cut, cut); err != nil {
					return err
				}
			}
			for s := part[0]; s < part[1]; s++ {
				if err := errors.Join(m.feed(s, rank*batch), d.Step(ctx)); err != nil {
					return err
				}
			}
			if err := d.Sync(ctx); err != nil {
				return err
			}
			for _, b := range memory(d) {
				values[rank] = append(values[rank], append([]byte(nil), b...))
			}
			got[rank] = snapshot(d.ValueGrads())
			require.Equal(t, part[1], d.Steps())
			require.ErrorContains(t, d.SetSteps(1, 1), "before the first")
			return nil
		})
	}
	require.Equal(t, want, got)
}

// Without it ranks that continue from different steps would train on.
func TestSetStepsMustAgree(t *testing.T) {
	errs := group{ranks: 2}.run(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m := buildModel(batch, 0)
		d, err := New(ctx, c, m.loss, m.params, o)
		if err != nil {
			return err
		}
		defer d.Close()
		require.ErrorContains(t, d.SetSteps(-1, 0), "negative")
		return errors.Join(d.SetSteps(rank, 0), m.feed(0, 0), d.Step(ctx))
	})
	for _, err := range errs {
		require.ErrorContains(t, err, "ranks disagree: rank 0 is at step 0, rank 1 is at step 1")
	}
}
