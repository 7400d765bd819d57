// Package bucket decides which gradients travel together and where each one
// lies. It is pure arithmetic: the same parameters, production order and caps
// give the same Layout in every process, so ranks need only compare a hash.
//
// A collective has a fixed cost, so gradients travel in groups; the first group
// should be complete early, so groups are small at first; and the last group
// has no computation left to hide behind, so it should be small too.
package bucket

import (
	"fmt"
	"slices"

	"github.com/tandem-go/tandem/dtype"
)

// Align is the alignment of every slot and bucket in bytes: a cache line, and
// the widest vector register.
const Align = 64

// Param describes one parameter and so its gradient.
type Param struct {
	Name  string
	Shape []int
	Type  dtype.Type
}

// Elems is the number of elements; a scalar (nil Shape) has one.
func (p Param) Elems() int {
	n := 1
	for _, d := range p.Shape {
		n *= d
	}
	return n
}

// Bytes is the size of the parameter without padding.
func (p Param) Bytes() int { return p.Elems() * p.Type.Size() }

func (p Param) equal(q Param) bool {
	return p.Name == q.Name && p.Type == q.Type && slices.Equal(p.Shape, q.Shape)
}

// Bucket is a group of gradients of one type that are reduced together.
type Bucket struct {
	// Params are indices of parameters, in production order.
	Params []int
	// Bytes is the size with padding, a multiple of Align.
	Bytes int
	Type  dtype.Type
}

// Slot is where one parameter lies: Bytes bytes at Offset of bucket Bucket.
type Slot struct {
	Bucket, Offset, Bytes int
}

// Layout is the result of Assign. Buckets are in completion order, which is the
// order in which they are reduced; Slots are in parameter order. What lies
// between two slots is padding and stays zero.
type Layout struct {
	Params  []Param
	Buckets []Bucket
	Slots   []Slot
}

// Bytes is the size of all buckets together, which is that of an arena that
// holds them one after another.
func (l *Layout) Bytes() int {
	n := 0
	for _, b := range l.Buckets {
		n += b.Bytes
	}
	return n
}

// Assign lays out the gradients of params. order lists the indices of params in
// the order in which their gradients become final.
//
// Each type has its own open bucket. Gradients join the open bucket of their
// type in production order; a bucket closes when the bytes in it reach its cap,
// so it may exceed the cap by less than its last tensor, and no tensor is ever
// split. The rule is that of PyTorch's compute_bucket_assignment_by_size. The
// last bucket in completion order is then cut to Caps.Last (see there).
func Assign(params []Param, order []int, caps Caps) (*Layout, error) {
	if err := validate(params, order); err != nil {
		return nil, err
	}
	caps, err := caps.resolve(params, order)
	if err != nil {
		return nil, err
	}
	return place(params, cut(params, order, caps)), nil
}

// cut makes the buckets, in completion order.
func cut(params []Param, order []int, caps Caps) [][]int {
	groups := group(params, order, caps)
	position := make([]int, len(params))
	for i, p := range order {
		position[p] = i
	}
	complete := func(g []int) int { return position[g[len(g)-1]] }
	byCompletion := func(a, b []int) int { return complete(a) - complete(b) }
	slices.SortFunc(groups, byCompletion)
	if k := len(groups) - 1; k >= 0 {
		if cut := tail(params, groups[k], caps.Last); cut > 0 {
			groups = append(groups, groups[k][cut:])
			groups[k] = groups[k][:cut]
			slices.SortFunc(groups, byCompletion)
		}
	}
	return groups
}

func validate(params []Param, order []int) error {
	for i, p := range params {
		if !p.Type.Valid() {
			return fmt.Errorf("bucket: parameter %d %q has no valid type: %v", i, p.Name, p.Type)
		}
		for _, d := range p.Shape {
			if d < 0 {
				return fmt.Errorf("bucket: parameter %d %q has a negative dimension: %v", i, p.Name, p.Shape)
			}
		}
	}
	if len(order) != len(params) {
		return fmt.Errorf("bucket: the production order has %d entries for %d parameters", len(order), len(params))
	}
	seen := make([]bool, len(params))
	for i, p := range order {
		if p < 0 || p >= len(params) || seen[p] {
			return fmt.Errorf("bucket: the production order is not a permutation: entry %d is %d", i, p)
		}
		seen[p] = true
	}
	return nil
}

// group cuts the production order into buckets, those that a cap closed first.
func group(params []Param, order []int, caps Caps) [][]int {
	type open struct {
		params []int
		bytes  int
		closed int // buckets of this type that are complete
	}
	var groups [][]int
	var opens [dtype.Uint8 + 1]open // indexed by type
	for _, p := range order {
		o := &opens[params[p].Type]
		o.params = append(o.params, p)
		o.bytes += params[p].Bytes()
		if o.bytes >= caps.at(o.closed) {
			groups = append(groups, o.params)
			*o = open{closed: o.closed + 1}
		}
	}
	for _, o := range opens {
		if len(o.params) > 0 {
			groups = append(groups, o.params)
		}
	}
	return groups
}

// tail is the index from which the gradients of g, the last bucket, fit into
// last bytes; at least one remains. 0 means that no cut is needed.
func tail(params []Param, g []int, last int) int {
	cut, bytes := len(g)-1, params[g[len(g)-1]].Bytes()
	for cut > 0 && bytes+params[g[cut-1]].Bytes() <= last {
		cut--
		bytes += params[g[cut]].Bytes()
	}
	return cut
}

func place(params []Param, groups [][]int) *Layout {
	l := &Layout{
		Params:  slices.Clone(params),
		Buckets: make([]Bucket, len(groups)),
		Slots:   make([]Slot, len(params)),
	}
	for k, g := range groups {
		offset := 0
		for _, p := range g {
			l.Slots[p] = Slot{Bucket: k, Offset: offset, Bytes: params[p].Bytes()}
			offset = alignUp(offset + params[p].Bytes())
		}
		l.Buckets[k] = Bucket{Params: g, Bytes: offset, Type: params[g[0]].Type}
	}
	return l
}

func alignUp(n int) int { return (n + Align - 1) / Align * Align }
