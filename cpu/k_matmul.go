package cpu

import (
	"fmt"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/internal/simd"
)

// Shares of a product are multiples of these: they are multiples of the tiles
// of every instruction set.
const (
	tileRows = 24
	tileCols = 32
)

// balancedSide is how many rows or columns a share has if it isn't the only one
// of its thread.
const balancedSide = 192

// smallProduct is the number of multiplications below which a product isn't
// worth waking another thread: some two microseconds of one.
const smallProduct = 1 << 17

// matmulProgram is MatMul and BatchedMatMul: count products that follow one
// another in memory, each cut into shares of rows or of columns.
type matmulProgram struct {
	simd     *simd.Kernels
	count    int
	g        simd.Gemm // of one product; A, B, C and bias are set by run
	byCols   bool
	share    int // rows or columns of a share
	shares   int // of one product
	a, b, c  []float32
	perGemm  []simd.Gemm // one for each thread
	withBias bool
	ws       []*simd.Workspace
}

func compileMatMul(d *Device, op device.Op) (program, error) {
	m, err := newMatMul(d, op, 1, op.In[0].Shape, op.In[1].Shape, op.Out[0].Shape)
	if err != nil {
		return nil, err
	}
	if m.withBias = op.Attr.Bias; m.withBias != (len(op.In) == 3) {
		return nil, fmt.Errorf("%d inputs with Attr.Bias %t", len(op.In), op.Attr.Bias)
	}
	if m.withBias {
		if err := elements("bias", op.In[2], m.g.N); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func compileBatchedMatMul(d *Device, op device.Op) (program, error) {
	a, b, c := op.In[0].Shape, op.In[1].Shape, op.Out[0].Shape
	if len(a) != 3 || len(b) != 3 || len(c) != 3 || a[0] != b[0] || a[0] != c[0] {
		return nil, fmt.Errorf("shapes %v and %v don't give %v", a, b, c)
	}
	if op.Attr.Bias {
		return nil, fmt.Errorf("no bias: %w", device.ErrUnsupported)
	}
	return newMatMul(d, op, a[0], a[1:], b[1:], c[1:])
}

func newMatMul(d *Device, op device.Op, count int, a, b, c []int) (*matmulProgram, error) {
	if len(a) != 2 || len(b) != 2 || len(c) != 2 {
		return nil, fmt.Errorf("shapes %v and %v don't give %v: want two dimensions each", a, b, c)
	}
	g := simd.Gemm{M: a[0], K: a[1], N: b[1], RsA: a[1], CsA: 1, RsB: b[1], CsB: 1, LdC: c[1]}
	inner := b[0]
	if op.Attr.TransA {
		g.M, g.K, g.RsA, g.CsA = a[1], a[0], 1, a[1]
	}
	if op.Attr.TransB {
		g.N, inner, g.RsB, g.CsB = b[0], b[1], 1, b[1]
	}
	if g.K != inner || c[0] != g.M || c[1] != g.N {
		return nil, fmt.Errorf("shapes %v and %v (TransA %t, TransB %t) don't give %v",
			a, b, op.Attr.TransA, op.Attr.TransB, c)
	}
	g.Accumulate = op.Attr.Accumulate
	m := &matmulProgram{simd: d.simd, count: count, g: g, perGemm: make([]simd.Gemm, d.opts.Threads), ws: d.pool.ws}
	m.divide(d.opts.Threads)
	return m, nil
}

// divide decides on the shares: along the longer side, at least one for each
// thread. More of them let the others make up for a thread that the system has
// set aside, but every share packs the other factor again, so small ones cost.
func (m *matmulProgram) divide(threads int) {
	g := &m.g
	m.byCols = g.N > g.M
	side, tile := g.M, tileRows
	if m.byCols {
		side, tile = g.N, tileCols
	}
	want := 1
	if threads > 1 && g.M*g.N*g.K >= smallProduct {
		want = pieces(min(max(threads, m.count*side/balancedSide), 4*threads), max(1, m.count))
	}
	m.share = max(1, pieces(pieces(side, want), tile)) * tile
	m.shares = max(1, pieces(side, m.share))
}

func (m *matmulProgram) run(p *pool, args [][]byte) error {
	m.a, m.b = view[float32](args[0]), view[float32](args[1])
	if m.withBias {
		m.g.Bias = view[float32](args[2])
	}
	m.c = view[float32](args[len(args)-1])
	n := m.count * m.shares
	if m.g.M*m.g.N*m.g.K*m.count < smallProduct {
		for i := range n {
			m.part(0, i)
		}
		return nil
	}
	p.run(n, m)
	return nil
}

func (m *matmulProgram) part(t, i int) {
	g := &m.perGemm[t]
	*g = m.g
	n, s := i/m.shares, i%m.shares
	g.A = m.a[n*g.M*g.K:][:g.M*g.K]
	g.B = m.b[n*g.K*g.N:][:g.K*g.N]
	g.C = m.c[n*g.M*g.N:][:g.M*g.N]
	if lo := s * m.share; m.byCols {
		g.B, g.C = g.B[min(len(g.B), lo*g.CsB):], g.C[lo:]
		if g.Bias != nil {
			g.Bias = g.Bias[lo:]
		}
		g.N = min(m.share, g.N-lo)
		if g.Bias != nil {
			g.Bias = g.Bias[:g.N]
		}
	} else {
		g.A, g.C = g.A[min(len(g.A), lo*g.RsA):], g.C[lo*g.LdC:]
		g.M = min(m.share, g.M-lo)
	}
	m.simd.Gemm(m.ws[t], g)
}

// colSumProgram is ColSum. Threads take columns, so every sum is over the rows
// in order.
type colSumProgram struct {
	simd       *simd.Kernels
	rows, cols int
	accumulate bool
	width      int
	x, y       []float32
}

func compileColSum(d *Device, op device.Op) (program, error) {
	rows, cols, err := matrix("x", op.In[0])
	if err != nil {
		return nil, err
	}
	if err := elements("y", op.Out[0], cols); err != nil {
		return nil, err
	}
	return &colSumProgram{simd: d.simd, rows: rows, cols: cols, accumulate: op.Attr.Accumulate}, nil
}

func (c *colSumProgram) run(p *pool, a [][]byte) error {
	c.x, c.y = view[float32](a[0]), view[float32](a[1])
	c.width = p.columns(c.cols)
	p.run(pieces(c.cols, c.width), c)
	return nil
}

func (c *colSumProgram) part(_, i int) {
	lo, hi := piece(i, c.cols, c.width)
	y := c.y[lo:hi]
	if !c.accumulate {
		clear(y)
	}
	step := rowsPerPiece(c.cols)
	for r := 0; r < c.rows; r += step {
		c.simd.ColSum(y, c.x[r*c.cols+lo:], min(step, c.rows-r), c.cols)
	}
}
