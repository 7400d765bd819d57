package cpu

import (
	"fmt"
	"math"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/internal/simd"
)

// updateProgram is AdamW and SGD.
type updateProgram struct {
	simd               *simd.Kernels
	decay              bool
	adam               bool
	param, grad, hyper []float32
	m, v               []float32
}

// compileUpdate serves AdamW and SGD, which differ in their outputs.
func compileUpdate(d *Device, op device.Op) (program, error) {
	n := op.In[0].Elems()
	errs := []error{elements("hyper", op.In[1], device.HyperLen)}
	for i, t := range op.Out {
		errs = append(errs, elements(fmt.Sprintf("output %d", i), t, n))
	}
	u := &updateProgram{simd: d.simd, decay: op.Attr.Decay, adam: op.Kind == device.AdamW}
	return u, firstError(errs...)
}

func (u *updateProgram) run(p *pool, a [][]byte) error {
	u.grad, u.hyper = view[float32](a[0]), view[float32](a[1])
	u.param, u.m = view[float32](a[2]), view[float32](a[3])
	if u.adam {
		u.v = view[float32](a[4])
	}
	p.run(pieces(len(u.param), chunkElems), u)
	return nil
}

func (u *updateProgram) part(_, i int) {
	lo, hi := piece(i, len(u.param), chunkElems)
	if u.adam {
		u.simd.AdamW(u.param[lo:hi], u.grad[lo:hi], u.m[lo:hi], u.v[lo:hi], u.hyper, u.decay)
		return
	}
	u.simd.SGD(u.param[lo:hi], u.grad[lo:hi], u.m[lo:hi], u.hyper, u.decay)
}

// sumSquaresProgram is SumSquares: sums of fixed chunks, added in order.
type sumSquaresProgram struct {
	simd *simd.Kernels
	x    []float32
	sums []float64
}

func compileSumSquares(d *Device, op device.Op) (program, error) {
	return &sumSquaresProgram{simd: d.simd, sums: make([]float64, pieces(op.In[0].Elems(), simd.SumSquaresChunk))},
		elements("y", op.Out[0], 1)
}

func (s *sumSquaresProgram) run(p *pool, a [][]byte) error {
	s.x = view[float32](a[0])
	p.run(len(s.sums), s)
	sum := 0.0
	for _, v := range s.sums {
		sum += v
	}
	view[float64](a[1])[0] = sum
	return nil
}

func (s *sumSquaresProgram) part(_, i int) {
	lo, hi := piece(i, len(s.x), simd.SumSquaresChunk)
	s.simd.SumSquaresChunks(s.sums[i:i+1], s.x[lo:hi])
}

// clipScaleProgram is ClipScale.
type clipScaleProgram struct{}

func compileClipScale(_ *Device, op device.Op) (program, error) {
	return clipScaleProgram{}, firstError(
		elements("hyper", op.In[1], device.HyperLen),
		elements("the result", op.Out[0], device.HyperLen))
}

func (clipScaleProgram) run(_ *pool, a [][]byte) error {
	squares, from, hyper := view[float64](a[0]), view[float32](a[1]), view[float32](a[2])
	copy(hyper, from)
	sum := 0.0
	for _, v := range squares {
		sum += v
	}
	norm, limit := math.Sqrt(sum), float64(hyper[device.HyperMaxNorm])
	scale := 1.0
	if limit > 0 && norm > limit {
		scale = limit / norm
	}
	hyper[device.HyperNorm], hyper[device.HyperScale] = float32(norm), float32(scale)
	return nil
}

// scaleProgram is Scale.
type scaleProgram struct {
	simd   *simd.Kernels
	x, y   []float32
	factor float32
}

func compileScale(d *Device, op device.Op) (program, error) {
	return &scaleProgram{simd: d.simd}, firstError(
		elements("factor", op.In[1], 1),
		elements("y", op.Out[0], op.In[0].Elems()))
}

func (s *scaleProgram) run(p *pool, a [][]byte) error {
	s.x, s.factor, s.y = view[float32](a[0]), view[float32](a[1])[0], view[float32](a[2])
	p.run(pieces(len(s.y), chunkElems), s)
	return nil
}

func (s *scaleProgram) part(_, i int) {
	lo, hi := piece(i, len(s.y), chunkElems)
	s.simd.Scale(s.y[lo:hi], s.x[lo:hi], s.factor)
}
