package ddp

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/comm"
)

// Without the broadcast ranks would train different models for ever.
func TestInitialWeightsAreRankZeros(t *testing.T) {
	got := make([][][]float32, 3)
	group{ranks: 3}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m := buildModel(batch, uint64(rank))
		d, err := New(ctx, c, m.loss, m.params, o)
		if err != nil {
			return err
		}
		got[rank] = snapshot(d.ValueGrads())
		return d.Close()
	})
	var want [][]float32
	for _, p := range buildModel(batch, 0).params {
		want = append(want, floats(p.Value()))
	}
	for rank := range got {
		require.Equal(t, want, got[rank], "rank %d", rank)
	}
}

func TestSmoke(t *testing.T) {
	all := group{ranks: 2}.train(t, 5, vanilla)
	require.Equal(t, all[0], all[1])
}
