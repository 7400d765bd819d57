package engine_test

import (
	"context"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/engine"
	"github.com/tandem-go/tandem/models/gpt2mini"
)

// splitRig is a tiny GPT-2, whose embedding is tied, with its gradients.
type splitRig struct {
	plan         *engine.Plan
	s            device.Stream
	params       []device.Buffer
	grads        []device.Buffer
	tokens, rows device.Buffer
	ready, apart []int
}

func newSplitRig(t *testing.T, dev device.Device, o *engine.Options) *splitRig {
	c := gpt2mini.Config{Vocab: 40, Block: 8, Seq: 8, Layers: 1, Heads: 2, DModel: 16, Batch: 3}
	m, err := gpt2mini.New(c)
	require.NoError(t, err)
	require.NoError(t, m.Init(3))
	rng := rand.New(rand.NewPCG(1, 1))
	tokens, targets := make([]int, 24), make([]int, 24)
	for i := range tokens {
		tokens[i], targets[i] = rng.IntN(40), rng.IntN(40)
	}
	require.NoError(t, m.SetBatch(tokens, targets))
	r := &splitRig{}
	r.plan, err = engine.Compile(dev, m.Loss, m.Params, o)
	require.NoError(t, err)
	for _, p := range r.plan.Params() {
		b, err := dev.Alloc(p.Bytes())
		require.NoError(t, err)
		r.grads = append(r.grads, b)
	}
	require.NoError(t, r.plan.BindGrads(r.grads))
	r.plan.BindHooks(engine.Hooks{Rows: func(p int) error { r.apart = append(r.apart, p); return nil }})
	r.s, err = dev.NewStream(device.Normal)
	require.NoError(t, err)
	return r
}

func (r *splitRig) run(t *testing.T) [][]float32 {
	r.ready, r.apart = nil, nil
	require.NoError(t, r.plan.Run(r.s, func(p int) error { r.ready = append(r.ready, p); return nil }))
	require.NoError(t, r.s.Sync(context.Background()))
	var all [][]float32
	for _, b := range r.grads {
		all = append(all, floats32(b))
	}
	return all
}

func floats32(b device.Buffer) []float32 {
	mem, _ := b.HostBytes()
	v := make([]float32, len(mem)/4)
	for i := range v {
		v[i] = math.Float32frombits(binary.NativeEndian.Uint32(mem[4*i:]))
	}
	return v
}

func near(t *testing.T, want, got [][]float32, msg string) {
	for i := range want {
		require.InDeltaSlice(t, want[i], got[i], 2e-6, "%s: gradient %d", msg, i)
	}
}

// Without it a tied embedding's gradient would lose its rows, or get them twice:
// added, apart, and over micro-steps, it is that of the plan that doesn't split.
func TestSplitEmbeddingGradient(t *testing.T) {
	dev, err := cpu.New(&cpu.Options{Threads: 1})
	require.NoError(t, err)
	defer dev.Close()
	want := newSplitRig(t, dev, nil).run(t)
	for _, poison := range []bool{false, true} {
		r := newSplitRig(t, dev, &engine.Options{Poison: poison, Split: func(s engine.Split, table device.Tensor) bool {
			require.Equal(t, []int{40, 16}, table.Shape)
			require.Equal(t, []int{24}, s.Tokens.Shape)
			require.Equal(t, []int{24, 16}, s.Rows.Shape)
			return true
		}})
		require.Len(t, r.plan.Splits(), 1)
		p := r.plan.Splits()[0].Param
		require.Contains(t, r.plan.Params()[p].Name, "wte")
		near(t, want, r.run(t), "added")
		require.Equal(t, p, r.ready[len(r.ready)-1], "final with its last part")
		require.Len(t, r.ready, len(want))

		r.bind(t, dev)
		r.plan.SplitRuns(true)
		dense := r.run(t)
		require.Equal(t, []int{p}, r.apart)
		require.Equal(t, r.plan.Order(), r.ready)
		require.Less(t, slices.Index(r.ready, p), 3, "the dense part is among the first")
		require.NotEqual(t, want[p], dense[p])
		near(t, want, r.joined(dense, p), "apart")

		// A micro-step that adds, then one that keeps apart what it adds.
		r.plan.SplitRuns(false)
		r.run(t)
		r.plan.Accumulate(true)
		r.plan.SplitRuns(true)
		twice := r.joined(r.run(t), p)
		for i := range twice {
			for j := range twice[i] {
				twice[i][j] /= 2
			}
		}
		near(t, want, twice, "accumulated")
	}
}

func (r *splitRig) bind(t *testing.T, dev device.Device) {
	var err error
	s := r.plan.Splits()[0]
	r.tokens, err = dev.Alloc(s.Tokens.Bytes())
	require.NoError(t, err)
	r.rows, err = dev.Alloc(s.Rows.Bytes())
	require.NoError(t, err)
	require.Error(t, r.plan.BindSplit(1, r.tokens, r.rows))
	require.Error(t, r.plan.BindSplit(0, r.rows, r.rows))
	require.NoError(t, r.plan.BindSplit(0, r.tokens, r.rows))
}

// joined adds the rows to the dense part.
func (r *splitRig) joined(dense [][]float32, p int) [][]float32 {
	tokens, _ := r.tokens.HostBytes()
	rows := floats32(r.rows)
	for n := range len(tokens) / 8 {
		at := int(binary.NativeEndian.Uint64(tokens[8*n:]))
		for j := range 16 {
			dense[p][16*at+j] += rows[16*n+j]
		}
	}
	return dense
}

// Without it a gradient would be split that nobody wants split.
func TestSplitIsAskedFor(t *testing.T) {
	dev, err := cpu.New(&cpu.Options{Threads: 1})
	require.NoError(t, err)
	defer dev.Close()
	r := newSplitRig(t, dev, &engine.Options{Split: func(engine.Split, device.Tensor) bool { return false }})
	require.Empty(t, r.plan.Splits())
	require.Equal(t, newSplitRig(t, dev, nil).run(t), r.run(t))
}
