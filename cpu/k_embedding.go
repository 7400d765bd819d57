package cpu

import (
	"fmt"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/internal/simd"
)

// inRange refuses indices outside [lo, v).
func inRange(what string, index []int64, lo, v int) error {
	for n, t := range index {
		if t < int64(lo) || t >= int64(v) {
			return fmt.Errorf("%s %d at position %d is outside [%d, %d)", what, t, n, lo, v)
		}
	}
	return nil
}

// embeddingProgram is Embedding. Threads take rows.
type embeddingProgram struct {
	simd      *simd.Kernels
	v, d, seq int
	tokens    []int64
	wte, wpe  []float32
	x         []float32
}

// positions checks a table of positions of which seq are used.
func positions(what string, t device.Tensor, d, seq int) error {
	if len(t.Shape) != 2 || t.Shape[0] < seq || t.Shape[1] != d || seq < 1 {
		return fmt.Errorf("%s has shape %v, want at least Attr.Seq = %d rows of %d", what, t.Shape, seq, d)
	}
	return nil
}

func compileEmbedding(d *Device, op device.Op) (program, error) {
	v, n, err := matrix("wte", op.In[0])
	if err != nil {
		return nil, err
	}
	e := &embeddingProgram{simd: d.simd, v: v, d: n, seq: op.Attr.Seq}
	return e, firstError(
		positions("wpe", op.In[1], n, op.Attr.Seq),
		elements("x", op.Out[0], op.In[2].Elems()*n))
}

func (e *embeddingProgram) run(p *pool, a [][]byte) error {
	e.wte, e.wpe = view[float32](a[0]), view[float32](a[1])
	e.tokens, e.x = view[int64](a[2]), view[float32](a[3])
	if err := inRange("token", e.tokens, 0, e.v); err != nil {
		return err
	}
	p.run(pieces(len(e.tokens), rowsPerPiece(e.d)), e)
	return nil
}

func (e *embeddingProgram) part(_, i int) {
	lo, hi := piece(i, len(e.tokens), rowsPerPiece(e.d))
	for n := lo; n < hi; n++ {
		t, s := int(e.tokens[n])*e.d, n%e.seq*e.d
		e.simd.Add(e.x[n*e.d:(n+1)*e.d], e.wte[t:t+e.d], e.wpe[s:s+e.d])
	}
}

// tokenGradProgram is EmbeddingGradToken. Threads clear rows of the table
// first; then they take columns, so every row's sum is in order of n.
type tokenGradProgram struct {
	simd       *simd.Kernels
	v, d       int
	accumulate bool
	clearing   bool
	width      int
	tokens     []int64
	dy, dw     []float32
}

func compileEmbeddingGradToken(d *Device, op device.Op) (program, error) {
	v, n, err := matrix("dwte", op.Out[0])
	if err != nil {
		return nil, err
	}
	return &tokenGradProgram{simd: d.simd, v: v, d: n, accumulate: op.Attr.Accumulate},
		elements("dy", op.In[1], op.In[0].Elems()*n)
}

func (g *tokenGradProgram) run(p *pool, a [][]byte) error {
	g.tokens, g.dy, g.dw = view[int64](a[0]), view[float32](a[1]), view[float32](a[2])
	if err := inRange("token", g.tokens, 0, g.v); err != nil {
		return err
	}
	if !g.accumulate {
		g.clearing = true
		p.run(pieces(len(g.dw), chunkElems), g)
	}
	g.clearing = false
	g.width = p.columns(g.d)
	p.run(pieces(g.d, g.width), g)
	return nil
}

func (g *tokenGradProgram) part(_, i int) {
	if g.clearing {
		lo, hi := piece(i, len(g.dw), chunkElems)
		clear(g.dw[lo:hi])
		return
	}
	lo, hi := piece(i, g.d, g.width)
	for n, t := range g.tokens {
		o := int(t) * g.d
		row := g.dw[o+lo : o+hi]
		g.simd.Add(row, row, g.dy[n*g.d+lo:n*g.d+hi])
	}
}

// positionGradProgram is EmbeddingGradPosition. Threads take positions.
type positionGradProgram struct {
	simd       *simd.Kernels
	rows, d    int // of dwpe
	seq        int
	accumulate bool
	dy, dw     []float32
}

func compileEmbeddingGradPosition(d *Device, op device.Op) (program, error) {
	n, cols, err := matrix("dy", op.In[0])
	if err != nil {
		return nil, err
	}
	seq := op.Attr.Seq
	if err := positions("dwpe", op.Out[0], cols, seq); err != nil {
		return nil, err
	}
	if n%seq != 0 {
		return nil, fmt.Errorf("dy has shape %v, want rows in sequences of Attr.Seq = %d", op.In[0].Shape, seq)
	}
	return &positionGradProgram{simd: d.simd, rows: op.Out[0].Shape[0], d: cols, seq: seq, accumulate: op.Attr.Accumulate}, nil
}

func (g *positionGradProgram) run(p *pool, a [][]byte) error {
	g.dy, g.dw = view[float32](a[0]), view[float32](a[1])
	p.run(pieces(g.rows, rowsPerPiece(g.d)), g)
	return nil
}

func (g *positionGradProgram) part(_, i int) {
	lo, hi := piece(i, g.rows, rowsPerPiece(g.d))
	if !g.accumulate {
		clear(g.dw[lo*g.d : hi*g.d])
	}
	for t := lo; t < min(hi, g.seq); t++ {
		row := g.dw[t*g.d : (t+1)*g.d]
		for o := t * g.d; o < len(g.dy); o += g.seq * g.d {
			g.simd.Add(row, row, g.dy[o:o+g.d])
		}
	}
}
