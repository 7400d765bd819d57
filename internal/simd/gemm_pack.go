package simd

// Whether an operand is copied first depends on its strides. A tile reads a few
// rows of A side by side, or short pieces of a few hundred, if A is transposed;
// either is as fast as a copy until the pieces lie a page apart: then they share
// cache sets and each needs a page-table entry of its own.
const (
	packStride   = 1024 // elements: a page
	packColsFrom = 128  // of B, for the copy of A to pay
	packRowsFrom = 72   // of A, for the copy of a panel of B to pay; a third of it if B's rows are a page apart
	rowPad       = 16   // elements between copied rows, so that they don't share sets
)

// tileByTile marks the layout of packTiles.
const tileByTile = -1

// prepareA copies the block of A, if that pays, and tells where it is.
func (r *gemmRun) prepareA() {
	switch {
	case r.N < packColsFrom || max(r.RsA, r.CsA) < packStride || r.shape != full:
		r.aData, r.aRs, r.aCs = r.A[min(len(r.A), r.i*r.RsA+r.p*r.CsA):], r.RsA, r.CsA
	case r.CsA == 1:
		r.aData, r.aRs, r.aCs = r.w.packA, r.depth+rowPad, 1
		for i := range r.rows {
			copy(r.aData[i*r.aRs:][:r.depth], r.A[(r.i+i)*r.RsA+r.p:])
		}
	default:
		r.aData, r.aRs, r.aCs = r.w.packA, 1, tileByTile
		r.packTiles()
	}
}

// packTiles brings the block of A into tiles, k by k: rows of a tile are one
// element apart, columns as many as the tile has rows.
func (r *gemmRun) packTiles() {
	for _, s := range r.split {
		for t := range s.tiles {
			row := s.row + t*s.rows
			dst := r.w.packA[row*r.depth:][:s.rows*r.depth]
			src := r.A[(r.i+row)*r.RsA+r.p*r.CsA:]
			if r.RsA == 1 && s.rows == r.gemmTable.rows && r.copyA != nil {
				r.copyA(dst, src, r.depth, r.CsA)
				continue
			}
			packPanel(dst, s.rows, src, s.rows, r.depth, r.RsA, r.CsA)
		}
	}
}

// packsB tells whether a copy of the panel of B pays: always, if its rows are
// not contiguous or reach past the end of the matrix, else from so many tiles on
// that the copy is cheaper than what strides cost the caches.
func (r *gemmRun) packsB() bool {
	if r.depth == 0 {
		return false
	}
	return r.CsB != 1 || r.cols < r.width && !r.masked ||
		r.rows > packRowsFrom || r.RsB >= packStride && r.rows > packRowsFrom/3
}

// packB brings the panel of B into rows of width. Columns past the end become
// zero: their products are dropped, but stale values there could be slow ones.
func (r *gemmRun) packB() {
	dst := r.w.packB[:r.depth*r.width]
	src := r.B[r.p*r.RsB+r.j*r.CsB:]
	if r.cols < r.width && !r.masked {
		clear(dst)
	}
	switch {
	case r.CsB == 1 && r.cols == r.width && r.copyRows[r.wide] != nil:
		r.copyRows[r.wide](dst, src, r.depth, r.RsB)
	case r.RsB == 1 && r.transpose8 != nil:
		r.packColumns(dst, src)
	default:
		packPanel(dst, r.width, src, r.cols, r.depth, r.CsB, r.RsB)
	}
}

// packColumns packs a B whose columns are contiguous.
func (r *gemmRun) packColumns(dst, src []float32) {
	j, blocks := 0, r.depth/8
	for ; blocks > 0 && j+8 <= r.cols; j += 8 {
		r.transpose8(dst[j:], r.width, src[j*r.CsB:], r.CsB, blocks)
		if k := blocks * 8; k < r.depth {
			packPanel(dst[k*r.width+j:], r.width, src[j*r.CsB+k:], 8, r.depth-k, r.CsB, 1)
		}
	}
	if j < r.cols {
		packPanel(dst[j:], r.width, src[j*r.CsB:], r.cols-j, r.depth, r.CsB, 1)
	}
}

// packPanel sets dst[k*stride+j] = src[j*js+k*ks] for j < n and k < depth.
func packPanel(dst []float32, stride int, src []float32, n, depth, js, ks int) {
	if js == 1 {
		for k := range depth {
			copy(dst[k*stride:][:n], src[k*ks:])
		}
		return
	}
	for j := range n {
		from, to := src[j*js:], dst[j:]
		for k := range depth {
			to[k*stride] = from[k*ks]
		}
	}
}
