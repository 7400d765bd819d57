package cpu

import (
	"fmt"
	"math"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/internal/simd"
)

// unaryProgram is Unary and GELU.
type unaryProgram struct {
	f    func(dst, src []float32)
	y, x []float32
}

func unaryFunc(k *simd.Kernels, f device.Func) func(dst, src []float32) {
	switch f {
	case device.Neg:
		return k.Neg
	case device.Exp:
		return k.Exp
	case device.Log:
		return k.Log
	case device.Sqrt:
		return k.Sqrt
	case device.Square:
		return k.Square
	case device.Cube:
		return k.Cube
	case device.Tanh:
		return k.Tanh
	case device.Sigmoid:
		return k.Sigmoid
	case device.Inverse:
		return k.Inverse
	case device.ReLU:
		return k.ReLU
	}
	return nil
}

func compileUnary(d *Device, op device.Op) (program, error) {
	f := unaryFunc(d.simd, op.Attr.Func)
	if f == nil {
		return nil, fmt.Errorf("function %q of one operand: %w", op.Attr.Func, device.ErrUnsupported)
	}
	return &unaryProgram{f: f}, elements("y", op.Out[0], op.In[0].Elems())
}

func compileGELU(d *Device, op device.Op) (program, error) {
	return &unaryProgram{f: d.simd.GELU}, elements("y", op.Out[0], op.In[0].Elems())
}

func (u *unaryProgram) run(p *pool, a [][]byte) error {
	u.x, u.y = view[float32](a[0]), view[float32](a[1])
	p.run(pieces(len(u.y), chunkElems), u)
	return nil
}

func (u *unaryProgram) part(_, i int) {
	lo, hi := piece(i, len(u.y), chunkElems)
	u.f(u.y[lo:hi], u.x[lo:hi])
}

// binaryProgram is Binary and GELUGrad. A scalar operand is spread over a
// chunk first, so that there is one rule for which bits come out.
type binaryProgram struct {
	f       func(dst, a, b []float32)
	y       []float32
	operand [2][]float32
	spread  [2]bool // the operand is a chunk of one value
	values  []float32
}

func binaryFunc(k *simd.Kernels, f device.Func) func(dst, a, b []float32) {
	switch f {
	case device.Add:
		return k.Add
	case device.Sub:
		return k.Sub
	case device.Mul:
		return k.Mul
	case device.Div:
		return k.Div
	case device.Greater:
		return greater
	case device.Less:
		return func(dst, a, b []float32) { greater(dst, b, a) }
	case device.AtLeast:
		return atLeast
	case device.AtMost:
		return func(dst, a, b []float32) { atLeast(dst, b, a) }
	case device.Equal:
		return func(dst, a, b []float32) { equal(dst, a, b, 1, 0) }
	case device.Differ:
		return func(dst, a, b []float32) { equal(dst, a, b, 0, 1) }
	}
	return nil
}

// The comparisons, as IEEE 754 has them: NaN is neither greater nor equal. What
// they choose between are bits, so that the compiler needs no branch, which data
// would mispredict.

const bitsOfOne = 0x3f800000

func greater(dst, a, b []float32) {
	dst, b = dst[:len(a)], b[:len(a)]
	for i, x := range a {
		v := uint32(0)
		if x > b[i] {
			v = bitsOfOne
		}
		dst[i] = math.Float32frombits(v)
	}
}

func atLeast(dst, a, b []float32) {
	dst, b = dst[:len(a)], b[:len(a)]
	for i, x := range a {
		v := uint32(0)
		if x >= b[i] {
			v = bitsOfOne
		}
		dst[i] = math.Float32frombits(v)
	}
}

func equal(dst, a, b []float32, yes, no float32) {
	dst, b = dst[:len(a)], b[:len(a)]
	y, n := math.Float32bits(yes), math.Float32bits(no)
	for i, x := range a {
		v := n
		if x == b[i] {
			v = y
		}
		dst[i] = math.Float32frombits(v)
	}
}

func compileBinary(d *Device, op device.Op) (program, error) {
	b := &binaryProgram{f: binaryFunc(d.simd, op.Attr.Func)}
	if b.f == nil {
		return nil, fmt.Errorf("function %q of two operands: %w", op.Attr.Func, device.ErrUnsupported)
	}
	y := op.Out[0]
	for i, t := range op.In {
		if err := sameShape("an operand", t, "the result", y); err == nil {
			continue
		} else if len(t.Shape) > 0 || b.spread[0] {
			return nil, err
		}
		b.spread[i] = true
		b.values = make([]float32, min(chunkElems, y.Elems()))
	}
	return b, nil
}

func compileGELUGrad(d *Device, op device.Op) (program, error) {
	return &binaryProgram{f: d.simd.GELUGrad}, firstError(
		sameShape("dy", op.In[1], "x", op.In[0]),
		sameShape("dx", op.Out[0], "x", op.In[0]))
}

func (b *binaryProgram) run(p *pool, a [][]byte) error {
	for i := range b.operand {
		b.operand[i] = view[float32](a[i])
		if b.spread[i] {
			for j := range b.values {
				b.values[j] = b.operand[i][0]
			}
		}
	}
	b.y = view[float32](a[2])
	p.run(pieces(len(b.y), chunkElems), b)
	return nil
}

func (b *binaryProgram) part(_, i int) {
	lo, hi := piece(i, len(b.y), chunkElems)
	b.f(b.y[lo:hi], b.chunk(0, lo, hi), b.chunk(1, lo, hi))
}

func (b *binaryProgram) chunk(i, lo, hi int) []float32 {
	if b.spread[i] {
		return b.values[:hi-lo]
	}
	return b.operand[i][lo:hi]
}

// dropoutProgram is Dropout.
type dropoutProgram struct {
	simd   *simd.Kernels
	sample int // elements of a sample
	cuts   int // pieces of a sample
	salt   int64
	p      float32
	key    []int64
	x, y   []float32
}

func compileDropout(d *Device, op device.Op) (program, error) {
	x, at := op.In[0], op.Attr
	switch {
	case at.P < 0 || at.P >= 1 || at.P != at.P:
		return nil, fmt.Errorf("probability %v, want [0, 1)", at.P)
	case len(x.Shape) == 0 || at.Seq < 1 || x.Shape[0]%at.Seq != 0:
		return nil, fmt.Errorf("x has shape %v, want rows in samples of Attr.Seq = %d", x.Shape, at.Seq)
	}
	if err := firstError(sameShape("y", op.Out[0], "x", x), elements("key", op.In[1], 3)); err != nil {
		return nil, err
	}
	sample := at.Seq
	for _, n := range x.Shape[1:] {
		sample *= n
	}
	return &dropoutProgram{simd: d.simd, sample: sample, cuts: pieces(sample, chunkElems), salt: at.Salt, p: at.P}, nil
}

func (d *dropoutProgram) run(p *pool, a [][]byte) error {
	d.x, d.key, d.y = view[float32](a[0]), view[int64](a[1]), view[float32](a[2])
	if d.sample > 0 {
		p.run(len(d.y)/d.sample*d.cuts, d)
	}
	return nil
}

func (d *dropoutProgram) part(_, i int) {
	s := i / d.cuts
	lo, hi := piece(i%d.cuts, d.sample, chunkElems)
	key := device.DropoutKey(d.key[0], d.key[1], d.salt, d.key[2]+int64(s))
	o := s * d.sample
	d.simd.Dropout(d.y[o+lo:o+hi], d.x[o+lo:o+hi], key, lo, d.p)
}
