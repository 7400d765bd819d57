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
	shape      triangle
}

// triangle says which part of a square matrix matters, to halve the work of
// causal attention. M is at most blockDepth, so that it is one block.
type triangle uint8

const (
	full   triangle = iota
	lowerA          // A[i,k] is zero for k > i; M = K
	upperA          // A[i,k] is zero for k < i; M = K
	lowerC          // C[i,j] is wanted for j ≤ i only, the rest may be anything; M = N
)

// gemmArgs is what a micro-kernel gets. It multiplies Tiles tiles of rows, one
// below the other, by one panel of B. Strides count elements. The assembly
// knows the offsets (_gen/gemm.go), counts tiles down and moves k and offB on.
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
	tileB      int // from one tile's first row of B to the next one's
	tileK      int // added to k after each tile
	offB       int // bytes from b to the tile's first row; b itself must stay a valid pointer
}

// gemmTable holds the matrix micro-kernels of one instruction set.
type gemmTable struct {
	rows, cols int // of the largest tile
	narrow     int // columns of the narrow tiles, 0 without any
	masked     bool
	kernels    [2][]func(*gemmArgs) // wide and narrow; [i] is for i+1 rows
	copyRows   [2]func(dst, src []float32, n, stride int)
	copyA      func(dst, src []float32, n, stride int)
	transpose8 func(dst []float32, dstStride int, src []float32, srcStride, blocks int)
}

// Block sizes. A block of A of blockRows by blockDepth stays in the second-level
// cache (512 KiB) while the panels of B pass; a panel of B (at most 32 KiB) stays
// in the first while the tiles of A pass. See Goto and van de Geijn, «Anatomy of
// High-Performance Matrix Multiplication» (2008); since the panel is packed right
// before it is used, B needs no buffer of its own in the third level.
const (
	blockRows  = 512
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
	top            int       // the first row of the block that the panel needs
	wide           int       // index of the kernels of that width
}

// block multiplies one block of A by all panels of B.
func (r *gemmRun) block() {
	r.split = splitRows(r.rows, r.gemmTable.rows)
	r.top = 0
	r.prepareA()
	for r.j = 0; r.j < r.N; r.j += r.gemmTable.cols {
		r.cols = min(r.gemmTable.cols, r.N-r.j)
		r.wide, r.width = 0, r.gemmTable.cols
		if r.cols <= r.narrow {
			r.wide, r.width = 1, r.narrow
		}
		if r.shape == lowerC {
			r.top = min(r.rows, max(0, r.j-r.i))
			r.split = splitRows(r.rows-r.top, r.gemmTable.rows)
		}
		r.panel()
	}
}

// panel multiplies the block of A by one panel of B.
func (r *gemmRun) panel() {
	a := &r.w.args
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
	c := r.C[(r.i+r.top)*r.LdC+r.j:]
	if r.cols == r.width || r.masked {
		r.tiles(c, r.LdC)
		return
	}
	bias, accumulate := a.bias, a.accumulate != 0
	a.bias, a.accumulate = nil, 0
	r.tiles(r.w.tail, r.width)
	r.merge(c, bias, accumulate)
}

// merge moves the columns that exist from the scratch tiles to C.
func (r *gemmRun) merge(c, bias []float32, accumulate bool) {
	for i := range r.rows - r.top {
		from := r.w.tail[i*r.width:][:r.cols]
		to := c[i*r.LdC:][:r.cols]
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

// tiles runs the kernels down the rows of the block, from top on.
func (r *gemmRun) tiles(c []float32, ldC int) {
	a := &r.w.args
	b := a.b
	for _, s := range r.split {
		if s.tiles == 0 {
			continue
		}
		a.tiles, a.k, a.tileK, a.tileB, a.offB = s.tiles, r.depth, 0, 0, 0
		a.b, a.c, a.ldC = b, c[s.row*ldC:], ldC
		row := r.top + s.row
		if r.aCs == tileByTile {
			a.a = r.aData[row*r.depth:]
			a.rsA, a.csA, a.tileA = 1, s.rows, s.rows*r.depth
		} else {
			a.a = r.aData[min(len(r.aData), row*r.aRs):]
			a.rsA, a.csA, a.tileA = r.aRs, r.aCs, s.rows*r.aRs
		}
		switch r.shape {
		case lowerA: // a tile ends at its last row's diagonal
			a.k, a.tileK = row+s.rows, s.rows
		case upperA: // a tile begins at its first row's diagonal
			a.k, a.tileK = r.depth-row, -s.rows
			a.a, a.tileA = a.a[row*a.csA:], a.tileA+s.rows*a.csA
			a.b, a.tileB = b[row*a.rsB:], s.rows*a.rsB
		}
		r.kernels[r.wide][s.rows-1](a)
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
