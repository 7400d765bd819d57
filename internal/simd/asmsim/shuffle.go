package asmsim

import "math"

// shuffleOps move lanes about, most of them within groups of 16 bytes.
var shuffleOps = map[string]entry{
	"VUNPCKLPS": {3, 3, within(func(x, y []uint32) [4]uint32 { return [4]uint32{x[0], y[0], x[1], y[1]} })},
	"VUNPCKHPS": {3, 3, within(func(x, y []uint32) [4]uint32 { return [4]uint32{x[2], y[2], x[3], y[3]} })},
	"VUNPCKLPD": {3, 3, within(func(x, y []uint32) [4]uint32 { return [4]uint32{x[0], x[1], y[0], y[1]} })},
	"VUNPCKHPD": {3, 3, within(func(x, y []uint32) [4]uint32 { return [4]uint32{x[2], x[3], y[2], y[3]} })},
	"VPACKUSDW": {3, 3, within(func(x, y []uint32) [4]uint32 {
		return [4]uint32{pack(x[0], x[1]), pack(x[2], x[3]), pack(y[0], y[1]), pack(y[2], y[3])}
	})},
	"VPERMILPS": {3, 3, permute(func(imm, i int) int { return i&^3 | imm>>(2*(i&3))&3 })},
	"VPERMILPD": {3, 3, permute(func(imm, i int) int { return i&^3 | imm>>(i/2)&1<<1 | i&1 })},
	"VPERMQ":    {3, 3, permute(func(imm, i int) int { return i&^7 | imm>>(i&7/2*2)&3<<1 | i&1 })},
}

// within applies f to each group of 16 bytes of «op y, x, dst».
func within(f func(x, y []uint32) [4]uint32) executor {
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
		for i := 0; i < n/4; i += 4 {
			r := f(x[i:i+4], y[i:i+4])
			copy(x[i:], r[:])
		}
		return m.store(&a[2], &x, n)
	}
}

// permute is «op $imm, x, dst»: lane i of dst is lane from(imm, i) of x.
func permute(from func(imm, i int) int) executor {
	return func(m *machine, a []operand) error {
		n := a[2].width
		x, err := m.load(&a[1], n)
		if err != nil {
			return err
		}
		var r lanes
		for i := range n / 4 {
			r[i] = x[from(int(a[0].value), i)]
		}
		return m.store(&a[2], &r, n)
	}
}

// pack makes two unsigned 16-bit lanes of two signed 32-bit ones, saturated.
func pack(x, y uint32) uint32 { return saturate(x) | saturate(y)<<16 }

func saturate(x uint32) uint32 { return uint32(max(0, min(int32(x), math.MaxUint16))) }
