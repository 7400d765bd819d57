package asmsim

import (
	"encoding/binary"
	"fmt"
	"math"
)

// Region is memory that a function may use.
type Region struct {
	Base uint64 // address of Data[0]
	Data []byte
}

// lanes is the content of a vector register: 16 lanes of 32 bits.
type lanes [16]uint32

// machine is the state of the processor while a function runs.
type machine struct {
	gp         [16]uint64
	vec        [32]lanes
	k          [8]uint64
	zero, less bool // flags: ZF, and SF≠OF
	frame      []byte
	mem        []Region
	prog       *Program
	pc         int
	returned   bool
}

// maxSteps bounds a run: no kernel call in a test takes longer.
const maxSteps = 1 << 28

// Run calls a function with its frame of arguments, which also takes the
// results, and the memory that the arguments point to.
func (p *Program) Run(name string, frame []byte, mem []Region) error {
	f := p.funcs[name]
	if f == nil {
		return fmt.Errorf("asmsim: no function %s", name)
	}
	if len(frame) != f.args {
		return fmt.Errorf("asmsim: %s has %d bytes of arguments, its signature %d", name, f.args, len(frame))
	}
	m := &machine{prog: p, frame: frame, mem: mem}
	for i := range m.gp {
		m.gp[i] = 0xdead_beef_0000_0000 + uint64(i)
	}
	for i := range m.vec {
		for j := range m.vec[i] {
			m.vec[i][j] = 0x7fde_ad00 + uint32(i)
		}
	}
	for steps := 0; !m.returned; steps++ {
		if m.pc >= len(f.insts) {
			return fmt.Errorf("asmsim: %s runs past its end", name)
		}
		if steps == maxSteps {
			return fmt.Errorf("asmsim: %s: no end after %d instructions", name, maxSteps)
		}
		in := &f.insts[m.pc]
		in.seen = true
		m.pc++
		if err := in.exec(m, in.args); err != nil {
			return fmt.Errorf("asmsim: %s: %s: %w", name, in.text, err)
		}
	}
	return nil
}

// Unexecuted lists the instructions of a function that no Run has reached.
func (p *Program) Unexecuted(name string) []string {
	var missing []string
	for _, in := range p.funcs[name].insts {
		if !in.seen {
			missing = append(missing, in.text)
		}
	}
	return missing
}

// Functions lists the names of all functions.
func (p *Program) Functions() []string {
	var names []string
	for name := range p.funcs {
		names = append(names, name)
	}
	return names
}

// address computes where a memory operand points.
func (m *machine) address(o *operand) uint64 {
	if o.name != "" {
		return m.prog.syms[o.scope+o.name] + uint64(o.value)
	}
	a := m.gp[o.reg] + uint64(o.value)
	if o.index >= 0 {
		a += m.gp[o.index] * uint64(o.scale)
	}
	return a
}

// bytes finds the n bytes of a memory operand, all of them in one region.
func (m *machine) bytes(o *operand, n int, write bool) ([]byte, error) {
	if o.frame {
		if o.value < 0 || int(o.value)+n > len(m.frame) {
			return nil, fmt.Errorf("%d bytes at %d of %d bytes of arguments", n, o.value, len(m.frame))
		}
		return m.frame[o.value:][:n], nil
	}
	a := m.address(o)
	if b := find(m.mem, a, n); b != nil {
		return b, nil
	}
	if b := find(m.prog.data, a, n); b != nil && !write {
		return b, nil
	}
	return nil, fmt.Errorf("no memory of %d bytes at %#x%s", n, a, m.nearest(a))
}

func find(regions []Region, a uint64, n int) []byte {
	for i := range regions {
		r := &regions[i]
		if off := a - r.Base; a >= r.Base && off+uint64(n) <= uint64(len(r.Data)) {
			return r.Data[off : off+uint64(n)]
		}
	}
	return nil
}

// nearest describes where an address lies, for the error.
func (m *machine) nearest(a uint64) string {
	best, text := uint64(math.MaxUint64), ""
	for i, r := range m.mem {
		end := r.Base + uint64(len(r.Data))
		d, side := a-end, "behind"
		if a < r.Base {
			d, side = r.Base-a, "before"
		} else if a < end {
			d, side = end-a, "before the end of"
		}
		if d < best {
			best, text = d, fmt.Sprintf(", %d bytes %s region %d (%d bytes)", d, side, i, len(r.Data))
		}
	}
	return text
}

// load reads n bytes of a register or memory operand into lanes.
func (m *machine) load(o *operand, n int) (v lanes, err error) {
	if o.kind == vector {
		v = m.vec[o.reg]
		clear(v[n/4:])
		return v, nil
	}
	b, err := m.bytes(o, n, false)
	if err != nil {
		return v, err
	}
	for i := 0; i < n; i += 4 {
		v[i/4] = binary.LittleEndian.Uint32(b[i:])
	}
	return v, nil
}

// store writes n bytes to memory, or to a register whose rest becomes zero.
func (m *machine) store(o *operand, v *lanes, n int) error {
	if o.kind == vector {
		m.vec[o.reg] = *v
		clear(m.vec[o.reg][n/4:])
		return nil
	}
	b, err := m.bytes(o, n, true)
	if err != nil {
		return err
	}
	for i := 0; i < n; i += 4 {
		binary.LittleEndian.PutUint32(b[i:], v[i/4])
	}
	return nil
}

// get reads a 64-bit integer operand.
func (m *machine) get(o *operand) (uint64, error) {
	switch o.kind {
	case immediate:
		return uint64(o.value), nil
	case general:
		return m.gp[o.reg], nil
	case memory:
		b, err := m.bytes(o, 8, false)
		if err != nil {
			return 0, err
		}
		return binary.LittleEndian.Uint64(b), nil
	}
	return 0, fmt.Errorf("not an integer operand")
}

// put writes a 64-bit integer operand.
func (m *machine) put(o *operand, v uint64) error {
	switch o.kind {
	case general:
		m.gp[o.reg] = v
		return nil
	case memory:
		b, err := m.bytes(o, 8, true)
		if err == nil {
			binary.LittleEndian.PutUint64(b, v)
		}
		return err
	}
	return fmt.Errorf("not an integer destination")
}
