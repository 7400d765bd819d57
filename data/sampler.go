package data

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
)

// Sampler draws training windows of Block tokens, with replacement, from Tokens.
type Sampler struct {
	Tokens []int32
	Block  int
	Seed   int64
}

// Start is where the window of sample i of a step begins: a pure function of
// (Seed, step, i), 0 ≤ i < 2³² and 0 ≤ step < 2³², uniform over all windows that have a
// target for each token (Lemire's multiplication instead of a modulus).
func (s *Sampler) Start(step, i int) int {
	var g rand.PCG
	g.Seed(uint64(s.Seed), uint64(step)<<32|uint64(uint32(i)))
	g.Uint64() // the first output still resembles the seed's neighbours
	hi, _ := bits.Mul64(g.Uint64(), uint64(len(s.Tokens)-s.Block))
	return int(hi)
}

// Fill writes samples first … first+n-1 of a step: n·Block tokens and, one
// position on, their targets.
func (s *Sampler) Fill(tokens, targets []int, step, first int) {
	n := len(tokens) / s.Block
	for i := range n {
		at := s.Start(step, first+i)
		copyWindow(tokens[i*s.Block:(i+1)*s.Block], targets[i*s.Block:(i+1)*s.Block], s.Tokens[at:])
	}
}

// Windows is the number of non-overlapping windows of a part, as evaluation
// takes them: fixed, all of them, once.
func Windows(tokens []int32, block int) int { return max(0, (len(tokens)-1)/block) }

// FillWindows writes windows first … of the fixed division, and pads with
// target −1 (ignored by the loss) behind the last. It returns how many windows
// were real.
func FillWindows(tokens, targets []int, part []int32, block, first int) (int, error) {
	if len(tokens) != len(targets) || len(tokens)%block != 0 {
		return 0, fmt.Errorf("data: %d tokens and %d targets are not whole windows of %d", len(tokens), len(targets), block)
	}
	total, got := Windows(part, block), 0
	for i := range len(tokens) / block {
		x, y := tokens[i*block:(i+1)*block], targets[i*block:(i+1)*block]
		if first+i < total {
			copyWindow(x, y, part[(first+i)*block:])
			got++
			continue
		}
		for j := range x {
			x[j], y[j] = 0, -1
		}
	}
	return got, nil
}

func copyWindow(x, y []int, from []int32) {
	for j := range x {
		x[j], y[j] = int(from[j]), int(from[j+1])
	}
}
