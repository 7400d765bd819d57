package infer

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
)

// Sampler draws tokens from logits. Its zero value takes the likeliest one.
type Sampler struct {
	// Temperature divides the logits: below 1 likely tokens become likelier.
	// 0 takes the likeliest token, the first of several.
	Temperature float64
	// TopK is how many of the likeliest tokens may be drawn. 0 means all.
	TopK int
	// Seed makes the draws.
	Seed int64

	rng *rand.Rand
	top []int // of the likeliest tokens, descending
}

// Validate names the bound that a field breaks.
func (s *Sampler) Validate() error {
	if !(s.Temperature >= 0) || math.IsInf(s.Temperature, 0) {
		return fmt.Errorf("temperature %g: must be a number that is not negative", s.Temperature)
	}
	if s.TopK < 0 {
		return fmt.Errorf("top-k %d: must not be negative; 0 allows every token", s.TopK)
	}
	return nil
}

// Draw picks a token with the probabilities of softmax(logits/Temperature) over
// the TopK likeliest.
func (s *Sampler) Draw(logits []float32) int32 {
	if s.rng == nil {
		s.rng = rand.New(rand.NewPCG(uint64(s.Seed), 0x5eed))
	}
	k := len(logits)
	if s.TopK > 0 {
		k = min(k, s.TopK)
	}
	if s.Temperature == 0 {
		k = 1
	}
	if k == len(logits) {
		return int32(s.draw(k, func(i int) int { return i }, logits))
	}
	s.likeliest(logits, k)
	return int32(s.draw(k, func(i int) int { return s.top[i] }, logits))
}

// draw picks one of n candidates.
func (s *Sampler) draw(n int, candidate func(int) int, logits []float32) int {
	if n == 1 {
		return candidate(0)
	}
	top := float32(math.Inf(-1))
	for i := range n {
		top = max(top, logits[candidate(i)])
	}
	weight := func(i int) float64 { return math.Exp(float64(logits[candidate(i)]-top) / s.Temperature) }
	var sum float64
	for i := range n {
		sum += weight(i)
	}
	u := s.rng.Float64() * sum
	for i := range n {
		if u -= weight(i); u <= 0 {
			return candidate(i)
		}
	}
	return candidate(n - 1)
}

// likeliest puts the k greatest logits' indices into top, equal ones in order.
func (s *Sampler) likeliest(logits []float32, k int) {
	s.top = s.top[:0]
	for i, l := range logits {
		if len(s.top) == k && l <= logits[s.top[k-1]] {
			continue
		}
		if len(s.top) < k {
			s.top = append(s.top, i)
		}
		at := len(s.top) - 1
		for ; at > 0 && l > logits[s.top[at-1]]; at-- {
			s.top[at] = s.top[at-1]
		}
		s.top[at] = i
	}
}

// Generate feeds prompt to d, then n times draws a token, hands it to emit and
// feeds it in turn. It stops when ctx ends or emit fails.
func Generate(ctx context.Context, d *Decoder, s *Sampler, prompt []int32, n int, emit func(token int32) error) error {
	if err := s.Validate(); err != nil {
		return fmt.Errorf("infer: %w", err)
	}
	logits, err := d.Feed(prompt...)
	for i := 0; err == nil && i < n; i++ {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		token := s.Draw(logits)
		if err = emit(token); err == nil && i+1 < n {
			logits, err = d.Feed(token)
		}
	}
	return err
}
