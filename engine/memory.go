package engine

import (
	"cmp"
	"math"
	"slices"
)

// align is the granule of every place: a cache line, and the widest vector.
const align = 64

// forever is the last use of what outlives the run.
const forever = math.MaxInt

func aligned(n int) int { return (n + align - 1) &^ (align - 1) }

// item is a piece of an arena that is in use from step first to step last, both
// included. Step −1 is before the first.
type item struct {
	size        int // bytes, aligned
	first, last int
	off         int
}

func (a *item) meets(b *item) bool { return a.first <= b.last && b.first <= a.last }

// layout gives every item an offset such that no two that are in use at one
// step share a byte, and returns the size of the arena. Largest first, each into
// the smallest gap that holds it (greedy by size: Pisarchyk and Lee, "Efficient
// memory management for deep neural net inference", 2020).
func layout(items []*item) int {
	order := slices.Clone(items)
	slices.SortStableFunc(order, func(a, b *item) int {
		return cmp.Or(cmp.Compare(b.size, a.size), cmp.Compare(a.first, b.first))
	})
	var placed []*item // ascending offset
	total := 0
	for _, it := range order {
		it.off = bestGap(placed, it)
		total = max(total, it.off+it.size)
		at, _ := slices.BinarySearchFunc(placed, it.off, func(p *item, off int) int { return cmp.Compare(p.off, off) })
		placed = slices.Insert(placed, at, it)
	}
	return total
}

// bestGap is the offset of the smallest gap between the placed items that are in
// use together with it, or the end of the last of them.
func bestGap(placed []*item, it *item) int {
	end, best, bestSize := 0, -1, math.MaxInt
	for _, p := range placed {
		if !p.meets(it) {
			continue
		}
		if gap := p.off - end; gap >= it.size && gap < bestSize {
			best, bestSize = end, gap
		}
		end = max(end, p.off+p.size)
	}
	if best >= 0 {
		return best
	}
	return end
}
