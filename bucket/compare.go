package bucket

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
)

// Hash identifies the layout: names, shapes, types, buckets and offsets.
func (l *Layout) Hash() [sha256.Size]byte { return sha256.Sum256(l.Encode()) }

// Encode is the layout as JSON, for a rank that has to find out where another's
// differs from its own.
func (l *Layout) Encode() []byte {
	b, err := json.Marshal(l)
	if err != nil { // strings, integers and slices of them always marshal
		panic(fmt.Sprintf("bucket: cannot encode a layout: %v", err))
	}
	return b
}

// Decode is the reverse of Encode.
func Decode(b []byte) (*Layout, error) {
	l := new(Layout)
	if err := json.Unmarshal(b, l); err != nil {
		return nil, fmt.Errorf("bucket: cannot decode a layout: %w", err)
	}
	return l, nil
}

// Diff says where layouts a and b first differ, by the parameter's name and in
// the order of the parameters; "" when they are equal.
func Diff(a, b *Layout) string {
	for i := range min(len(a.Params), len(b.Params)) {
		p, q := a.Params[i], b.Params[i]
		if !p.equal(q) {
			return fmt.Sprintf("parameter %d is %v, not %v", i, p, q)
		}
	}
	if len(a.Params) != len(b.Params) {
		longer, word := a.Params, "more than"
		if len(b.Params) > len(a.Params) {
			longer, word = b.Params, "fewer than"
		}
		i := min(len(a.Params), len(b.Params))
		return fmt.Sprintf("%d parameters, %s %d: the first extra one is %v", len(a.Params), word, len(b.Params), longer[i])
	}
	for i := range min(len(a.Slots), len(b.Slots)) {
		if s, t := a.Slots[i], b.Slots[i]; s != t {
			return fmt.Sprintf("parameter %d %q lies in bucket %d at offset %d, not in bucket %d at offset %d",
				i, a.Params[i].Name, s.Bucket, s.Offset, t.Bucket, t.Offset)
		}
	}
	if a.Hash() != b.Hash() {
		return fmt.Sprintf("%d buckets, not %d, or another order within one", len(a.Buckets), len(b.Buckets))
	}
	return ""
}

func (p Param) String() string { return fmt.Sprintf("%q %v%v", p.Name, p.Type, p.Shape) }
