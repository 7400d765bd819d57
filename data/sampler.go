package data

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
)

// Sampler draws training windows of Block tokens, with replacement, from Tokens.
type Sampler struct {
	Tokens Seq
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
	hi, _ := bits.Mul64(g.Uint64(), uint64(s.Tokens.Len()-s.Block))
	return int(hi)
}

// Fill writes samples first … first+n-1 of a step: n·Block tokens and, one
// position on, their targets. It fails where Tokens can't be read or hold what
// is not in the vocabulary.
func (s *Sampler) Fill(tokens, targets []int, step, first int) error {
	if err := wholeWindows(tokens, targets, s.Block); err != nil {
		return err
	}
	for i := range len(tokens) / s.Block {
		a, b := i*s.Block, (i+1)*s.Block
		if err := copyWindow(tokens[a:b], targets[a:b], s.Tokens, s.Start(step, first+i)); err != nil {
			return fmt.Errorf("sample %d of step %d: %w", first+i, step, err)
		}
	}
	return nil
}

// Windows is the number of non-overlapping windows of a part, as evaluation
// takes them: fixed, all of them, once.
func Windows(part Seq, block int) int { return max(0, (part.Len()-1)/block) }

// FillWindows writes windows first … of the fixed division, those before end,
// and pads with target −1 (ignored by the loss) behind the last. It returns how
// many windows were real.
func FillWindows(tokens, targets []int, part Seq, block, first, end int) (int, error) {
	if err := wholeWindows(tokens, targets, block); err != nil {
		return 0, err
	}
	end = min(end, Windows(part, block))
	got := 0
	for i := range len(tokens) / block {
		x, y := tokens[i*block:(i+1)*block], targets[i*block:(i+1)*block]
		if first+i < end {
			if err := copyWindow(x, y, part, (first+i)*block); err != nil {
				return got, fmt.Errorf("window %d: %w", first+i, err)
			}
			got++
			continue
		}
		for j := range x {
			x[j], y[j] = 0, -1
		}
	}
	return got, nil
}

func wholeWindows(tokens, targets []int, block int) error {
	if len(tokens) != len(targets) || len(tokens)%block != 0 {
		return fmt.Errorf("data: %d tokens and %d targets are not whole windows of %d", len(tokens), len(targets), block)
	}
	return nil
}
