package asmsim

import (
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"
)

// Program is a set of assembled functions and the data they refer to.
type Program struct {
	funcs map[string]*function
	data  []Region          // read-only
	syms  map[string]uint64 // file + symbol → address
}

// dataBase is where data symbols go: far from any address of the Go heap.
const dataBase = 1 << 20

// function is a TEXT block.
type function struct {
	name  string
	insts []inst
	args  int // bytes of arguments and results
}

// inst is a decoded instruction.
type inst struct {
	op   string
	args []operand
	exec executor
	text string // file:line: source
	seen bool   // executed at least once
}

type operandKind uint8

const (
	immediate operandKind = iota
	general               // a general-purpose register
	vector                // X, Y or Z
	opmask                // K
	memory
	target // of a jump
)

// operand is one operand of an instruction.
type operand struct {
	kind        operandKind
	reg         int // number of the register, or the base of a memory operand, −1 without
	index       int // −1 without
	scale       int64
	value       int64 // immediate, displacement, or index of the target instruction
	width       int   // bytes of a vector register
	frame       bool  // relative to the arguments
	name, scope string
}

var generalNames = []string{"AX", "CX", "DX", "BX", "SP", "BP", "SI", "DI",
	"R8", "R9", "R10", "R11", "R12", "R13", "R14", "R15"}

// Parse reads assembly files, given as name → text.
func Parse(files map[string]string) (*Program, error) {
	p := &Program{funcs: map[string]*function{}, syms: map[string]uint64{}}
	for name, text := range files {
		f := &parser{Program: p, file: name}
		for n, line := range strings.Split(text, "\n") {
			f.where = fmt.Sprintf("%s:%d: %s", name, n+1, strings.TrimSpace(line))
			if err := f.line(line); err != nil {
				return nil, fmt.Errorf("asmsim: %s: %w", f.where, err)
			}
		}
		if err := f.finish(); err != nil {
			return nil, fmt.Errorf("asmsim: %s: %w", name, err)
		}
	}
	for _, f := range p.funcs {
		if err := p.link(f); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// parser reads one file.
type parser struct {
	*Program
	file, where string
	fn          *function
	labels      map[string]int
}

func (p *parser) line(line string) error {
	line, _, _ = strings.Cut(line, "//")
	line = strings.TrimSpace(line)
	op, rest, _ := strings.Cut(line, " ")
	switch {
	case line == "" || line[0] == '#':
		return nil
	case op == "TEXT":
		return p.begin(rest)
	case op == "DATA":
		return p.datum(rest)
	case op == "GLOBL":
		return p.global(rest)
	case strings.HasSuffix(line, ":"):
		p.labels[strings.TrimSuffix(line, ":")] = len(p.fn.insts)
		return nil
	case p.fn == nil:
		return fmt.Errorf("instruction outside a function")
	}
	in := inst{op: op, text: p.where}
	for _, s := range strings.Split(rest, ",") {
		if s = strings.TrimSpace(s); s == "" {
			continue
		}
		o, err := p.operand(s)
		if err != nil {
			return err
		}
		in.args = append(in.args, o)
	}
	p.fn.insts = append(p.fn.insts, in)
	return nil
}

// begin reads «·name(SB), NOSPLIT, $0-56».
func (p *parser) begin(s string) error {
	if err := p.finish(); err != nil {
		return err
	}
	name, _, ok := strings.Cut(strings.TrimPrefix(s, "·"), "(SB)")
	frame := s[strings.LastIndex(s, "$")+1:]
	locals, args, ok2 := strings.Cut(frame, "-")
	if !ok || !ok2 || locals != "0" {
		return fmt.Errorf("want name(SB), flags, $0-n")
	}
	n, err := strconv.Atoi(args)
	if err != nil {
		return err
	}
	if p.funcs[name] != nil {
		return fmt.Errorf("%s is defined twice", name)
	}
	p.fn, p.labels = &function{name: name, args: n}, map[string]int{}
	p.funcs[name] = p.fn
	return nil
}

// finish resolves the jumps of the function that ends here.
func (p *parser) finish() error {
	if p.fn == nil {
		return nil
	}
	for i := range p.fn.insts {
		for j := range p.fn.insts[i].args {
			o := &p.fn.insts[i].args[j]
			if o.kind != target {
				continue
			}
			at, ok := p.labels[o.name]
			if !ok {
				return fmt.Errorf("%s: no label %s", p.fn.name, o.name)
			}
			o.value = int64(at)
		}
	}
	return nil
}

// datum reads «sym<>+0(SB)/4, $0x3f800000».
func (p *parser) datum(s string) error {
	where, value, _ := strings.Cut(s, ",")
	where, size, _ := strings.Cut(where, "/")
	o, err := p.operand(where)
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(strings.TrimSpace(size))
	if err != nil {
		return err
	}
	v, err := p.operand(strings.TrimSpace(value))
	if err != nil {
		return err
	}
	key := o.scope + o.name
	if _, ok := p.syms[key]; !ok {
		p.syms[key] = dataBase + uint64(len(p.data))<<16
		p.data = append(p.data, Region{Base: p.syms[key]})
	}
	r := &p.data[(p.syms[key]-dataBase)>>16]
	if int64(len(r.Data)) != o.value {
		return fmt.Errorf("data of %s isn't in order", o.name)
	}
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], uint64(v.value))
	r.Data = append(r.Data, b[:n]...)
	return nil
}

// global reads «sym<>(SB), RODATA|NOPTR, $64», behind the data.
func (p *parser) global(s string) error {
	name, _, _ := strings.Cut(s, "<>")
	size, err := strconv.Atoi(s[strings.LastIndex(s, "$")+1:])
	if err != nil {
		return err
	}
	base, ok := p.syms[p.file+name]
	if !ok || len(p.data[(base-dataBase)>>16].Data) != size {
		return fmt.Errorf("want %d bytes of data", size)
	}
	return nil
}

func (p *parser) operand(s string) (operand, error) {
	o := operand{reg: -1, index: -1, scope: p.file}
	if v, ok := strings.CutPrefix(s, "$"); ok {
		n, err := parseInt(v)
		o.kind, o.value = immediate, n
		return o, err
	}
	if strings.Contains(s, "(") {
		return p.address(s, o)
	}
	for i, name := range generalNames {
		if s == name {
			o.kind, o.reg = general, i
			return o, nil
		}
	}
	if n, err := strconv.Atoi(s[1:]); err == nil && n >= 0 && n < 32 {
		o.reg = n
		switch s[0] {
		case 'X', 'Y', 'Z':
			o.kind, o.width = vector, 16<<(s[0]-'X')
			return o, nil
		case 'K':
			o.kind = opmask
			return o, nil
		}
	}
	o.kind, o.name = target, s
	return o, nil
}

// address reads «8(AX)(BX*4)», «x+8(FP)» or «sym<>+0(SB)».
func (p *parser) address(s string, o operand) (operand, error) {
	o.kind = memory
	first, rest, _ := strings.Cut(s, "(")
	base, index, _ := strings.Cut(rest, ")")
	switch base {
	case "FP", "SB":
		name, off, ok := strings.Cut(first, "+")
		if !ok {
			return o, fmt.Errorf("want name+offset in %q", s)
		}
		n, err := parseInt(off)
		o.value, o.frame = n, base == "FP"
		if base == "SB" {
			o.name = strings.TrimSuffix(name, "<>")
		}
		return o, err
	}
	if first != "" {
		n, err := parseInt(first)
		if err != nil {
			return o, err
		}
		o.value = n
	}
	var err error
	if o.reg, err = generalNumber(base); err != nil || index == "" {
		return o, err
	}
	name, scale, _ := strings.Cut(strings.Trim(index, "()"), "*")
	if o.index, err = generalNumber(name); err != nil {
		return o, err
	}
	o.scale, err = strconv.ParseInt(scale, 10, 64)
	return o, err
}

func generalNumber(s string) (int, error) {
	for i, name := range generalNames {
		if s == name {
			return i, nil
		}
	}
	return -1, fmt.Errorf("no register %q", s)
}

// parseInt takes decimal and hexadecimal, signed or as 64 bits.
func parseInt(s string) (int64, error) {
	s = strings.TrimPrefix(s, "+")
	if n, err := strconv.ParseInt(s, 0, 64); err == nil {
		return n, nil
	}
	n, err := strconv.ParseUint(s, 0, 64)
	return int64(n), err
}
