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
	// the last value repeats. Empty means DefaultCap of the parameters' bytes,
	// halved until there are MinBuckets of them, as there can be wherever a model
	// has as many tensors with elements and First leaves room.
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

// MinBuckets is how many buckets the default caps give at least: with few of
// them the last, which nothing hides, is a large part of the whole.
const MinBuckets = 8

// DefaultCap is the default cap in bytes for parameters of total bytes: a
// sixteenth of them, between 1 byte and 25 MiB. Above 400 MiB that is the
// 25 MiB of PyTorch's DDP. A bucket exceeds its cap by less than one tensor, so
// large tensors may make fewer than MinBuckets of it; the cap is then halved.
func DefaultCap(total int) int { return max(1, min(total/16, 25*mib)) }

// resolve fills in the defaults.
func (c Caps) resolve(params []Param, order []int) (Caps, error) {
	if c.First < 0 || c.Last < 0 {
		return c, fmt.Errorf("bucket: a cap must not be negative: first %d, last %d bytes", c.First, c.Last)
	}
	for i, n := range c.Cap {
		if n <= 0 {
			return c, fmt.Errorf("bucket: cap %d is %d bytes; it must be positive", i, n)
		}
	}
	if len(c.Cap) > 0 {
		return c.ends(), nil
	}
	total := 0
	for _, p := range params {
		total += p.Bytes()
	}
	for n := DefaultCap(total); ; n /= 2 {
		try := Caps{First: c.First, Cap: []int{n}, Last: c.Last}.ends()
		if n == 1 || len(cut(params, order, try)) >= MinBuckets {
			return try, nil
		}
	}
}

// ends fills in First and Last.
func (c Caps) ends() Caps {
	if c.First == 0 {
		c.First = min(mib, c.Cap[0])
	}
	if c.Last == 0 {
		c.Last = c.First
	}
	return c
}

// Resolve returns the caps that Assign would use for the same parameters and
// production order, defaults filled in.
func (c Caps) Resolve(params []Param, order []int) (Caps, error) {
	if err := validate(params, order); err != nil {
		return c, err
	}
	return c.resolve(params, order)
}

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
