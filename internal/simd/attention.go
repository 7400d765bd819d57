package simd

import (
	"fmt"
	"math"
)

// AttentionShape is the shape of causal self-attention: B sequences of T
// positions, D features split into H heads of D/H.
type AttentionShape struct{ B, T, H, D int }

// attentionBlock is the number of queries and of keys that are handled at once:
// two blocks of scores take 147 KB of the workspace, however long a sequence is.
// Rows of a block lie scoreStride apart; the padding is what the kernels in
// attentionTable may clear behind a row.
const (
	attentionBlock = 128
	scoreStride    = attentionBlock + 32
)

// attentionTable holds what attention does to blocks of scores between its
// products. Row i of a block has cols+i·grow scores; behind them each kernel
// puts zeros, at least a tile's width, within scoreStride.
type attentionTable struct {
	// softmaxRows sets max[i] to the greater of itself and scale·s, s to
	// exp(scale·s − max[i]) and sum[i] to the sum of these.
	softmaxRows func(s []float32, ld, rows, cols, grow int, scale float32, max, sum []float32)
	// gradRows sets s to exp(scale·s − lse[i]) and dp to scale·s·(dp − delta[i]).
	gradRows func(s, dp []float32, ld, rows, cols, grow int, scale float32, lse, delta []float32)
	// dotRows sets dst[i] to the product of rows i of a and b.
	dotRows func(dst, a, b []float32, ld, rows, n int)
	// scaleRows multiplies row i of y by f[i].
	scaleRows func(y []float32, ld, rows, n int, f []float32)
}

// attentionScratch is the part of a Workspace that attention uses.
type attentionScratch struct {
	scores, grads             []float32 // a block each
	max, newMax, sum, partial []float32 // a number for each query of a block
}

// attentionRun is one head of one sequence under way.
type attentionRun struct {
	*Kernels
	w     *Workspace
	T, D  int
	head  int // features of a head
	scale float32
}

// begin checks the shape and finds the head.
func (k *Kernels) begin(w *Workspace, a AttentionShape, b, h int, lens ...int) (r attentionRun, row, col int) {
	if a.B < 0 || a.T < 0 || a.H <= 0 || a.D <= 0 || a.D%a.H != 0 || b < 0 || b >= a.B || h < 0 || h >= a.H {
		panic(fmt.Sprintf("simd: attention: sequence %d, head %d of %+v", b, h, a))
	}
	n := a.B * a.T
	for i, want := range [...]int{n * a.D, 3 * n * a.D, n * a.H, n * a.D, 3 * n * a.D} {
		if i < len(lens) && lens[i] < want {
			panic(fmt.Sprintf("simd: attention: argument %d has %d elements, %+v needs %d", i, lens[i], a, want))
		}
	}
	head := a.D / a.H
	r = attentionRun{Kernels: k, w: w, T: a.T, D: a.D, head: head, scale: float32(1 / math.Sqrt(float64(head)))}
	return r, b * a.T, h * head
}

// Attention computes head h of sequence b of causal self-attention:
// y = softmax(q·kᵀ/√(D/H))·v over the keys up to each query. qkv is (B·T, 3D),
// a row holds q, k and v one after another, each split into heads; y is (B·T, D);
// lse (B·H·T) takes the log-sum-exp of each row of scaled scores, at
// (b·H+h)·T+t. Only the blocks on and below the diagonal are computed, with a
// running maximum: Dao et al., «FlashAttention» (2022). It panics if a slice is
// too short.
func (k *Kernels) Attention(w *Workspace, y, qkv, lse []float32, a AttentionShape, b, h int) {
	r, row, col := k.begin(w, a, b, h, len(y), len(qkv), len(lse))
	stats := lse[(b*a.H+h)*a.T:]
	for q0 := 0; q0 < r.T; q0 += attentionBlock {
		rows := min(attentionBlock, r.T-q0)
		out := y[(row+q0)*r.D+col:]
		q := qkv[(row+q0)*3*r.D+col:]
		fill(w.max[:rows], float32(math.Inf(-1)))
		for k0 := 0; k0 <= q0; k0 += attentionBlock {
			kv := qkv[(row+k0)*3*r.D+col+r.D:]
			r.forward(out, q, kv, rows, min(attentionBlock, r.T-k0), k0 == q0, k0 == 0)
		}
		sum := w.sum[:rows]
		k.vec.log(stats[q0:q0+rows], sum)
		k.vec.add(stats[q0:q0+rows], stats[q0:q0+rows], w.max[:rows])
		k.vec.inverse(sum, sum)
		k.attention.scaleRows(out, r.D, rows, r.head, sum)
	}
}

// forward adds one block of keys to rows of the output, which is not yet divided
// by the sum of the exponentials.
func (r *attentionRun) forward(y, q, kv []float32, rows, cols int, diagonal, first bool) {
	w, s := r.w, r.w.scores
	r.scores(s, q, 3*r.D, kv, rows, cols, diagonal)
	valid, grow, shape := cols, 0, full
	if diagonal {
		valid, grow, shape = 1, 1, lowerA
	}
	sum := w.sum[:rows]
	if first {
		r.attention.softmaxRows(s, scoreStride, rows, valid, grow, r.scale, w.max, w.sum)
	} else {
		old := w.newMax[:rows]
		copy(old, w.max)
		r.attention.softmaxRows(s, scoreStride, rows, valid, grow, r.scale, w.max, w.partial)
		r.vec.sub(old, old, w.max[:rows])
		r.vec.exp(old, old)
		r.vec.mul(sum, sum, old)
		r.vec.add(sum, sum, w.partial[:rows])
		r.attention.scaleRows(y, r.D, rows, r.head, old)
	}
	r.Gemm(w, &Gemm{M: rows, N: r.head, K: cols, A: s, RsA: scoreStride, CsA: 1,
		B: kv[r.D:], RsB: 3 * r.D, CsB: 1, C: y, LdC: r.D, Accumulate: !first, shape: shape})
}

// scores sets s = q·kᵀ. Rows of q lie rsQ apart, those of k 3D.
func (r *attentionRun) scores(s, q []float32, rsQ int, k []float32, rows, cols int, diagonal bool) {
	g := Gemm{M: rows, N: cols, K: r.head, A: q, RsA: rsQ, CsA: 1,
		B: k, RsB: 1, CsB: 3 * r.D, C: s, LdC: scoreStride}
	if diagonal {
		g.shape = lowerC
	}
	r.Gemm(r.w, &g)
}

// AttentionGrad computes the gradient of head h of sequence b: given qkv, what
// Attention made of it (y, lse) and the gradient dy (B·T, D), it overwrites the
// head's part of dqkv (B·T, 3D). Probabilities are computed again, block by
// block. It panics if a slice is too short.
func (k *Kernels) AttentionGrad(w *Workspace, dqkv, qkv, y, dy, lse []float32, a AttentionShape, b, h int) {
	r, row, col := k.begin(w, a, b, h, len(y), len(qkv), len(lse), len(dy), len(dqkv))
	stats := lse[(b*a.H+h)*a.T:]
	for k0 := 0; k0 < r.T; k0 += attentionBlock {
		kv := (row+k0)*3*r.D + col + r.D
		for q0 := k0; q0 < r.T; q0 += attentionBlock {
			rows := min(attentionBlock, r.T-q0)
			at := (row+q0)*r.D + col
			k.attention.dotRows(w.partial, dy[at:], y[at:], r.D, rows, r.head)
			q := (row+q0)*3*r.D + col
			r.backward(dqkv[q:], dqkv[kv:], qkv[q:], qkv[kv:], dy[at:], stats[q0:],
				rows, min(attentionBlock, r.T-k0), q0 == k0, k0 == 0)
		}
	}
}

// backward handles one block of queries and keys.
func (r *attentionRun) backward(dq, dkv, q, kv, dy, lse []float32, rows, cols int, diagonal, firstKeys bool) {
	w, p, ds := r.w, r.w.scores, r.w.grads
	r.scores(p, q, 3*r.D, kv, rows, cols, diagonal)
	r.scores(ds, dy, r.D, kv[r.D:], rows, cols, diagonal)
	valid, grow, lower, upper := cols, 0, full, full
	if diagonal {
		valid, grow, lower, upper = 1, 1, lowerA, upperA
	}
	r.attention.gradRows(p, ds, scoreStride, rows, valid, grow, r.scale, lse, w.partial)
	g := Gemm{M: cols, N: r.head, K: rows, RsA: 1, CsA: scoreStride, CsB: 1, LdC: 3 * r.D,
		Accumulate: !diagonal, shape: upper}
	g.A, g.B, g.RsB, g.C = p, dy, r.D, dkv[r.D:]
	r.Gemm(w, &g) // dv
	g.A, g.B, g.RsB, g.C = ds, q, 3*r.D, dkv
	r.Gemm(w, &g) // dk
	r.Gemm(w, &Gemm{M: rows, N: r.head, K: cols, A: ds, RsA: scoreStride, CsA: 1,
		B: kv, RsB: 3 * r.D, CsB: 1, C: dq, LdC: 3 * r.D, Accumulate: !firstKeys, shape: lower})
}

func fill(x []float32, v float32) {
	for i := range x {
		x[i] = v
	}
}
