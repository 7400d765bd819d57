package infer_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/models/gpt2mini"
	"github.com/tandem-go/tandem/models/gpt2mini/infer"
	"github.com/tandem-go/tandem/models/gpt2mini/parity"
	"github.com/tandem-go/tandem/nn/nntest"
)

// model has parameters large enough for logits that differ.
func model(t testing.TB, c gpt2mini.Config) *gpt2mini.Model {
	t.Helper()
	m, err := gpt2mini.New(c)
	require.NoError(t, err)
	require.NoError(t, m.Init(3))
	rng := rand.New(rand.NewPCG(1, 2))
	for _, p := range c.Params() {
		v, err := params(m)(p.Name)
		require.NoError(t, err)
		for i := range v {
			v[i] += float32(rng.NormFloat64() * 0.1)
		}
	}
	return m
}

func params(m *gpt2mini.Model) func(string) ([]float32, error) {
	return func(name string) ([]float32, error) {
		for _, p := range m.Params {
			if p.Name() == name {
				return p.Value().Data().([]float32), nil
			}
		}
		return nil, errors.New("no such parameter")
	}
}

func decoder(t testing.TB, m *gpt2mini.Model, o *infer.Options) *infer.Decoder {
	t.Helper()
	d, err := infer.New(m.Config, params(m), o)
	require.NoError(t, err)
	return d
}

// full is the logits behind the last of tokens by the model's own forward pass.
func full(t *testing.T, m *gpt2mini.Model, tokens []int32) []float64 {
	t.Helper()
	one, err := m.Reshaped(1, len(tokens))
	require.NoError(t, err)
	require.NoError(t, one.CopyParams(m))
	ints := make([]int, len(tokens))
	for i, id := range tokens {
		ints[i] = int(id)
	}
	require.NoError(t, one.SetBatch(ints, nil))
	values, err := nntest.Eval(one.Logits)
	require.NoError(t, err)
	all := values.Float64s(one.Logits)
	return all[len(all)-m.Config.Vocab:]
}

func requireLogits(t *testing.T, want []float64, got []float32, what string) {
	t.Helper()
	require.Len(t, got, len(want))
	for i := range want {
		require.InDelta(t, want[i], float64(got[i]), 1e-4, "%s, logit %d", what, i)
	}
}

func text(n, vocab int) []int32 {
	rng := rand.New(rand.NewPCG(5, uint64(n)))
	s := make([]int32, n)
	for i := range s {
		s[i] = int32(rng.IntN(vocab))
	}
	return s
}

// Without it what is generated could come from another model than the one that
// was trained: fed token by token, in pieces or at once, by each kind of kernel
// and number of threads, logits are those of the full forward pass.
func TestLogitsAreTheModels(t *testing.T) {
	for _, c := range []gpt2mini.Config{
		{Vocab: 11, Block: 7, Layers: 2, Heads: 2, DModel: 6},
		{Vocab: 65, Block: 24, Layers: 3, Heads: 4, DModel: 32, Untied: true},
		{Vocab: 50, Block: 5, Layers: 1, Heads: 1, DModel: 3},
	} {
		m := model(t, c)
		s := text(c.Block, c.Vocab)
		var want [][]float64
		for n := range s {
			want = append(want, full(t, m, s[:n+1]))
		}
		for _, o := range []*infer.Options{nil, {Threads: 3}, {Portable: true}} {
			what := fmt.Sprintf("%+v, %+v", c, o)
			d := decoder(t, m, o)
			for i, id := range s {
				got, err := d.Feed(id)
				require.NoError(t, err)
				requireLogits(t, want[i], got, what)
			}
			d.Reset()
			cut := len(s) / 2
			for _, part := range [][]int32{s[:cut], s[cut:]} {
				_, err := d.Feed(part...)
				require.NoError(t, err)
			}
			d.Reset()
			got, err := d.Feed(s[:cut]...)
			require.NoError(t, err)
			requireLogits(t, want[cut-1], got, what+" first piece")
			got, err = d.Feed(s[cut:]...)
			require.NoError(t, err)
			requireLogits(t, want[len(s)-1], got, what+" second piece")
		}
	}
}

// Without it a text longer than the block would end, or be continued from
// positions that the model doesn't know.
func TestWindowSlides(t *testing.T) {
	c := gpt2mini.Config{Vocab: 13, Block: 8, Layers: 2, Heads: 2, DModel: 8}
	m := model(t, c)
	s := text(40, c.Vocab)
	d := decoder(t, m, nil)
	window := 0 // tokens that count
	for i, id := range s {
		if window++; window > c.Block {
			window = 6
		}
		got, err := d.Feed(id)
		require.NoError(t, err)
		requireLogits(t, full(t, m, s[i+1-window:i+1]), got, fmt.Sprintf("token %d", i))
	}
	d.Reset()
	got, err := d.Feed(s...)
	require.NoError(t, err)
	requireLogits(t, full(t, m, s[len(s)-6:]), got, "a prompt longer than the block")

	one := model(t, gpt2mini.Config{Vocab: 3, Block: 1, Layers: 1, Heads: 1, DModel: 2})
	d = decoder(t, one, nil)
	for _, id := range []int32{0, 1, 2} {
		got, err := d.Feed(id)
		require.NoError(t, err)
		requireLogits(t, full(t, one, []int32{id}), got, "a block of one")
	}
}

// Without it the decoder could agree with our model and both be wrong: this one
// is PyTorch's.
func TestLossIsPyTorchs(t *testing.T) {
	files, err := parity.Files()
	require.NoError(t, err)
	for _, path := range files {
		f, err := parity.Load(path)
		require.NoError(t, err)
		d, err := infer.New(f.Config, func(name string) ([]float32, error) { return f.Params[name].Data, nil }, nil)
		require.NoError(t, err)
		var sum float64
		n := 0
		for i, target := range f.Targets[0] {
			if i%f.Config.Block == 0 {
				d.Reset()
			}
			logits, err := d.Feed(int32(f.Tokens[0][i]))
			require.NoError(t, err)
			if target < 0 {
				continue
			}
			lse := 0.0
			for _, l := range logits {
				lse += math.Exp(float64(l))
			}
			sum += math.Log(lse) - float64(logits[target])
			n++
		}
		require.InDelta(t, f.Losses[0], sum/float64(n), 1e-5, path)
	}
}

// Without it a bad token or parameter would be an index out of range.
func TestRefuses(t *testing.T) {
	c := gpt2mini.Config{Vocab: 11, Block: 7, Layers: 1, Heads: 2, DModel: 6}
	m := model(t, c)
	d := decoder(t, m, nil)
	for _, bad := range [][]int32{{}, {-1}, {0, 11}} {
		_, err := d.Feed(bad...)
		require.Error(t, err, "%v", bad)
	}
	got, err := d.Feed(4)
	require.NoError(t, err, "what was refused left no trace")
	requireLogits(t, full(t, m, []int32{4}), got, "after errors")
	_, err = infer.New(c, func(string) ([]float32, error) { return make([]float32, 5), nil }, nil)
	require.ErrorContains(t, err, `"wte.weight" of shape [11 6] has 5 values`)
	_, err = infer.New(c, params(m), &infer.Options{Threads: -1})
	require.ErrorContains(t, err, "threads -1")
	c.Heads = 4
	_, err = infer.New(c, params(m), nil)
	require.ErrorContains(t, err, "divisible")
}

// Without it draws could follow another distribution than was asked for.
func TestDraw(t *testing.T) {
	logits := []float32{0, 2, 1, 2, -5}
	greedy := infer.Sampler{}
	require.EqualValues(t, 1, greedy.Draw(logits), "the first of the likeliest")
	for _, s := range []infer.Sampler{{Temperature: 1}, {Temperature: 0.5}, {Temperature: 1, TopK: 3}, {Temperature: 2, TopK: 99}, {Temperature: 1, TopK: 1}} {
		k := len(logits)
		if s.TopK > 0 {
			k = min(k, s.TopK)
		}
		likeliest := []int{1, 3, 2, 0, 4}[:k]
		want := make([]float64, len(logits))
		sum := 0.0
		for _, i := range likeliest {
			want[i] = math.Exp(float64(logits[i]) / s.Temperature)
			sum += want[i]
		}
		const n = 20000
		got := make([]float64, len(logits))
		for range n {
			got[s.Draw(logits)]++
		}
		for i := range want {
			require.InDelta(t, want[i]/sum, got[i]/n, 0.015, "%+v, token %d", s, i)
		}
	}
	for _, s := range []infer.Sampler{{Temperature: -1}, {Temperature: math.NaN()}, {Temperature: math.Inf(1)}, {TopK: -1}} {
		require.Error(t, s.Validate())
	}
}

// Without it the same seed could tell another story, a caller could not stop
// one, or its length would be off.
func TestGenerate(t *testing.T) {
	m := model(t, gpt2mini.Config{Vocab: 13, Block: 8, Layers: 1, Heads: 2, DModel: 8})
	run := func(seed int64, n int) (out []int32) {
		err := infer.Generate(context.Background(), decoder(t, m, nil), &infer.Sampler{Temperature: 1, Seed: seed}, []int32{1, 2}, n,
			func(id int32) error { out = append(out, id); return nil })
		require.NoError(t, err)
		return out
	}
	require.Len(t, run(1, 30), 30)
	require.Equal(t, run(1, 30), run(1, 30))
	require.NotEqual(t, run(1, 30), run(2, 30))
	require.Empty(t, run(1, 0))

	boom := errors.New("no more paper")
	d := decoder(t, m, nil)
	err := infer.Generate(context.Background(), d, &infer.Sampler{}, []int32{1}, 5, func(int32) error { return boom })
	require.ErrorIs(t, err, boom)
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(boom)
	require.ErrorIs(t, infer.Generate(ctx, d, &infer.Sampler{}, []int32{1}, 5, func(int32) error { return nil }), boom)
	require.ErrorContains(t, infer.Generate(context.Background(), d, &infer.Sampler{TopK: -1}, []int32{1}, 1, nil), "top-k")
	require.ErrorContains(t, infer.Generate(context.Background(), d, &infer.Sampler{}, nil, 1, nil), "nothing to feed")
}

// BenchmarkToken is what one more token costs near the end of a block.
func BenchmarkToken(b *testing.B) {
	for _, name := range []string{"mini", "small"} {
		b.Run(name, func(b *testing.B) {
			c, err := gpt2mini.Preset(name)
			require.NoError(b, err)
			d := decoder(b, model(b, c), nil)
			prompt := text(c.Block-1, c.Vocab)
			n := 0
			for b.Loop() {
				if n%8 == 0 { // keeps the text at about the same length
					d.Reset()
					_, err := d.Feed(slices.Clone(prompt[:c.Block-9])...)
					require.NoError(b, err)
				}
				_, err := d.Feed(prompt[n%len(prompt)])
				require.NoError(b, err)
				n++
			}
		})
	}
}
