package simd

import "fmt"

// Gemm describes the product C(M,N) = [C +] A(M,K)·B(K,N) [+ bias]. Element
// (i,k) of A is A[i*RsA+k*CsA] and element (k,j) of B is B[k*RsB+j*CsB], so that
// a transpose costs no copy; element (i,j) of C is C[i*LdC+j]. Strides are not
// negative. C overlaps neither A nor B.
type Gemm struct {
	M, N, K    int
	A          []float32
	RsA, CsA   int
	B          []float32
	RsB, CsB   int
	C          []float32
	LdC        int
	Accumulate bool      // add to C; otherwise what C held is never read
	Bias       []float32 // N elements that are added to each row, or nil
}

// gemmArgs is what a micro-kernel gets. It multiplies Tiles tiles of rows, one
// below the other, by one panel of B. Strides count elements. The assembly
// knows the offsets (_gen/gemm.go); Tiles is counted down.
type gemmArgs struct {
	k, tiles   int
	a          []float32
	rsA, csA   int
	tileA      int // from one tile of A to the next
	b          []float32
	rsB        int
	c          []float32
	ldC        int
	bias       []float32
	accumulate int // 1 or 0
	mask       int // the columns of the last vector that exist, one bit each
}

// gemmTable holds the matrix micro-kernels of one instruction set.
type gemmTable struct {
	rows, cols int // of the largest tile
	narrow     int // columns of the narrow tiles, 0 without any
	masked     bool
	kernels    [2][]func(*gemmArgs) // wide and narrow; [i] is for i+1 rows
	copyRows   [2]func(dst, src *float32, n, stride int)
	copyA      func(dst, src *float32, n, stride int)
	transpose8 func(dst *float32, dstStride int, src *float32, srcStride, blocks int)
}

// Block sizes. A block of A of blockRows by blockDepth stays in the second-level
// cache (384 KiB) while the panels of B pass; a panel of B (at most 32 KiB) stays
// in the first while the tiles of A pass. See Goto and van de Geijn, «Anatomy of
// High-Performance Matrix Multiplication» (2008); since the panel is packed right
// before it is used, B needs no buffer of its own in the third level.
const (
	blockRows  = 384
	blockDepth = 256
)

// Gemm computes g on one thread. It panics if a slice is too short for its
// shape.
func (k *Kernels) Gemm(w *Workspace, g *Gemm) {
	g.check()
	if g.M == 0 || g.N == 0 {
		return
	}
	blocks := max(1, (g.K+blockDepth-1)/blockDepth)
	depth := (g.K + blocks - 1) / blocks
	run := gemmRun{gemmTable: &k.gemm, Gemm: *g, w: w}
	for i := 0; i < g.M; i += blockRows {
		run.i, run.rows = i, min(blockRows, g.M-i)
		for b := range blocks {
			run.p, run.depth = b*depth, min(depth, g.K-b*depth)
			run.block()
		}
	}
	w.args = gemmArgs{} // keeps no caller's memory alive
}

// check panics unless every element that the shape implies exists: the
// assembly checks no bounds.
func (g *Gemm) check() {
	if g.M < 0 || g.N < 0 || g.K < 0 || min(g.RsA, g.CsA, g.RsB, g.CsB, g.LdC) < 0 {
		panic(fmt.Sprintf("simd: gemm %d×%d×%d: negative size or stride", g.M, g.N, g.K))
	}
	need := func(what string, have, rows, rs, cols, cs int) {
		if rows > 0 && cols > 0 && (rows-1)*rs+(cols-1)*cs >= have {
			panic(fmt.Sprintf("simd: gemm %d×%d×%d: %s has %d elements, its shape needs %d",
				g.M, g.N, g.K, what, have, (rows-1)*rs+(cols-1)*cs+1))
		}
	}
	need("A", len(g.A), g.M, g.RsA, g.K, g.CsA)
	if g.M > 1 && g.LdC < g.N {
		panic(fmt.Sprintf("simd: gemm %d×%d×%d: rows of C overlap, they are %d apart", g.M, g.N, g.K, g.LdC))
	}
	need("B", len(g.B), g.K, g.RsB, g.N, g.CsB)
	need("C", len(g.C), g.M, g.LdC, g.N, 1)
	if g.Bias != nil {
		need("bias", len(g.Bias), 1, 0, g.N, 1)
	}
}

// gemmRun is one Gemm under way, at rows [i, i+rows) and the summands
// [p, p+depth).
type gemmRun struct {
	*gemmTable
	Gemm           // a copy: the caller's may live on its stack
	w              *Workspace
	i, rows        int
	p, depth       int
	split          [3]rowSplit
	aData          []float32 // the block of A, see prepareA
	aRs, aCs       int       // its strides; aCs tileByTile: packed
	j, cols, width int       // the panel: columns [j, j+cols), computed width at a time
	wide           int       // index of the kernels of that width
}

// block multiplies one block of A by all panels of B.
func (r *gemmRun) block() {
	r.split = splitRows(r.rows, r.gemmTable.rows)
	r.prepareA()
	for r.j = 0; r.j < r.N; r.j += r.gemmTable.cols {
		r.cols = min(r.gemmTable.cols, r.N-r.j)
		r.wide, r.width = 0, r.gemmTable.cols
		if r.cols <= r.narrow {
			r.wide, r.width = 1, r.narrow
		}
		r.panel()
	}
}

// panel multiplies the block of A by one panel of B.
func (r *gemmRun) panel() {
	a := &r.w.args
	a.k = r.depth
	a.mask = 1<<(r.cols-r.width+min(r.width, 16)) - 1
	if r.packsB() {
		r.packB()
		a.b, a.rsB = r.w.packB, r.width
	} else {
		a.b, a.rsB = r.B[min(len(r.B), r.p*r.RsB+r.j):], r.RsB
	}
	first := r.p == 0
	a.accumulate = 0
	if r.Accumulate || !first {
		a.accumulate = 1
	}
	a.bias = nil
	if r.Bias != nil && first {
		a.bias = r.Bias[r.j:]
	}
	a.c, a.ldC = r.C[r.i*r.LdC+r.j:], r.LdC
	if r.cols == r.width || r.masked {
		r.tiles()
		return
	}
	bias := a.bias
	accumulate := a.accumulate != 0
	a.bias, a.accumulate = nil, 0
	a.c, a.ldC = r.w.tail, r.width
	r.tiles()
	r.merge(bias, accumulate)
}

// merge moves the columns that exist from the scratch tiles to C.
func (r *gemmRun) merge(bias []float32, accumulate bool) {
	for i := range r.rows {
		from := r.w.tail[i*r.width:][:r.cols]
		to := r.C[(r.i+i)*r.LdC+r.j:][:r.cols]
		for j, v := range from {
			if bias != nil {
				v += bias[j]
			}
			if accumulate {
				v += to[j]
			}
			to[j] = v
		}
	}
}

// tiles runs the kernels down the rows of the block.
func (r *gemmRun) tiles() {
	a := &r.w.args
	c, ldC := a.c, a.ldC
	kernels := r.kernels[r.wide]
	for _, s := range r.split {
		if s.tiles == 0 {
			continue
		}
		a.tiles = s.tiles
		a.c = c[s.row*ldC:]
		if r.aCs == tileByTile {
			a.a = r.aData[s.row*r.depth:]
			a.rsA, a.csA, a.tileA = 1, s.rows, s.rows*r.depth
		} else {
			a.a = r.aData[min(len(r.aData), s.row*r.aRs):]
			a.rsA, a.csA, a.tileA = r.aRs, r.aCs, s.rows*r.aRs
		}
		kernels[s.rows-1](a)
	}
}

// rowSplit is a run of tiles of equal height.
type rowSplit struct{ row, rows, tiles int }

// splitRows cuts n rows into tiles of at most most rows. A last tile that would
// be too flat to keep the multipliers busy shares rows with the one above it.
// The split is made once a block; unused entries have no tiles.
func splitRows(n, most int) (s [3]rowSplit) {
	full, rest := n/most, n%most
	if 0 < rest && rest <= most/3 && full > 0 {
		full, rest = full-1, rest+most
	}
	s[0] = rowSplit{0, most, full}
	if rest > most {
		s[1] = rowSplit{full * most, (rest + 1) / 2, 1}
		rest /= 2
	}
	if rest > 0 {
		s[2] = rowSplit{n - rest, rest, 1}
	}
	return s
}
