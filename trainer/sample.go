package trainer

import (
	"context"
	"math"
	"math/rand/v2"
	"strings"
)

// sample generates text from the trained model, one token at a time, drawn
// from the model's distribution. It starts with a newline, or the text's first
// character where there is none.
func (r *run) sample(ctx context.Context) (string, error) {
	f, err := newForward(r, 1, true)
	if err != nil {
		return "", err
	}
	first, err := r.firstToken()
	if err != nil {
		return "", err
	}
	out := []int{first}
	tokens := make([]int, r.c.Block)
	rng := rand.New(rand.NewPCG(uint64(r.c.Seed), 0x5eed))
	for len(out) <= r.c.SampleTokens {
		// The model is causal: what follows the last token doesn't matter.
		n := copy(tokens, out[max(0, len(out)-r.c.Block):])
		if err := f.run(ctx, tokens, nil); err != nil {
			return "", err
		}
		vocab := f.model.Config.Vocab
		logits := f.model.Logits.Value().Data().([]float32)
		out = append(out, draw(rng, logits[(n-1)*vocab:n*vocab]))
	}
	ids := make([]int32, len(out))
	for i, id := range out {
		ids[i] = int32(id)
	}
	text, err := r.text.Decode(ids)
	return strings.TrimSpace(text), err
}

func (r *run) firstToken() (int, error) {
	if ids, err := r.text.Encode("\n"); err == nil {
		return int(ids[0]), nil
	}
	var first [1]int
	err := r.text.Train.Copy(first[:], 0)
	return first[0], err
}

// draw picks an index with the probabilities of the softmax of logits.
func draw(rng *rand.Rand, logits []float32) int {
	top := logits[0]
	for _, l := range logits {
		top = max(top, l)
	}
	var sum float64
	for _, l := range logits {
		sum += math.Exp(float64(l - top))
	}
	u := rng.Float64() * sum
	for i, l := range logits {
		if u -= math.Exp(float64(l - top)); u <= 0 {
			return i
		}
	}
	return len(logits) - 1
}
