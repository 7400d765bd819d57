package infer

import (
	"math"

	"github.com/tandem-go/tandem/internal/simd"
)

// attention replaces y by the attention of the new rows of qkv to everything up
// to each of them, and keeps their keys and values.
func (d *Decoder) attention(l *layer, rows int) {
	n, heads := d.c.DModel, d.c.Heads
	d.remember(l, rows)
	work := rows * (d.cached + rows) * n
	d.split(heads, work, func(t, from, to int) {
		for h := from; h < to; h++ {
			if d.cached == 0 && rows > 1 {
				shape := simd.AttentionShape{B: 1, T: rows, H: heads, D: n}
				d.k.Attention(d.ws[t], d.y[:rows*n], d.qkv[:rows*3*n], d.lse, shape, 0, h)
				continue
			}
			for r := range rows {
				d.attend(l, h, r, d.scores[t])
			}
		}
	})
}

// remember copies keys and values of the new rows into the cache.
func (d *Decoder) remember(l *layer, rows int) {
	n := d.c.DModel
	for r := range rows {
		key, value := d.qkv[r*3*n+n:][:n], d.qkv[r*3*n+2*n:][:n]
		at := d.cached + r
		copy(l.values[at*n:][:n], value)
		for f, v := range key {
			l.keys[f*d.c.Block+at] = v
		}
	}
}

// attend computes head h of one row: softmax(q·kᵀ/√size)·v. Keys lie feature by
// feature, so that scores of all positions grow by one feature at a time.
func (d *Decoder) attend(l *layer, h, row int, scores []float32) {
	n := d.c.DModel
	size := n / d.c.Heads
	seen := d.cached + row + 1
	scores = scores[:seen]
	clear(scores)
	scale := float32(1 / math.Sqrt(float64(size)))
	for i, q := range d.qkv[row*3*n+h*size:][:size] {
		d.k.Axpy(scores, l.keys[(h*size+i)*d.c.Block:][:seen], q*scale)
	}
	sum := d.k.ExpSum(scores, scores, d.k.Max(scores))
	y := d.y[row*n+h*size:][:size]
	clear(y)
	for at, p := range scores {
		d.k.Axpy(y, l.values[at*n+h*size:][:size], p/sum)
	}
}
