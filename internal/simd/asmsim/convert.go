package asmsim

import "math"

// convertOps convert between types of lanes.
var convertOps = map[string]entry{
	"VCVTDQ2PS": {2, 2, each1(func(x uint32) uint32 { return math.Float32bits(float32(int32(x))) })},
	"VCVTPS2PD": {2, 2, func(m *machine, a []operand) error {
		n := a[1].width
		x, err := m.load(&a[0], n/2)
		if err != nil {
			return err
		}
		var r lanes
		for i := range n / 8 {
			setFloat64(&r, i, float64(math.Float32frombits(x[i])))
		}
		return m.store(&a[1], &r, n)
	}},
	"VCVTSI2SSQ": {3, 3, func(m *machine, a []operand) error {
		i, err := m.get(&a[0])
		if err != nil {
			return err
		}
		x := m.vec[a[1].reg]
		x[0] = math.Float32bits(float32(int64(i)))
		return m.store(&a[2], &x, 16)
	}},
	"VCVTPH2PS": {2, 2, unpack(widen16)},
	"VPMOVZXWD": {2, 2, unpack(func(h uint16) uint32 { return uint32(h) })},
	"VCVTPS2PH": {3, 3, func(m *machine, a []operand) error {
		return narrow(narrow16)(m, a[1:]) // $0: to nearest, ties to even
	}},
	"VPMOVDW": {2, 2, narrow(func(x uint32) uint16 { return uint16(x) })},
}

// unpack makes 32-bit lanes of 16-bit ones.
func unpack(f func(uint16) uint32) executor {
	return func(m *machine, a []operand) error {
		n := a[1].width
		x, err := m.load(&a[0], n/2)
		if err != nil {
			return err
		}
		var r lanes
		for i := range n / 4 {
			r[i] = f(uint16(x[i/2] >> (16 * (i & 1))))
		}
		return m.store(&a[1], &r, n)
	}
}

// narrow makes 16-bit lanes of 32-bit ones.
func narrow(f func(uint32) uint16) executor {
	return func(m *machine, a []operand) error {
		n := a[0].width
		x, err := m.load(&a[0], n)
		if err != nil {
			return err
		}
		var r lanes
		for i := range n / 4 {
			r[i/2] |= uint32(f(x[i])) << (16 * (i & 1))
		}
		return m.store(&a[1], &r, n/2)
	}
}
