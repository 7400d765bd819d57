package ddp

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/comm/inmem"
	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/engine"
	"github.com/tandem-go/tandem/models/gpt2mini"
	"github.com/tandem-go/tandem/optim"
)

func benchModel(b *testing.B) *gpt2mini.Model {
	c, err := gpt2mini.Preset("mini")
	require.NoError(b, err)
	m, err := gpt2mini.New(c)
	require.NoError(b, err)
	require.NoError(b, m.Init(1))
	tokens := make([]int, c.Batch*c.Block)
	for i := range tokens {
		tokens[i] = i * 7 % c.Vocab
	}
	require.NoError(b, m.SetBatch(tokens, tokens))
	return m
}

// BenchmarkPlan is the passes alone: the floor for BenchmarkStep.
func BenchmarkPlan(b *testing.B) {
	dev, err := cpu.New(&cpu.Options{Threads: 1})
	require.NoError(b, err)
	defer dev.Close()
	m := benchModel(b)
	p, err := engine.Compile(dev, m.Loss, m.Params, nil)
	require.NoError(b, err)
	s, err := dev.NewStream(0)
	require.NoError(b, err)
	for b.Loop() {
		if err := errors.Join(p.Run(s, nil), s.Sync(context.Background())); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkStep is a whole step of one rank with one compute thread.
func BenchmarkStep(b *testing.B) {
	for name, o := range map[string]Options{
		"external":   {},
		"per-bucket": {Optimizer: optim.AdamW{}},
		"clipped":    {Optimizer: optim.AdamW{}, MaxNorm: 1},
	} {
		b.Run(fmt.Sprintf("mini/%s", name), func(b *testing.B) {
			dev, err := cpu.New(&cpu.Options{Threads: 1})
			require.NoError(b, err)
			defer dev.Close()
			world, err := inmem.New(dev, 1, nil)
			require.NoError(b, err)
			m := benchModel(b)
			o.Device = dev
			ctx := context.Background()
			d, err := New(ctx, world[0], m.Loss, m.Params, &o)
			require.NoError(b, err)
			defer d.Close()
			for b.Loop() {
				if err := d.Step(ctx); err != nil {
					b.Fatal(err)
				}
			}
			b.StopTimer()
			require.NoError(b, d.Sync(ctx))
			st := d.Stats()
			b.ReportMetric(st.Forward.Seconds()*1e3, "forward-ms")
			b.ReportMetric(st.Backward.Seconds()*1e3, "backward-ms")
			b.ReportMetric(st.Times.Update.Seconds()*1e3, "update-ms")
			b.ReportMetric(st.Times.Comm.Seconds()*1e3, "comm-ms")
		})
	}
}
