package trainer

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/checkpoint"
)

// Without it a run that is stopped would go on for a step that nobody waits for,
// lose its checkpoint or its evaluation, or pass for one that is finished.
func TestStop(t *testing.T) {
	for _, n := range []int{1, 3} {
		c := small(t, t.TempDir())
		c.SampleTokens, c.CheckpointEvery, c.EvalEvery = 5, 1000, 1000
		stop := make(chan struct{})
		var lock sync.Mutex
		joined := 0
		results := make([]*Result, n)
		for _, err := range ranks(t, n, func(ctx context.Context, g *tandem.Group) error {
			c := c
			if g.Rank == 0 {
				c.Stop = stop // the others aren't told
			}
			var err error
			results[g.Rank], err = Run(ctx, g, c, Observer{
				Joined: func() { lock.Lock(); joined++; lock.Unlock() },
				Step: func(m *Metrics) {
					if m.Step == 4 {
						close(stop)
					}
				},
			})
			return err
		}) {
			require.NoError(t, err)
		}
		require.Equal(t, n, joined, "every rank hears that the run has begun")
		last := results[0].Steps
		for _, r := range results {
			require.True(t, r.Stopped)
			require.Equal(t, last, r.Steps)
			require.Equal(t, results[0].ValLoss, r.ValLoss)
			require.Positive(t, r.ValLoss)
			require.Empty(t, r.Sample)
		}
		require.LessOrEqual(t, last, 5)
		cp, err := checkpoint.Find(c.Out)
		require.NoError(t, err)
		require.Equal(t, last, cp.Step)
		raw, err := os.ReadFile(filepath.Join(c.Out, "metrics.jsonl"))
		require.NoError(t, err)
		lines := bytes.Split(bytes.TrimSpace(raw), []byte("\n"))
		require.Len(t, lines, last)
		var m Metrics
		require.NoError(t, json.Unmarshal(lines[last-1], &m))
		require.Equal(t, last, m.Step)
		require.NotNil(t, m.CheckpointStallMS)
		require.Equal(t, results[0].ValLoss, *m.ValLoss, "evaluated after the checkpoint")
	}
}
