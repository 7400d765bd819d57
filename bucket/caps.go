package bucket

import (
	"errors"
	"fmt"
	"slices"
)

const mib = 1 << 20

// Caps bounds the size of buckets. The zero value means the defaults.
type Caps struct {
	// First is the cap of the first bucket of each type in bytes, small so that
	// communication starts early. 0 means 1 MiB, or Cap[0] where that is less.
	First int
	// Cap holds the caps of the second, third, … bucket of each type in bytes;
	// the last value repeats. Empty means DefaultCap of the parameters' bytes.
	Cap []int
	// Last bounds the last bucket in completion order in bytes: no computation
	// is left for it to hide behind. Where that bucket is larger, as many of its
	// last gradients as fit, and at least one, become a bucket of their own.
	// 0 means the same as First; a value above the model's size never cuts.
	Last int
}

// One is the caps that put every gradient of a type into one bucket.
func One() Caps {
	const all = int(^uint(0) >> 1)
	return Caps{First: all, Cap: []int{all}, Last: all}
}

// Each is the caps that give every gradient a bucket of its own.
func Each() Caps { return Caps{First: 1, Cap: []int{1}, Last: 1} }

// DefaultCap is the default cap in bytes for parameters of total bytes: a
// sixteenth of them, between 1 byte and 25 MiB. A bucket exceeds its cap by
// less than one tensor, so a model whose tensors are each smaller than a
// sixteenth of it has at least 8 buckets, however small it is; above 400 MiB
// the cap is the 25 MiB that PyTorch's DDP uses.
func DefaultCap(total int) int { return max(1, min(total/16, 25*mib)) }

// resolve fills in the defaults.
func (c Caps) resolve(params []Param) (Caps, error) {
	if c.First < 0 || c.Last < 0 {
		return c, fmt.Errorf("bucket: a cap must not be negative: first %d, last %d bytes", c.First, c.Last)
	}
	for i, n := range c.Cap {
		if n <= 0 {
			return c, fmt.Errorf("bucket: cap %d is %d bytes; it must be positive", i, n)
		}
	}
	if len(c.Cap) == 0 {
		total := 0
		for _, p := range params {
			total += p.Bytes()
		}
		c.Cap = []int{DefaultCap(total)}
	}
	if c.First == 0 {
		c.First = min(mib, c.Cap[0])
	}
	if c.Last == 0 {
		c.Last = c.First
	}
	return c, nil
}

// Resolve returns the caps that Assign would use for params, defaults filled in.
func (c Caps) Resolve(params []Param) (Caps, error) { return c.resolve(params) }

// at is the cap of bucket i of a type.
func (c Caps) at(i int) int {
	if i == 0 {
		return c.First
	}
	return c.Cap[min(i-1, len(c.Cap)-1)]
}

// MiB converts caps given in MiB, as on a command line, to bytes. A value that
// is positive but less than a byte becomes one byte.
func MiB(values []float64) ([]int, error) {
	if slices.ContainsFunc(values, func(v float64) bool { return !(v > 0 && v < 1<<40) }) {
		return nil, errors.New("bucket: caps in MiB must be positive numbers")
	}
	bytes := make([]int, len(values))
	for i, v := range values {
		bytes[i] = max(1, int(v*mib))
	}
	return bytes, nil
}
