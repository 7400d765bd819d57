package cpu

import (
	"fmt"

	"github.com/tandem-go/tandem/device"
)

// softmaxProgram is Softmax, LogSoftmax and their gradients. Threads take rows;
// those along another axis than the last are brought together first.
type softmaxProgram struct {
	fold
	rowSums
	log     bool
	grad    bool
	scratch [][]float32 // of each thread: three rows, where rows aren't contiguous
	a, b, y []float32   // x, or y and dy; the result
}

func newSoftmax(d *Device, op device.Op) (*softmaxProgram, error) {
	t := op.In[0]
	if len(op.Attr.Axes) != 1 {
		return nil, fmt.Errorf("axes %v, want one", op.Attr.Axes)
	}
	f, err := newFold(t.Shape, op.Attr.Axes)
	if err != nil {
		return nil, err
	}
	s := &softmaxProgram{fold: f, rowSums: newRowSums(d)}
	if f.inner > 1 {
		for range d.opts.Threads {
			s.scratch = append(s.scratch, make([]float32, 3*f.n))
		}
	}
	return s, sameShape("the result", op.Out[0], "the input", t)
}

func compileSoftmax(d *Device, op device.Op) (program, error) {
	s, err := newSoftmax(d, op)
	if err != nil {
		return nil, err
	}
	s.log = op.Kind == device.LogSoftmax
	return s, nil
}

func compileSoftmaxGrad(d *Device, op device.Op) (program, error) {
	s, err := newSoftmax(d, op)
	if err != nil {
		return nil, err
	}
	s.log, s.grad = op.Kind == device.LogSoftmaxGrad, true
	return s, sameShape("dy", op.In[1], "y", op.In[0])
}

func (s *softmaxProgram) run(p *pool, a [][]byte) error {
	s.a, s.b, s.y = view[float32](a[0]), view[float32](a[len(a)-2]), view[float32](a[len(a)-1])
	if s.n > 0 {
		p.run(pieces(s.outer*s.inner, rowsPerPiece(s.n)), s)
	}
	return nil
}

func (s *softmaxProgram) part(t, i int) {
	lo, hi := piece(i, s.outer*s.inner, rowsPerPiece(s.n))
	for r := lo; r < hi; r++ {
		if s.inner == 1 {
			o, end := r*s.n, (r+1)*s.n
			s.row(t, s.y[o:end], s.a[o:end], s.b[o:end])
			continue
		}
		o := r/s.inner*s.n*s.inner + r%s.inner
		w := s.scratch[t]
		a, b, y := w[:s.n], w[s.n:2*s.n], w[2*s.n:]
		gatherRow(a, s.a[o:], s.inner)
		gatherRow(b, s.b[o:], s.inner)
		s.row(t, y, a, b)
		scatterRow(s.y[o:], y, s.inner)
	}
}

// row computes one row on thread t; b is dy, of gradients.
func (s *softmaxProgram) row(t int, y, a, b []float32) {
	k := s.simd
	switch {
	case s.grad && s.log: // dy − exp(y)·Σdy
		k.Exp(y, a)
		k.Scale(y, y, -float32(s.sum(t, b)))
		k.Add(y, y, b)
	case s.grad: // y·(dy − Σy·dy)
		k.Mul(y, a, b)
		k.Axpy(y, a, -float32(s.sum(t, y)))
	case s.log:
		k.AddScalar(y, a, -k.CrossEntropyRow(a))
	default:
		k.Scale(y, y, 1/k.ExpSum(y, a, k.Max(a)))
	}
}
