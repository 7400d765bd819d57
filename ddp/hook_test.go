package ddp

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/ddp/hook"
	"github.com/tandem-go/tandem/models/gpt2mini"
	"github.com/tandem-go/tandem/optim"
)

// opticks is Newton's, from the Go installation, as character tokens.
func opticks(t *testing.T) (tokens []int, vocab int) {
	text, err := os.ReadFile(filepath.Join(runtime.GOROOT(), "src", "testdata", "Isaac.Newton-Opticks.txt"))
	if err != nil {
		t.Skipf("the Go installation has no text to learn: %v", err)
	}
	known := map[byte]int{}
	for _, c := range text {
		if _, ok := known[c]; !ok {
			known[c] = len(known)
		}
		tokens = append(tokens, known[c])
	}
	return tokens, len(known)
}

// learn trains a tiny GPT-2 on the text and returns the mean loss of the last
// ten steps, and the bytes that a step made a rank send.
func learn(t *testing.T, g group, steps int) (loss float64, bytes int) {
	tokens, vocab := opticks(t)
	final := make([]float64, g.ranks)
	params := make([][][]float32, g.ranks)
	g.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m, err := gpt2mini.New(gpt2mini.Config{Vocab: vocab, Block: 32, Seq: 32, Layers: 1, Heads: 2, DModel: 32, Batch: 4})
		if err = errors.Join(err, m.Init(1)); err != nil {
			return err
		}
		d, err := New(ctx, c, m.Loss, m.Params, o)
		if err != nil {
			return err
		}
		defer d.Close()
		x, y := make([]int, 128), make([]int, 128)
		for s := range steps {
			for b := range 4 {
				at := ((s*g.ranks+rank)*4 + b) * 7919 * 32 % (len(tokens) - 33)
				copy(x[32*b:32*(b+1)], tokens[at:])
				copy(y[32*b:32*(b+1)], tokens[at+1:])
			}
			if err := errors.Join(m.SetBatch(x, y), d.Step(ctx)); err != nil {
				return err
			}
			if s >= steps-10 {
				final[rank] += d.Stats().Loss / 10
			}
		}
		if err := d.Sync(ctx); err != nil {
			return err
		}
		params[rank] = snapshot(d.ValueGrads())
		if rank == 0 {
			bytes = d.Stats().WireBytes
		}
		return nil
	})
	for rank := range final {
		require.Equal(t, params[0], params[rank], "rank %d holds other parameters", rank)
		require.InDelta(t, final[0], final[rank], 0)
	}
	return final[0], bytes
}

// Without it a hook could save bytes by not learning: on real text the loss
// after 150 steps is within a stated distance of the one without compression,
// and so few bytes travel as promised.
func TestHooksLearnAsTheAllReduceDoes(t *testing.T) {
	const steps = 150
	o := Options{Optimizer: optim.AdamW{LR: 3e-3}, MaxNorm: 1, Caps: bucket.Caps{Cap: []int{16 << 10}}}
	start, _ := learn(t, group{ranks: 2, opts: o}, 10)
	want, bytes := learn(t, group{ranks: 2, opts: o}, steps)
	require.Less(t, want, start-0.5, "it learns at all")
	for name, c := range map[string]struct {
		hook  hook.Hook
		ring  bool
		apart float64 // at most, in loss
		bytes float64 // at most, of the all-reduce's
	}{
		"all-reduce":        {hook.AllReduce{}, false, 0.005, 1},
		"bf16":              {hook.BF16{}, true, 0.02, 0.5},
		"bf16, float32 sum": {hook.BF16{ErrorFeedback: true, Float32Sum: true}, true, 0.02, 0.51},
		"fp16":              {hook.FP16{ErrorFeedback: true}, false, 0.02, 0.5},
		"PowerSGD":          {hook.PowerSGD{Rank: 4, Start: 10}, true, 0.05, 0.2},
		"PowerSGD in bf16":  {hook.PowerSGD{Rank: 4, Start: 10, Wire: hook.BF16{ErrorFeedback: true}}, false, 0.1, 0.1},
		// What isn't sent waits for some steps, so it learns later.
		"top-k": {hook.TopK{Ratio: 0.1}, true, 0.5, 0.21},
	} {
		t.Run(name, func(t *testing.T) {
			o := o
			o.Hook = c.hook
			got, sent := learn(t, group{ranks: 2, ring: c.ring, opts: o}, steps)
			t.Logf("loss %.4f, %.4f without; %.1f %% of %d bytes", got, want, 100*float64(sent)/float64(bytes), bytes)
			require.InDelta(t, want, got, c.apart)
			require.LessOrEqual(t, float64(sent), c.bytes*float64(bytes))
		})
	}
}
