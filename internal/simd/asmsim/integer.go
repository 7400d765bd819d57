package asmsim

import "fmt"

// executor runs one instruction.
type executor func(m *machine, args []operand) error

// link finds the executors of a function's instructions.
func (p *Program) link(f *function) error {
	for i := range f.insts {
		in := &f.insts[i]
		e, ok := executors[in.op]
		if !ok {
			return fmt.Errorf("asmsim: unknown instruction: %s", in.text)
		}
		if len(in.args) < e.least || len(in.args) > e.most {
			return fmt.Errorf("asmsim: want %d to %d operands: %s", e.least, e.most, in.text)
		}
		for _, o := range in.args {
			if _, ok := p.syms[o.scope+o.name]; o.kind == memory && o.name != "" && !ok {
				return fmt.Errorf("asmsim: no symbol %s: %s", o.name, in.text)
			}
		}
		in.exec = e.run
	}
	return nil
}

// entry is an instruction with its number of operands.
type entry struct {
	least, most int
	run         executor
}

var executors = merge(integerOps, moveOps, arithmeticOps, shuffleOps, convertOps, quadOps)

func merge(tables ...map[string]entry) map[string]entry {
	all := map[string]entry{}
	for _, t := range tables {
		for op, e := range t {
			all[op] = e
		}
	}
	return all
}

// integerOps are the general-purpose instructions and jumps.
var integerOps = map[string]entry{
	"MOVQ": {2, 2, func(m *machine, a []operand) error {
		v, err := m.get(&a[0])
		if err != nil {
			return err
		}
		return m.put(&a[1], v)
	}},
	"LEAQ": {2, 2, func(m *machine, a []operand) error {
		if a[0].kind != memory || a[0].frame {
			return fmt.Errorf("not an address")
		}
		return m.put(&a[1], m.address(&a[0]))
	}},
	"ADDQ": {2, 2, combine(func(m *machine, d, s uint64) uint64 {
		r := d + s
		m.flags(r, (d^r)&(s^r)>>63 != 0)
		return r
	})},
	"SUBQ":  {2, 2, combine(func(m *machine, d, s uint64) uint64 { return m.subtract(d, s) })},
	"XORQ":  {2, 2, combine(func(m *machine, d, s uint64) uint64 { return m.logic(d ^ s) })},
	"ANDQ":  {2, 2, combine(func(m *machine, d, s uint64) uint64 { return m.logic(d & s) })},
	"SHLQ":  {2, 2, combine(func(m *machine, d, s uint64) uint64 { return m.logic(d << (s & 63)) })},
	"IMULQ": {2, 2, combine(func(_ *machine, d, s uint64) uint64 { return d * s })}, // leaves ZF and SF undefined
	"INCQ": {1, 1, unary(func(m *machine, d uint64) uint64 {
		m.flags(d+1, d+1 == 1<<63)
		return d + 1
	})},
	"DECQ": {1, 1, unary(func(m *machine, d uint64) uint64 { return m.subtract(d, 1) })},
	"NEGQ": {1, 1, unary(func(m *machine, d uint64) uint64 { return m.subtract(0, d) })},
	"CMPQ": {2, 2, compare(func(m *machine, x, y uint64) { m.subtract(x, y) })},
	"TESTQ": {2, 2, compare(func(m *machine, x, y uint64) {
		m.logic(x & y)
	})},
	"JMP": {1, 1, jump(func(*machine) bool { return true })},
	"JZ":  {1, 1, jump(func(m *machine) bool { return m.zero })},
	"JE":  {1, 1, jump(func(m *machine) bool { return m.zero })},
	"JEQ": {1, 1, jump(func(m *machine) bool { return m.zero })},
	"JNZ": {1, 1, jump(func(m *machine) bool { return !m.zero })},
	"JNE": {1, 1, jump(func(m *machine) bool { return !m.zero })},
	"JLT": {1, 1, jump(func(m *machine) bool { return m.less })},
	"JGE": {1, 1, jump(func(m *machine) bool { return !m.less })},
	"JLE": {1, 1, jump(func(m *machine) bool { return m.less || m.zero })},
	"JGT": {1, 1, jump(func(m *machine) bool { return !m.less && !m.zero })},
	"RET": {0, 0, func(m *machine, _ []operand) error {
		m.returned = true
		return nil
	}},
	"PREFETCHT0": {1, 1, nothing}, // any address will do
	"PREFETCHT1": {1, 1, nothing},
}

func nothing(*machine, []operand) error { return nil }

// flags sets the flags of an arithmetic result.
func (m *machine) flags(r uint64, overflow bool) {
	m.zero, m.less = r == 0, (r>>63 != 0) != overflow
}

func (m *machine) subtract(x, y uint64) uint64 {
	r := x - y
	m.flags(r, (x^y)&(x^r)>>63 != 0)
	return r
}

func (m *machine) logic(r uint64) uint64 {
	m.flags(r, false)
	return r
}

// combine is an instruction that sets its second operand.
func combine(f func(m *machine, d, s uint64) uint64) executor {
	return func(m *machine, a []operand) error {
		s, err := m.get(&a[0])
		if err != nil {
			return err
		}
		d, err := m.get(&a[1])
		if err != nil {
			return err
		}
		return m.put(&a[1], f(m, d, s))
	}
}

func unary(f func(m *machine, d uint64) uint64) executor {
	return func(m *machine, a []operand) error {
		d, err := m.get(&a[0])
		if err != nil {
			return err
		}
		return m.put(&a[0], f(m, d))
	}
}

func compare(f func(m *machine, x, y uint64)) executor {
	return func(m *machine, a []operand) error {
		x, err := m.get(&a[0])
		if err != nil {
			return err
		}
		y, err := m.get(&a[1])
		if err != nil {
			return err
		}
		f(m, x, y)
		return nil
	}
}

func jump(taken func(*machine) bool) executor {
	return func(m *machine, a []operand) error {
		if taken(m) {
			m.pc = int(a[0].value)
		}
		return nil
	}
}
