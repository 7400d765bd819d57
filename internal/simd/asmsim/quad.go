package asmsim

import (
	"fmt"
	"math"
)

// quadOps are the instructions of 64-bit integer lanes and their company, which
// random numbers take.
var quadOps = map[string]entry{
	"VPADDQ":       {3, 3, quads(func(x, y uint64) uint64 { return x + y })},
	"VPMULUDQ":     {3, 3, quads(func(x, y uint64) uint64 { return x & math.MaxUint32 * (y & math.MaxUint32) })},
	"VPSLLQ":       {3, 3, quadShift(func(x uint64, n int64) uint64 { return x << n })},
	"VPSRLQ":       {3, 3, quadShift(func(x uint64, n int64) uint64 { return x >> n })},
	"VPMAXUD":      {3, 3, each(func(x, y uint32) uint32 { return max(x, y) })},
	"VPCMPEQD":     {3, 3, equalLanes},
	"VSHUFPS":      {4, 4, shuffleTwo},
	"VMOVQ":        {2, 2, moveQuad},
	"VPBROADCASTQ": {2, 2, broadcastQuad},
}

func quadAt(v *lanes, i int) uint64 { return uint64(v[2*i]) | uint64(v[2*i+1])<<32 }

func setQuad(v *lanes, i int, q uint64) { v[2*i], v[2*i+1] = uint32(q), uint32(q>>32) }

// quads is «op y, x, dst»: dst = f(x, y).
func quads(f func(x, y uint64) uint64) executor {
	return func(m *machine, a []operand) error {
		n := a[2].width
		y, err := m.load(&a[0], n)
		if err != nil {
			return err
		}
		x, err := m.load(&a[1], n)
		if err != nil {
			return err
		}
		for i := range n / 8 {
			setQuad(&x, i, f(quadAt(&x, i), quadAt(&y, i)))
		}
		return m.store(&a[2], &x, n)
	}
}

func quadShift(f func(x uint64, n int64) uint64) executor {
	return func(m *machine, a []operand) error {
		if a[0].kind != immediate || a[0].value > 63 {
			return fmt.Errorf("want a shift by up to 63")
		}
		n := a[2].width
		x, err := m.load(&a[1], n)
		if err != nil {
			return err
		}
		for i := range n / 8 {
			setQuad(&x, i, f(quadAt(&x, i), a[0].value))
		}
		return m.store(&a[2], &x, n)
	}
}

// equalLanes is VPCMPEQD y, x, mask register or vector of masks.
func equalLanes(m *machine, a []operand) error {
	n := a[1].width
	y, err := m.load(&a[0], n)
	if err != nil {
		return err
	}
	x := m.vec[a[1].reg]
	var bits uint64
	var r lanes
	for i := range n / 4 {
		if x[i] == y[i] {
			bits |= 1 << i
			r[i] = math.MaxUint32
		}
	}
	if a[2].kind == opmask {
		m.k[a[2].reg] = bits
		return nil
	}
	return m.store(&a[2], &r, n)
}

// shuffleTwo is VSHUFPS $imm, y, x, dst: in each 16 bytes, two lanes of x, then
// two of y.
func shuffleTwo(m *machine, a []operand) error {
	imm := int(a[0].value)
	return within(func(x, y []uint32) [4]uint32 {
		return [4]uint32{x[imm&3], x[imm>>2&3], y[imm>>4&3], y[imm>>6&3]}
	})(m, a[1:])
}

// moveQuad moves 64 bits from a general register and clears the rest.
func moveQuad(m *machine, a []operand) error {
	if a[0].kind != general || a[1].kind != vector {
		return fmt.Errorf("want a general register and a vector register")
	}
	var v lanes
	setQuad(&v, 0, m.gp[a[0].reg])
	return m.store(&a[1], &v, 16)
}

func broadcastQuad(m *machine, a []operand) error {
	v, err := m.load(&a[0], 8)
	if err != nil {
		return err
	}
	for i := range 8 {
		setQuad(&v, i, quadAt(&v, 0))
	}
	return m.store(&a[1], &v, a[1].width)
}
