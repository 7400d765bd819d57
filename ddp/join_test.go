package ddp

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/optim"
)

// Without it DivideByInitial would be a word: once ranks have ended, the sum of
// the others' gradients is still divided by all of them.
func TestJoinDividesByInitial(t *testing.T) {
	for _, ring := range []bool{false, true} {
		for _, initial := range []bool{false, true} {
			o := Options{Join: JoinOptions{DivideByInitial: initial}}
			group{ranks: 3, ring: ring, opts: o}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
				m, d, err := setup(ctx, c, o)
				if err != nil {
					return err
				}
				defer d.Close()
				steps := 0
				err = d.Join(ctx, func() (bool, error) {
					steps++
					return steps == 1 && rank < 2, m.feed(0, rank*batch)
				})
				if err != nil {
					return err
				}
				parts := [][][]float32{}
				for r := range 2 {
					one := buildModel(batch, 0)
					require.NoError(t, one.feed(0, r*batch))
					parts = append(parts, gradientsOf(t, one))
				}
				divisor := float32(2)
				if initial {
					divisor = 3
				}
				for p, g := range gradients(d) {
					for i := range g {
						require.InDelta(t, (parts[0][p][i]+parts[1][p][i])/divisor, g[i], 1e-6)
					}
				}
				return nil
			})
		}
	}
}

// Without it uneven inputs would pass where the caller wanted to know, or only
// some ranks would be told and the others hang; even ones are no error.
func TestThrowOnEarlyTermination(t *testing.T) {
	for name, have := range map[string][]int{"uneven": {4, 2, 5, 2}, "even": {3, 3, 3, 3}} {
		for _, o := range []Options{{}, {Optimizer: optim.SGD{}}} {
			o.Join.ThrowOnEarlyTermination = true
			errs := group{ranks: 4, opts: o}.run(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
				m, d, err := setup(ctx, c, o)
				if err != nil {
					return err
				}
				defer d.Close()
				s := 0
				return d.Join(ctx, func() (bool, error) { s++; return s <= have[rank], m.feed(s, rank*batch) })
			})
			for rank, err := range errs {
				if name == "even" {
					require.NoError(t, err)
					continue
				}
				var early *EarlyTerminationError
				require.ErrorAs(t, err, &early, "rank %d", rank)
				require.Equal(t, EarlyTerminationError{Step: 2, Ranks: []int{1, 3}}, *early)
			}
		}
	}
}

// Without it buffers, which are exchanged before the passes, would hang where
// only some ranks have noticed that others ended.
func TestThrowOnEarlyTerminationWithBuffers(t *testing.T) {
	o := Options{Join: JoinOptions{ThrowOnEarlyTermination: true}}
	errs := group{ranks: 3, opts: o}.run(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m, buffers := withBuffers(rank)
		o.Buffers = buffers
		d, err := New(ctx, c, m.loss, m.params, o)
		if err != nil {
			return err
		}
		defer d.Close()
		s := 0
		return d.Join(ctx, func() (bool, error) { s++; return s <= 1+rank, m.feedOnes() })
	})
	for rank, err := range errs {
		require.ErrorContains(t, err, "ddp: step 1: ranks [0] have no more data", "rank %d", rank)
	}
	require.Error(t, errors.Join(errs...))
}
