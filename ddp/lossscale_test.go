package ddp

import (
	"context"
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/ddp/hook"
	"github.com/tandem-go/tandem/optim"
)

// Without it an overflow would end the run, or only some ranks would skip it and
// train another model from there on: skipped steps change nothing, lower the
// scale alike everywhere, and later ones train.
func TestLossScaleSkipsOverflows(t *testing.T) {
	for name, g := range map[string]group{
		"inmem":    {ranks: 4, opts: Options{Hook: hook.FP16{}}},
		"feedback": {ranks: 3, opts: Options{Hook: hook.FP16{ErrorFeedback: true, Float32Sum: true}, MaxNorm: 1}},
		"TCP":      {ranks: 2, ring: true, opts: Options{Hook: hook.FP16{ErrorFeedback: true}}},
	} {
		t.Run(name, func(t *testing.T) {
			g.opts.Optimizer, g.opts.CheckParams = optim.AdamW{}, 1
			g.opts.LossScale = &LossScale{Initial: 1 << 24, Interval: 2}
			scales := make([][]float64, g.ranks)
			g.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
				m, d, err := setup(ctx, c, o)
				if err != nil {
					return err
				}
				defer d.Close()
				for s := range 30 {
					before := snapshot(d.ValueGrads())
					if err := errors.Join(m.feed(s, rank*batch), d.Step(ctx), d.Sync(ctx)); err != nil {
						return err
					}
					scales[rank] = append(scales[rank], d.Stats().LossScale)
					require.Equal(t, d.Skipped(), equal(before, snapshot(d.ValueGrads())))
				}
				st := d.Stats()
				require.Positive(t, st.Skipped)
				require.Less(t, st.Skipped, 29)
				require.Equal(t, 30-st.Skipped, d.Optimizer().Steps())
				return nil
			})
			for rank := range scales {
				require.Equal(t, scales[0], scales[rank])
			}
			require.InDelta(t, 1<<23, scales[0][0], 0)
			raised := false
			for i := 1; i < len(scales[0]); i++ {
				raised = raised || scales[0][i] > scales[0][i-1]
			}
			require.True(t, raised, "the scale never rises: %v", scales[0])
		})
	}
}

func equal(a, b [][]float32) bool {
	for i := range a {
		for j := range a[i] {
			if a[i][j] != b[i][j] {
				return false
			}
		}
	}
	return true
}

// Without it small gradients would vanish in float16; and a gradient that is
// not finite at any scale would be skipped for ever.
func TestLossScaleKeepsSmallGradients(t *testing.T) {
	smallest := func(scale *LossScale) (zeros int, largest float64) {
		group{ranks: 2, opts: Options{Hook: hook.FP16{}, LossScale: scale}}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
			m := buildModel(batch, 0)
			loss := gorgonia.Must(gorgonia.Mul(m.loss, gorgonia.NewConstant(float32(1e-8), gorgonia.WithName("tiny"))))
			d, err := New(ctx, c, loss, m.params, o)
			if err != nil {
				return err
			}
			defer d.Close()
			if err := errors.Join(m.feed(0, rank*batch), d.Step(ctx)); err != nil {
				return err
			}
			for _, g := range gradients(d) {
				for _, v := range g {
					if rank > 0 {
						continue
					}
					if v == 0 {
						zeros++
					}
					largest = max(largest, math.Abs(float64(v)))
				}
			}
			return nil
		})
		return zeros, largest
	}
	lost, _ := smallest(nil)
	require.Greater(t, lost, 50)
	lost, largest := smallest(&LossScale{Initial: 1 << 20})
	require.Zero(t, lost)
	require.Less(t, largest, 1e-6, "the scale is still in")

	errs := group{ranks: 2, opts: Options{Hook: hook.FP16{}, Optimizer: optim.SGD{}, LossScale: &LossScale{Initial: 2}}}.run(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m, d, err := setup(ctx, c, o)
		if err != nil {
			return err
		}
		defer d.Close()
		for s := range 9 {
			err = errors.Join(m.feed(s, rank*batch))
			if rank == 1 {
				m.x.Value().Data().([]float32)[0] = float32(math.NaN())
			}
			if err = errors.Join(err, d.Step(ctx)); err != nil {
				return err
			}
		}
		return nil
	})
	for _, err := range errs {
		var nf *NonFiniteError
		require.ErrorAs(t, err, &nf)
		require.Equal(t, 1, nf.Rank)
	}
}

// Without it a scale that isn't a power of two would change what it must not.
func TestLossScaleRefuses(t *testing.T) {
	for want, o := range map[string]Options{
		"needs a Hook":        {LossScale: &LossScale{}},
		"Initial is 3":        {LossScale: &LossScale{Initial: 3}, Hook: hook.FP16{}},
		"Initial is 0.5":      {LossScale: &LossScale{Initial: 0.5}, Hook: hook.FP16{}},
		"Interval is -1":      {LossScale: &LossScale{Interval: -1}, Hook: hook.FP16{}},
		"Weighted by weights": {Weighted: true, Join: JoinOptions{DivideByInitial: true}},
	} {
		_, err := o.validate()
		require.ErrorContains(t, err, want)
	}
}
