package engine

import (
	"testing"

	"github.com/stretchr/testify/require"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
	"pgregory.net/rapid"
)

// Without it two results in use at one time could share memory.
func TestLayoutSharesNothingInUse(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var items []*item
		sum, need := 0, map[int]int{}
		for range rapid.IntRange(0, 40).Draw(t, "n") {
			first := rapid.IntRange(-1, 20).Draw(t, "first")
			it := &item{size: align * rapid.IntRange(1, 9).Draw(t, "size"), first: first,
				last: first + rapid.IntRange(0, 6).Draw(t, "life")}
			for at := it.first; at <= it.last; at++ {
				need[at] += it.size
			}
			if rapid.IntRange(0, 9).Draw(t, "pinned") == 0 {
				it.last = forever
			}
			sum += it.size
			items = append(items, it)
		}
		total := layout(items)
		require.LessOrEqual(t, total, sum)
		for _, n := range need {
			require.GreaterOrEqual(t, total, n)
		}
		for i, a := range items {
			require.Zero(t, a.off%align)
			require.LessOrEqual(t, a.off+a.size, total)
			for _, b := range items[:i] {
				require.False(t, a.meets(b) && a.off < b.off+b.size && b.off < a.off+a.size, "%+v and %+v overlap", *a, *b)
			}
		}
	})
}

// Without it a chain of activations would cost the memory of all of them.
func TestChainReusesMemory(t *testing.T) {
	p := newProblem(tensor.Float32)
	x := p.param("x", 16, 16)
	for range 50 {
		x = must(G.Tanh(x))
	}
	p.loss = must(G.Mean(x))
	r := compile(t, newDevice(t), p, &Options{ForwardOnly: true})
	require.LessOrEqual(t, r.ArenaBytes(), 2*16*16*4+2*align)
}

// Without it Poison would not show what it is there for.
func TestPoisonShowsMemoryReadTooLate(t *testing.T) {
	p := newProblem(tensor.Float32)
	graphs["mlp"](p)
	r := compile(t, newDevice(t), p, &Options{Poison: true})
	for at, st := range r.steps {
		if at+1 < len(r.steps) && st.v.item != nil && st.v.item.last > at {
			st.freed = append(st.freed, st.v.item) // before its reader
			break
		}
	}
	loss, _ := r.run()
	require.True(t, loss != loss, "the loss must be NaN")
}
