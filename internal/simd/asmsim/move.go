package asmsim

import (
	"encoding/binary"
	"fmt"
)

// moveOps are loads, stores and moves between vector registers.
var moveOps = map[string]entry{
	"VMOVUPS":       {2, 3, moveVector(false)},
	"VMOVAPS":       {2, 3, moveVector(false)},
	"VMOVUPS.Z":     {3, 3, moveVector(true)},
	"VMOVAPS.Z":     {3, 3, moveVector(true)},
	"VMASKMOVPS":    {3, 3, maskMove},
	"VMOVSS":        {2, 2, moveScalar(4, true)},
	"VMOVSD":        {2, 2, moveScalar(8, true)},
	"MOVSS":         {2, 2, moveScalar(4, false)},
	"MOVSD":         {2, 2, moveScalar(8, false)},
	"VBROADCASTSS":  {2, 2, broadcast},
	"VINSERTF128":   {4, 4, insertHalf},
	"VEXTRACTF128":  {3, 3, extractHalf},
	"VEXTRACTF64X4": {3, 3, extractHalf},
	"KMOVW":         {2, 2, moveMask},
	"VZEROUPPER": {0, 0, func(m *machine, _ []operand) error {
		for i := range 16 {
			clear(m.vec[i][4:])
		}
		return nil
	}},
}

// width is the number of bytes of the first vector operand.
func width(args []operand) int {
	for i := range args {
		if args[i].kind == vector {
			return args[i].width
		}
	}
	return 0
}

// moveVector moves a vector, under a mask if there is a third operand. Lanes
// that the mask excludes touch no memory; those of a register keep their value
// or become zero.
func moveVector(zeroing bool) executor {
	return func(m *machine, a []operand) error {
		n, src, dst := width(a), &a[0], &a[len(a)-1]
		if len(a) == 2 {
			v, err := m.load(src, n)
			if err != nil {
				return err
			}
			return m.store(dst, &v, n)
		}
		if a[1].kind != opmask {
			return fmt.Errorf("the second of three operands is no mask")
		}
		on := func(i int) bool { return m.k[a[1].reg]>>i&1 != 0 }
		return m.moveLanes(src, dst, n, on, zeroing)
	}
}

// maskMove is VMASKMOVPS: the mask is the sign of each lane; a load sets the
// other lanes to zero, a store leaves them.
func maskMove(m *machine, a []operand) error {
	mask := m.vec[a[1].reg]
	return m.moveLanes(&a[0], &a[2], width(a), func(i int) bool { return mask[i]>>31 != 0 }, true)
}

func (m *machine) moveLanes(src, dst *operand, n int, on func(int) bool, zeroing bool) error {
	lane := func(o *operand, i int, write bool) ([]byte, error) {
		part := *o
		part.value += int64(4 * i)
		return m.bytes(&part, 4, write)
	}
	var v lanes
	if dst.kind == vector && !zeroing {
		v = m.vec[dst.reg]
	}
	for i := range n / 4 {
		if !on(i) {
			continue
		}
		if src.kind == vector {
			v[i] = m.vec[src.reg][i]
		} else {
			b, err := lane(src, i, false)
			if err != nil {
				return err
			}
			v[i] = binary.LittleEndian.Uint32(b)
		}
		if dst.kind == memory {
			b, err := lane(dst, i, true)
			if err != nil {
				return err
			}
			binary.LittleEndian.PutUint32(b, v[i])
		}
	}
	if dst.kind == memory {
		return nil
	}
	return m.store(dst, &v, n)
}

// moveScalar moves n bytes between memory and the low end of a register. A load
// clears the rest, which for the older encodings ends at 16 bytes.
func moveScalar(n int, vex bool) executor {
	return func(m *machine, a []operand) error {
		if (a[0].kind == memory) == (a[1].kind == memory) {
			return fmt.Errorf("want memory and a register")
		}
		v, err := m.load(&a[0], n)
		if err != nil {
			return err
		}
		if a[1].kind == memory {
			return m.store(&a[1], &v, n)
		}
		if !vex {
			copy(v[4:], m.vec[a[1].reg][4:])
		}
		return m.store(&a[1], &v, 64)
	}
}

func broadcast(m *machine, a []operand) error {
	v, err := m.load(&a[0], 4)
	if err != nil {
		return err
	}
	for i := range v {
		v[i] = v[0]
	}
	return m.store(&a[1], &v, a[1].width)
}

// insertHalf is VINSERTF128 $i, src, base, dst.
func insertHalf(m *machine, a []operand) error {
	part, err := m.load(&a[1], 16)
	if err != nil {
		return err
	}
	v := m.vec[a[2].reg]
	copy(v[4*(a[0].value&1):][:4], part[:4])
	return m.store(&a[3], &v, 32)
}

// extractHalf takes the lower or upper half of a register.
func extractHalf(m *machine, a []operand) error {
	half := a[1].width / 2
	var v lanes
	copy(v[:half/4], m.vec[a[1].reg][half/4*int(a[0].value&1):])
	return m.store(&a[2], &v, half)
}

// moveMask is KMOVW from memory or a general register.
func moveMask(m *machine, a []operand) error {
	if a[1].kind != opmask {
		return fmt.Errorf("want a mask register")
	}
	if a[0].kind == general {
		m.k[a[1].reg] = m.gp[a[0].reg] & 0xffff
		return nil
	}
	b, err := m.bytes(&a[0], 2, false)
	if err != nil {
		return err
	}
	m.k[a[1].reg] = uint64(binary.LittleEndian.Uint16(b))
	return nil
}
