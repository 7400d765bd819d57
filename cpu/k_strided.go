package cpu

import (
	"fmt"
	"slices"

	"github.com/tandem-go/tandem/device"
)

// walk is a strided region in the order of its elements, with axes that can be
// walked as one merged. It has at least one axis.
type walk struct {
	shape, strides []int
	offset         int
}

// newWalk checks a region of memory of n elements.
func newWalk(shape []int, a device.Attr, n int) (walk, error) {
	if len(a.Strides) != len(shape) {
		return walk{}, fmt.Errorf("%d strides for shape %v", len(a.Strides), shape)
	}
	w, last := walk{offset: a.Offset}, a.Offset
	empty := slices.Contains(shape, 0)
	for i, d := range shape {
		if a.Strides[i] < 0 {
			return walk{}, fmt.Errorf("stride %d of axis %d is negative", a.Strides[i], i)
		}
		last += (d - 1) * a.Strides[i]
	}
	if a.Offset < 0 || !empty && last >= n {
		return walk{}, fmt.Errorf("offset %d and strides %v of shape %v reach element %d of %d", a.Offset, a.Strides, shape, last, n)
	}
	for i, d := range shape {
		k := len(w.shape) - 1
		switch {
		case d == 1:
		case k >= 0 && w.strides[k] == d*a.Strides[i]:
			w.shape[k], w.strides[k] = w.shape[k]*d, a.Strides[i]
		default:
			w.shape, w.strides = append(w.shape, d), append(w.strides, a.Strides[i])
		}
	}
	if len(w.shape) == 0 {
		w.shape, w.strides = []int{1}, []int{1}
	}
	return w, nil
}

// row is the length of the last axis, rows how often it comes.
func (w *walk) row() int { return w.shape[len(w.shape)-1] }

func (w *walk) rows() int {
	n := 1
	for _, d := range w.shape[:len(w.shape)-1] {
		n *= d
	}
	return n
}

// at is where row r begins in the strided memory.
func (w *walk) at(r int) int {
	off := w.offset
	for i := len(w.shape) - 2; i >= 0; i-- {
		off += r % w.shape[i] * w.strides[i]
		r /= w.shape[i]
	}
	return off
}

// stridedProgram is Strided and StridedGrad. Threads take pieces of rows; those
// of a single long row are pieces of it.
type stridedProgram struct {
	walk
	size     int // bytes of an element
	grad     bool
	clearing bool
	cut      int // elements of a row that make a piece
	cuts     int // pieces of a row
	rowsEach int // rows that make a piece
	from, to []byte
}

func newStrided(dense, strided device.Tensor, a device.Attr) (*stridedProgram, error) {
	if dense.Type != strided.Type {
		return nil, fmt.Errorf("types differ: %v and %v", dense, strided)
	}
	w, err := newWalk(dense.Shape, a, strided.Elems())
	if err != nil {
		return nil, err
	}
	p := &stridedProgram{walk: w, size: dense.Type.Size(), cut: chunkElems}
	p.cuts = max(1, pieces(w.row(), p.cut))
	p.rowsEach = rowsPerPiece(w.row())
	return p, nil
}

func compileStrided(_ *Device, op device.Op) (program, error) {
	return newStrided(op.Out[0], op.In[0], op.Attr)
}

func compileStridedGrad(_ *Device, op device.Op) (program, error) {
	p, err := newStrided(op.In[0], op.Out[0], op.Attr)
	if err != nil {
		return nil, err
	}
	for i, s := range p.strides {
		if s == 0 && p.shape[i] > 1 {
			return nil, fmt.Errorf("stride 0 of an axis of %d", p.shape[i])
		}
	}
	p.grad = true
	return p, nil
}

func (s *stridedProgram) run(p *pool, a [][]byte) error {
	s.from, s.to = a[0], a[1]
	if s.grad {
		s.clearing = true
		p.run(pieces(len(s.to), moveChunk), s)
		s.clearing = false
	}
	if len(s.from) > 0 && len(s.to) > 0 {
		p.run(pieces(s.rows(), s.rowsEach)*s.cuts, s)
	}
	return nil
}

func (s *stridedProgram) part(_, i int) {
	if s.clearing {
		lo, hi := piece(i, len(s.to), moveChunk)
		clear(s.to[lo:hi])
		return
	}
	c := i % s.cuts
	lo, hi := piece(i/s.cuts, s.rows(), s.rowsEach)
	first, last := piece(c, s.row(), s.cut)
	switch s.size {
	case 1:
		moveRows[uint8](s, lo, hi, first, last)
	case 2:
		moveRows[uint16](s, lo, hi, first, last)
	case 4:
		moveRows[uint32](s, lo, hi, first, last)
	case 8:
		moveRows[uint64](s, lo, hi, first, last)
	}
}

// moveBlock is how many elements of strided rows are moved before the next row
// is looked at: in a transposition the next row's lie beside them.
const moveBlock = 16

// moveRows moves elements [first, last) of rows [lo, hi).
func moveRows[T uint8 | uint16 | uint32 | uint64](s *stridedProgram, lo, hi, first, last int) {
	from, to := view[T](s.from), view[T](s.to)
	n, stride := s.row(), s.strides[len(s.strides)-1]
	block := last - first
	if stride > 1 {
		block = moveBlock
	}
	for b := first; b < last; b += block {
		end := min(last, b+block)
		for r := lo; r < hi; r++ {
			dense, strided := r*n+b, s.at(r)+b*stride
			if s.grad {
				scatterRow(to[strided:], from[dense:r*n+end], stride)
			} else {
				gatherRow(to[dense:r*n+end], from[strided:], stride)
			}
		}
	}
}

func gatherRow[T any](to, from []T, stride int) {
	switch stride {
	case 1:
		copy(to, from)
	case 0:
		v := from[0]
		for i := range to {
			to[i] = v
		}
	default:
		for i := range to {
			to[i] = from[i*stride]
		}
	}
}

func scatterRow[T any](to, from []T, stride int) {
	if stride == 1 {
		copy(to, from)
		return
	}
	for i, v := range from {
		to[i*stride] = v
	}
}

// concatProgram is Concat: each input is a block of columns of the result, seen
// as a matrix whose rows are what comes before the axis. Threads take rows.
type concatProgram struct {
	rows, row int   // row in bytes
	widths    []int // of the inputs, in bytes
	in        [][]byte
	out       []byte
}

func compileConcat(_ *Device, op device.Op) (program, error) {
	out := op.Out[0]
	if len(op.Attr.Axes) != 1 || op.Attr.Axes[0] < 0 || op.Attr.Axes[0] >= len(out.Shape) {
		return nil, fmt.Errorf("axes %v of shape %v, want one of them", op.Attr.Axes, out.Shape)
	}
	axis := op.Attr.Axes[0]
	c, along := &concatProgram{rows: 1}, 0
	for _, d := range out.Shape[:axis] {
		c.rows *= d
	}
	for i, t := range op.In {
		if t.Type != out.Type || len(t.Shape) != len(out.Shape) ||
			!slices.Equal(t.Shape[:axis], out.Shape[:axis]) || !slices.Equal(t.Shape[axis+1:], out.Shape[axis+1:]) {
			return nil, fmt.Errorf("input %d is %v, which doesn't fit into %v along axis %d", i, t, out, axis)
		}
		along += t.Shape[axis]
		c.widths = append(c.widths, t.Bytes()/max(1, c.rows))
	}
	if along != out.Shape[axis] {
		return nil, fmt.Errorf("inputs have %d along axis %d, the result %v", along, axis, out.Shape)
	}
	c.row = out.Bytes() / max(1, c.rows)
	return c, nil
}

func (c *concatProgram) run(p *pool, a [][]byte) error {
	c.in, c.out = a[:len(a)-1], a[len(a)-1]
	if len(c.out) > 0 {
		p.run(pieces(c.rows, max(1, moveChunk/c.row)), c)
	}
	return nil
}

func (c *concatProgram) part(_, i int) {
	lo, hi := piece(i, c.rows, max(1, moveChunk/c.row))
	at := 0
	for k, w := range c.widths {
		for r := lo; r < hi; r++ {
			copy(c.out[r*c.row+at:][:w], c.in[k][r*w:])
		}
		at += w
	}
}

// gatherProgram is Gather. Threads take rows.
type gatherProgram struct {
	v, d int
	rows []int64
	x, y []float32
}

func compileGather(_ *Device, op device.Op) (program, error) {
	v, d, err := matrix("x", op.In[0])
	if err != nil {
		return nil, err
	}
	return &gatherProgram{v: v, d: d}, elements("y", op.Out[0], op.In[1].Elems()*d)
}

func (g *gatherProgram) run(p *pool, a [][]byte) error {
	g.x, g.rows, g.y = view[float32](a[0]), view[int64](a[1]), view[float32](a[2])
	if err := inRange("row", g.rows, 0, g.v); err != nil {
		return err
	}
	p.run(pieces(len(g.rows), rowsPerPiece(g.d)), g)
	return nil
}

func (g *gatherProgram) part(_, i int) {
	lo, hi := piece(i, len(g.rows), rowsPerPiece(g.d))
	for n := lo; n < hi; n++ {
		copy(g.y[n*g.d:(n+1)*g.d], g.x[int(g.rows[n])*g.d:])
	}
}
