package asmsim

import (
	"fmt"
	"math"
)

// arithmeticOps work lane by lane.
var arithmeticOps = map[string]entry{
	"VADDPS": {3, 3, each(addF)}, "VSUBPS": {3, 3, each(subF)},
	"VMULPS": {3, 3, each(mulF)}, "VDIVPS": {3, 3, each(divF)},
	"VMAXPS": {3, 3, each(max32)}, "VMINPS": {3, 3, each(min32)},
	"VADDSS": {3, 3, low(addF)}, "VSUBSS": {3, 3, low(subF)},
	"VMULSS": {3, 3, low(mulF)}, "VDIVSS": {3, 3, low(divF)},
	"VMAXSS": {3, 3, low(max32)}, "VMINSS": {3, 3, low(min32)},
	"VSQRTPS": {2, 2, each1(sqrtF)},
	"VSQRTSS": {3, 3, low(func(_, y uint32) uint32 { return sqrtF(y) })},
	"VADDPD":  {3, 3, each64(func(x, y float64) float64 { return x + y })},
	"VMULPD":  {3, 3, each64(func(x, y float64) float64 { return x * y })},

	"VFMADD132PS":  {3, 3, fused(0, 2, 1, 0)},
	"VFMADD213PS":  {3, 3, fused(1, 0, 2, 0)},
	"VFMADD231PS":  {3, 3, fused(1, 2, 0, 0)},
	"VFMSUB213PS":  {3, 3, fused(1, 0, 2, signBit)},
	"VFNMADD213PS": {3, 3, negated(1, 0, 2)},
	"VFNMADD231PS": {3, 3, negated(1, 2, 0)},

	"VANDPS": {3, 3, each(func(x, y uint32) uint32 { return x & y })},
	"VORPS":  {3, 3, each(func(x, y uint32) uint32 { return x | y })},
	"VXORPS": {3, 3, each(xor)}, "VPXORD": {3, 3, each(xor)},
	"VPADDD": {3, 3, each(func(x, y uint32) uint32 { return x + y })},
	"VPSUBD": {3, 3, each(func(x, y uint32) uint32 { return x - y })},
	"VPSLLD": {3, 3, shift(func(x uint32, n int64) uint32 { return x << n })},
	"VPSRLD": {3, 3, shift(func(x uint32, n int64) uint32 { return x >> n })},
	"VPSRAD": {3, 3, shift(func(x uint32, n int64) uint32 { return uint32(int32(x) >> n) })},

	"VCMPPS":    {4, 4, compareLanes},
	"VBLENDVPS": {4, 4, blendVector},
	"VBLENDMPS": {4, 4, blendMask},
}

const signBit = 1 << 31

var (
	addF = float32Op(func(x, y float32) float32 { return x + y })
	subF = float32Op(func(x, y float32) float32 { return x - y })
	mulF = float32Op(func(x, y float32) float32 { return x * y })
	divF = float32Op(func(x, y float32) float32 { return x / y })
)

func xor(x, y uint32) uint32 { return x ^ y }

func sqrtF(x uint32) uint32 {
	if n, ok := nan32(x); ok {
		return n
	}
	return bits32(float32(math.Sqrt(float64(math.Float32frombits(x)))))
}

// each is «op y, x, dst»: dst = f(x, y).
func each(f func(x, y uint32) uint32) executor {
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
		for i := range n / 4 {
			x[i] = f(x[i], y[i])
		}
		return m.store(&a[2], &x, n)
	}
}

// low is each for the lowest lane; the rest of 16 bytes is x's.
func low(f func(x, y uint32) uint32) executor {
	return func(m *machine, a []operand) error {
		y, err := m.load(&a[0], 4)
		if err != nil {
			return err
		}
		x := m.vec[a[1].reg]
		x[0] = f(x[0], y[0])
		return m.store(&a[2], &x, 16)
	}
}

func each1(f func(x uint32) uint32) executor {
	return func(m *machine, a []operand) error {
		n := a[1].width
		x, err := m.load(&a[0], n)
		if err != nil {
			return err
		}
		for i := range n / 4 {
			x[i] = f(x[i])
		}
		return m.store(&a[1], &x, n)
	}
}

// each64 is each on float64. NaNs come out as the arithmetic of Go leaves them.
func each64(f func(x, y float64) float64) executor {
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
			setFloat64(&x, i, f(float64At(&x, i), float64At(&y, i)))
		}
		return m.store(&a[2], &x, n)
	}
}

func float64At(v *lanes, i int) float64 {
	return math.Float64frombits(uint64(v[2*i]) | uint64(v[2*i+1])<<32)
}

func setFloat64(v *lanes, i int, f float64) {
	b := math.Float64bits(f)
	v[2*i], v[2*i+1] = uint32(b), uint32(b>>32)
}

// fused is a multiply-add of Intel's operands 1 (the destination), 2 and 3, given
// from 0: x·y + (z^flip). Go writes them backwards.
func fused(x, y, z int, flip uint32) executor {
	return func(m *machine, a []operand) error {
		n := a[2].width
		var v [3]lanes
		for i := range v {
			var err error
			if v[i], err = m.load(&a[2-i], n); err != nil {
				return err
			}
		}
		var r lanes
		for i := range n / 4 {
			c := v[z][i]
			if !isNaN(c) {
				c ^= flip
			}
			r[i] = fma32(v[x][i], v[y][i], c)
		}
		return m.store(&a[2], &r, n)
	}
}

// negated is fused with −x·y.
func negated(x, y, z int) executor {
	return func(m *machine, a []operand) error {
		n := a[2].width
		var v [3]lanes
		for i := range v {
			var err error
			if v[i], err = m.load(&a[2-i], n); err != nil {
				return err
			}
		}
		var r lanes
		for i := range n / 4 {
			b := v[x][i]
			if !isNaN(b) {
				b ^= signBit
			}
			r[i] = fma32(b, v[y][i], v[z][i])
		}
		return m.store(&a[2], &r, n)
	}
}

func shift(f func(x uint32, n int64) uint32) executor {
	return func(m *machine, a []operand) error {
		if a[0].kind != immediate || a[0].value > 31 {
			return fmt.Errorf("want a shift by up to 31")
		}
		return each1(func(x uint32) uint32 { return f(x, a[0].value) })(m, a[1:])
	}
}

// compareLanes is VCMPPS $predicate, y, x, mask register or vector of masks.
func compareLanes(m *machine, a []operand) error {
	n := a[2].width
	y, err := m.load(&a[1], n)
	if err != nil {
		return err
	}
	x := m.vec[a[2].reg]
	var bits uint64
	var r lanes
	for i := range n / 4 {
		if compare32(a[0].value, x[i], y[i]) {
			bits |= 1 << i
			r[i] = math.MaxUint32
		}
	}
	if a[3].kind == opmask {
		m.k[a[3].reg] = bits
		return nil
	}
	return m.store(&a[3], &r, n)
}

// blendVector is VBLENDVPS mask, y, x, dst: y where the mask's sign is set.
func blendVector(m *machine, a []operand) error {
	n, mask := a[3].width, m.vec[a[0].reg]
	y, err := m.load(&a[1], n)
	if err != nil {
		return err
	}
	x := m.vec[a[2].reg]
	for i := range n / 4 {
		if mask[i]&signBit != 0 {
			x[i] = y[i]
		}
	}
	return m.store(&a[3], &x, n)
}

// blendMask is VBLENDMPS y, x, mask, dst: y where the mask is set.
func blendMask(m *machine, a []operand) error {
	n := a[3].width
	y, err := m.load(&a[0], n)
	if err != nil {
		return err
	}
	x := m.vec[a[1].reg]
	for i := range n / 4 {
		if m.k[a[2].reg]>>i&1 != 0 {
			x[i] = y[i]
		}
	}
	return m.store(&a[3], &x, n)
}
