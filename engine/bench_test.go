package engine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/models/gpt2mini"
)

// gpt is a plan of a preset with random tokens.
func gpt(t testing.TB, d device.Device, preset string, batch, seq int) *rig {
	t.Helper()
	c, err := gpt2mini.Preset(preset)
	require.NoError(t, err)
	c.Batch, c.Seq = batch, seq
	if c.Vocab == 0 {
		c.Vocab = 65
	}
	m, err := gpt2mini.New(c)
	require.NoError(t, err)
	require.NoError(t, m.Init(1))
	n := m.Tokens.Shape()[0]
	tokens, targets := make([]int, n), make([]int, n)
	for i := range tokens {
		tokens[i], targets[i] = i*7%m.Config.Vocab, (i*7+7)%m.Config.Vocab
	}
	require.NoError(t, m.SetBatch(tokens, targets))
	return compile(t, d, &problem{params: m.Params, loss: m.Loss}, nil)
}

// A forward and backward pass of GPT-2 mini, one compute thread.
func BenchmarkRun(b *testing.B) {
	d := newDevice(b)
	r := gpt(b, d, "mini", 8, 64)
	bindBuffers(b, d, r.Plan)
	r.run()
	b.ReportAllocs()
	for b.Loop() {
		require.NoError(b, r.Run(r.s, nil))
		require.NoError(b, r.s.Sync(b.Context()))
	}
	b.ReportMetric(float64(r.Steps()), "steps")
	b.ReportMetric(float64(r.ArenaBytes())/(1<<20), "arena-MiB")
}

// What Run costs its caller, apart from the work that it enqueues: the stream
// throws everything away.
func BenchmarkEnqueue(b *testing.B) {
	d := newDevice(b)
	r := gpt(b, d, "mini", 8, 64)
	bindBuffers(b, d, r.Plan)
	s := &sink{Stream: r.s}
	b.ReportAllocs()
	for b.Loop() {
		require.NoError(b, r.Run(s, nil))
		require.NoError(b, s.Sync(b.Context()))
	}
}

type sink struct{ device.Stream }

func (sink) Launch(device.Kernel, []device.Buffer) error { return nil }
func (sink) HostFunc(func() error) error                 { return nil }
func (sink) Copy(dst, src device.Buffer) error           { return nil }

func BenchmarkCompile(b *testing.B) {
	d := newDevice(b)
	for b.Loop() {
		gpt(b, d, "mini", 8, 64)
	}
}
