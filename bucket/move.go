package bucket

import (
	"fmt"
	"slices"
)

// Move rearranges an arena, the memory of all buckets one after another, from
// one layout of some parameters to another. All layouts of the same parameters
// have one size. Padding becomes zero.
func Move(arena []byte, from, to *Layout) error {
	if len(arena) != from.Bytes() || len(arena) != to.Bytes() || !slices.EqualFunc(from.Params, to.Params, Param.equal) {
		return fmt.Errorf("bucket: an arena of %d bytes cannot go from a layout of %d parameters in %d bytes to one of %d in %d",
			len(arena), len(from.Params), from.Bytes(), len(to.Params), to.Bytes())
	}
	old := slices.Clone(arena)
	clear(arena)
	for p, s := range to.Slots {
		copy(arena[to.offset(p):][:s.Bytes], old[from.offset(p):])
	}
	return nil
}

// offset is where parameter p lies in an arena.
func (l *Layout) offset(p int) int {
	n := l.Slots[p].Offset
	for _, b := range l.Buckets[:l.Slots[p].Bucket] {
		n += b.Bytes
	}
	return n
}
