package main

import (
	"math"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// vecAttention generates what causal attention does to blocks of scores between
// its matrix products. A block's rows lie ld elements apart; row i has
// cols + i*grow scores. Behind them there is room for two vectors, which these
// kernels set to zero, so that triangular products may round up to tiles.
func vecAttention(v *vec) {
	v.softmaxRows()
	v.gradRows()
	v.dotRows()
	v.scaleRows()
}

// ints loads integer parameters.
func (v *vec) ints(names ...string) []reg.Register {
	rs := make([]reg.Register, len(names))
	for i, n := range names {
		rs[i] = v.Load(v.Param(n), v.GP64())
	}
	return rs
}

// ptrs loads the addresses of slices.
func (v *vec) ptrs(names ...string) []reg.Register {
	rs := make([]reg.Register, len(names))
	for i, n := range names {
		rs[i] = v.ptr(n)
	}
	return rs
}

// scoreRows is the loop over the rows of a block.
type scoreRows struct {
	*vec
	blocks            []reg.Register // first elements of the row in each block
	ld, rows, n, grow reg.Register
	count             reg.Register // n, rounded up to vectors
}

// scores loads the parameters of a kernel on blocks of scores.
func (v *vec) scores(blocks ...string) *scoreRows {
	s := &scoreRows{vec: v}
	s.blocks = v.ptrs(blocks...)
	p := v.ints("ld", "rows", "cols", "grow")
	s.ld, s.rows, s.n, s.grow = p[0], p[1], p[2], p[3]
	v.SHLQ(U8(2), s.ld)
	s.count = v.GP64()
	return s
}

// pad writes one vector behind the scores of each row of a block. It's a loop of
// its own, so that these stores are done by the time the row is read.
func (s *scoreRows) pad(block reg.Register, x reg.VecVirtual) {
	loop := s.label("pad")
	p, left, step := s.GP64(), s.GP64(), s.GP64()
	s.LEAQ(Mem{Base: block, Index: s.n, Scale: 4}, p)
	s.LEAQ(Mem{Base: s.ld, Index: s.grow, Scale: 4}, step)
	s.MOVQ(s.rows, left)
	s.Label(loop)
	s.VMOVUPS(x, Mem{Base: p})
	s.ADDQ(step, p)
	s.DECQ(left)
	s.JNZ(LabelRef(loop))
}

// each runs body for each row.
func (s *scoreRows) each(body func()) {
	loop := s.label("row")
	s.Label(loop)
	s.LEAQ(Mem{Base: s.n, Disp: s.lanes - 1}, s.count)
	s.ANDQ(I8(-s.lanes), s.count)
	body()
	for _, b := range s.blocks {
		s.ADDQ(s.ld, b)
	}
	s.ADDQ(s.grow, s.n)
	s.DECQ(s.rows)
	s.JNZ(LabelRef(loop))
	s.vec.end()
}

// zeroFrom is where expFlushed becomes zero: there 2^n has the exponent of zero.
var zeroFrom = f32(-127 * math.Ln2)

// holdFlushed keeps the constants of expFlushed in registers; AVX2 the first few.
func (v *vec) holdFlushed(few int) {
	v.hold(few, magic, log2E, ln2, one, zeroFrom, expCoef[3], expCoef[2], expCoef[0], expCoef[1], half)
}

// expFlushed is exp(x) for x ≤ 0, and 0 where that is below 1e-38 or so: the
// padding must not end in denormals, which cost some processors 150 cycles. It is
// expOf in a tree, for a shorter chain, and without ln2Low: what that corrects,
// 2e-9·n, is nothing where exp(x) is of any weight.
func (v *vec) expFlushed(x reg.VecVirtual) reg.VecVirtual {
	v.VMAXPS(x, v.kreg(zeroFrom), x) // x comes out if it is NaN
	t, n, r2 := v.kcopy(magic), v.reg(), v.reg()
	v.VFMADD231PS(v.k(log2E), x, t)
	v.VSUBPS(v.k(magic), t, n)
	v.VFNMADD231PS(v.k(ln2), n, x)
	v.VMULPS(x, x, r2)
	high, low, p := v.kcopy(expCoef[1]), v.kcopy(half), v.reg()
	v.VFMADD231PS(v.k(expCoef[2]), x, high)
	v.VFMADD231PS(v.k(expCoef[0]), x, low)
	v.VADDPS(v.k(one), x, p)
	v.VFMADD231PS(v.k(expCoef[3]), r2, high)
	v.VFMADD231PS(high, r2, low)
	v.VFMADD231PS(low, r2, p)
	v.power(t, 0)
	v.VMULPS(t, p, p)
	return p
}

// softmaxRows generates max[i] = max(max[i], scale·s) and s = exp(scale·s −
// max[i]) with sum[i] of these. The maxima come first, in a loop of their own:
// then no row waits for the reduction of another.
func (v *vec) softmaxRows() {
	v.fn("softmaxRows", "func(s []float32, ld, rows, cols, grow int, scale float32, max, sum []float32)",
		"exponentiates rows > 0 rows of scores; see attention.go.")
	s := v.scores("s")
	out := v.ptrs("max", "sum")
	v.holdFlushed(7)
	scale, low := v.scalar("scale"), v.kcopy(f32(math.Inf(-1)))
	s.pad(s.blocks[0], low)
	s.maxima(out[0], scale)
	s.each(func() {
		m, sum := v.reg(), v.zero()
		v.VBROADCASTSS(Mem{Base: out[0]}, m)
		v.whole(s.count, func() {
			x := v.load(s.blocks[0], 0)
			v.VFMSUB213PS(m, scale, x)
			e := v.expFlushed(x)
			v.store(e, s.blocks[0], 0)
			v.VADDPS(e, sum, sum)
		})
		v.store(v.zero(), s.blocks[0], 0)
		v.VMOVSS(v.fold(v.VADDPS, []reg.VecVirtual{sum}).AsX(), Mem{Base: out[1]})
		v.ADDQ(U8(4), out[0])
		v.ADDQ(U8(4), out[1])
	})
}

// maxima raises max[i] to the greatest scale·s of row i.
func (s *scoreRows) maxima(max reg.Register, scale reg.VecVirtual) {
	v, loop := s.vec, s.label("max")
	p, to, n, left := s.GP64(), s.GP64(), s.GP64(), s.GP64()
	v.MOVQ(s.blocks[0], p)
	v.MOVQ(max, to)
	v.MOVQ(s.n, n)
	v.MOVQ(s.rows, left)
	v.Label(loop)
	m := v.kcopy(f32(math.Inf(-1)))
	v.LEAQ(Mem{Base: n, Disp: v.lanes - 1}, s.count)
	v.ANDQ(I8(-v.lanes), s.count)
	v.whole(s.count, func() { v.VMAXPS(v.at(p, 0), m, m) })
	m = v.fold(v.VMAXPS, []reg.VecVirtual{m})
	v.VMULSS(scale.AsX(), m.AsX(), m.AsX())
	v.VMAXSS(Mem{Base: to}, m.AsX(), m.AsX())
	v.VMOVSS(m.AsX(), Mem{Base: to})
	v.ADDQ(U8(4), to)
	v.ADDQ(s.ld, p)
	v.ADDQ(s.grow, n)
	v.DECQ(left)
	v.JNZ(LabelRef(loop))
}

// gradRows generates s = exp(scale·s − lse[i]) and dp = scale·s·(dp − delta[i]).
func (v *vec) gradRows() {
	v.fn("gradRows", "func(s, dp []float32, ld, rows, cols, grow int, scale float32, lse, delta []float32)",
		"turns rows > 0 rows of scores into probabilities and the gradients of these into gradients of scores; see attention.go.")
	s := v.scores("s", "dp")
	in := v.ptrs("lse", "delta")
	v.holdFlushed(6)
	scale := v.scalar("scale")
	s.pad(s.blocks[0], v.kcopy(f32(math.Inf(-1))))
	s.pad(s.blocks[1], v.zero())
	s.each(func() {
		lse, delta := v.reg(), v.reg()
		v.VBROADCASTSS(Mem{Base: in[0]}, lse)
		v.VBROADCASTSS(Mem{Base: in[1]}, delta)
		v.whole(s.count, func() {
			x, g := v.load(s.blocks[0], 0), v.load(s.blocks[1], 0)
			v.VFMSUB213PS(lse, scale, x)
			p := v.expFlushed(x)
			v.store(p, s.blocks[0], 0)
			v.VSUBPS(delta, g, g)
			v.VMULPS(scale, g, g)
			v.VMULPS(p, g, g)
			v.store(g, s.blocks[1], 0)
		})
		zero := v.zero()
		v.store(zero, s.blocks[0], 0)
		v.store(zero, s.blocks[1], 0)
		v.ADDQ(U8(4), in[0])
		v.ADDQ(U8(4), in[1])
	})
}

// dotRows generates dst[i] = Σ a·b over the n elements of row i.
func (v *vec) dotRows() {
	v.fn("dotRows", "func(dst, a, b []float32, ld, rows, n int)",
		"sets dst[i] to the product of rows i of a and b, rows > 0 rows of n elements, ld apart.")
	dst, a, b := v.ptr("dst"), v.ptr("a"), v.ptr("b")
	p := v.ints("ld", "rows", "n")
	ld, rows, n := p[0], p[1], p[2]
	v.SHLQ(U8(2), ld)
	v.Label("row")
	sum := v.zero()
	v.each(n, 1, func(int) { v.VFMADD231PS(v.load(b, 0), v.load(a, 0), sum) })
	v.VMOVSS(v.fold(v.VADDPS, []reg.VecVirtual{sum}).AsX(), Mem{Base: dst})
	v.ADDQ(U8(4), dst)
	v.ADDQ(ld, a)
	v.ADDQ(ld, b)
	v.DECQ(rows)
	v.JNZ(LabelRef("row"))
	v.end()
}

// scaleRows generates y = f[i]·y over the n elements of row i.
func (v *vec) scaleRows() {
	v.fn("scaleRows", "func(y []float32, ld, rows, n int, f []float32)",
		"multiplies row i of y by f[i]: rows > 0 rows of n elements, ld apart.")
	y, f := v.ptr("y"), v.ptr("f")
	p := v.ints("ld", "rows", "n")
	ld, rows, n := p[0], p[1], p[2]
	v.SHLQ(U8(2), ld)
	v.Label("row")
	s := v.reg()
	v.VBROADCASTSS(Mem{Base: f}, s)
	v.each(n, 1, func(int) {
		x := v.load(y, 0)
		v.VMULPS(s, x, x)
		v.store(x, y, 0)
	})
	v.ADDQ(U8(4), f)
	v.ADDQ(ld, y)
	v.DECQ(rows)
	v.JNZ(LabelRef("row"))
	v.end()
}
