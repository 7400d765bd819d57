package main

import (
	"fmt"
	"math"

	"github.com/mmcloughlin/avo/attr"
	"github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// vecFamilies are the kernels on vectors: element-wise functions, norms,
// reductions, updates and conversions. One source gives both widths.
var vecFamilies = []family{
	{"vecbasic", bothWidths(vecBasic)},
	{"vecmath", bothWidths(vecMath)},
	{"vecnorm", bothWidths(vecNorm)},
	{"vecoptim", bothWidths(vecOptim)},
	{"vecreduce", bothWidths(vecReduce)},
	{"vecconvert", bothWidths(vecConvert)},
	{"vecdropout", bothWidths(vecDropout)},
}

// bothWidths generates a family for AVX2, then for AVX-512.
func bothWidths(f func(*vec)) func(*build.Context) {
	return func(c *build.Context) {
		data := map[string]Mem{}
		for _, lanes := range []int{8, 16} {
			f(&vec{Context: c, lanes: lanes, data: data})
		}
	}
}

// vec generates kernels of one vector width. A kernel is begun with fn, names
// the constants it wants in registers with hold, and runs its body with each.
type vec struct {
	*build.Context
	lanes  int            // float32 elements of a vector: 8 for AVX2, 16 for AVX-512
	data   map[string]Mem // constants of the file
	held   map[uint32]reg.VecVirtual
	index  reg.GPVirtual // elements done, as each counts them
	mask   reg.Register  // of the last elements, nil while vectors are whole
	labels int
}

func (v *vec) wide() bool { return v.lanes == 16 }

// fn begins the function name + AVX2 or AVX512.
func (v *vec) fn(name, signature, doc string) {
	full := name + "AVX2"
	if v.wide() {
		full = name + "AVX512"
	}
	text(v.Context, full, signature, full+" "+doc)
	v.held, v.mask, v.index = map[uint32]reg.VecVirtual{}, nil, nil
}

// end returns, and interleaves the function's chains.
func (v *vec) end() {
	v.VZEROUPPER()
	v.RET()
	file, err := v.Result()
	if err != nil {
		panic(err)
	}
	f := file.Functions()[len(file.Functions())-1]
	f.Nodes = interleave(f.Nodes)
}

func (v *vec) reg() reg.VecVirtual {
	if v.wide() {
		return v.ZMM()
	}
	return v.YMM()
}

func (v *vec) ptr(param string) reg.Register { return v.Load(v.Param(param).Base(), v.GP64()) }
func (v *vec) len(param string) reg.Register { return v.Load(v.Param(param).Len(), v.GP64()) }

// scalar fills a vector with a float32 parameter.
func (v *vec) scalar(param string) reg.VecVirtual {
	b, err := v.Param(param).Resolve()
	if err != nil {
		panic(err)
	}
	r := v.reg()
	v.VBROADCASTSS(b.Addr, r)
	return r
}

// global is read-only data of the file, made at its first use.
func (v *vec) global(name string, words []Constant) Mem {
	if m, ok := v.data[name]; ok {
		return m
	}
	m := v.StaticGlobal(name)
	v.DataAttributes(attr.RODATA | attr.NOPTR)
	off := 0
	for _, w := range words {
		v.AddDatum(off, w)
		off += w.Bytes()
	}
	v.data[name] = m
	return m
}

// bits is a constant, 64 bytes of it, as a memory operand.
func (v *vec) bits(b uint32) Mem {
	words := make([]Constant, 16)
	for i := range words {
		words[i] = U32(b)
	}
	return v.global(fmt.Sprintf("x%08x", b), words)
}

// f32 is the bits of a float32.
func f32(x float64) uint32 { return math.Float32bits(float32(x)) }

// hold keeps constants in registers during the loop: all of them in AVX-512,
// which has 32 registers, the first few of them in AVX2.
func (v *vec) hold(few int, constants ...uint32) {
	for i, b := range constants {
		if _, ok := v.held[b]; ok || !v.wide() && i >= few {
			continue
		}
		r := v.reg()
		v.VMOVUPS(v.bits(b), r)
		v.held[b] = r
	}
}

// k is a constant as an operand that may be memory (the first one, in Go's order).
func (v *vec) k(b uint32) Op {
	if r, ok := v.held[b]; ok {
		return r
	}
	return v.bits(b)
}

// kreg is a constant in a register, which must not be written.
func (v *vec) kreg(b uint32) reg.VecVirtual {
	if r, ok := v.held[b]; ok {
		return r
	}
	return v.kcopy(b)
}

// kcopy is a constant in a register of its own.
func (v *vec) kcopy(b uint32) reg.VecVirtual {
	r := v.reg()
	if h, ok := v.held[b]; ok {
		v.VMOVAPS(h, r)
	} else {
		v.VMOVUPS(v.bits(b), r)
	}
	return r
}

func (v *vec) label(name string) string {
	v.labels++
	return fmt.Sprintf("%s%d", name, v.labels)
}

// each runs body over n elements: unroll vectors at a time, then one, then the
// last elements under a mask. body(u) handles vector u of the group; the bodies
// of a group are interleaved, so they may not depend on one another.
func (v *vec) each(n reg.Register, unroll int, body func(u int)) {
	v.blocks(n, unroll, func(vecs int) { v.chains(vecs, body) })
}

// blocks is each for a body that handles a group of vecs vectors at once.
func (v *vec) blocks(n reg.Register, vecs int, body func(vecs int)) {
	one, tail, done := v.label("one"), v.label("tail"), v.label("done")
	v.index = v.GP64()
	rest := v.GP64()
	v.XORQ(v.index, v.index)
	v.MOVQ(n, rest)
	if vecs > 1 {
		many, few := v.label("many"), v.label("few")
		v.SUBQ(I32(vecs*v.lanes), rest)
		v.JLT(LabelRef(few))
		v.Label(many)
		body(vecs)
		v.ADDQ(I32(vecs*v.lanes), v.index)
		v.SUBQ(I32(vecs*v.lanes), rest)
		v.JGE(LabelRef(many))
		v.Label(few)
		v.ADDQ(I32(vecs*v.lanes), rest)
	}
	v.SUBQ(I32(v.lanes), rest)
	v.JLT(LabelRef(tail))
	v.Label(one)
	body(1)
	v.ADDQ(I32(v.lanes), v.index)
	v.SUBQ(I32(v.lanes), rest)
	v.JGE(LabelRef(one))
	v.Label(tail)
	v.ADDQ(I32(v.lanes), rest)
	v.JZ(LabelRef(done))
	v.maskFor(rest)
	body(1)
	v.mask = nil
	v.Label(done)
}

// whole runs body over n elements, a multiple of the vector's length.
func (v *vec) whole(n reg.Register, body func()) {
	one, done := v.label("one"), v.label("done")
	v.index = v.GP64()
	v.XORQ(v.index, v.index)
	v.CMPQ(v.index, n)
	v.JGE(LabelRef(done))
	v.Label(one)
	body()
	v.ADDQ(I32(v.lanes), v.index)
	v.CMPQ(v.index, n)
	v.JLT(LabelRef(one))
	v.Label(done)
}

// maskFor makes the mask of the first rest elements, 0 < rest < lanes.
func (v *vec) maskFor(rest reg.Register) {
	table := v.GP64()
	if v.wide() {
		words := make([]Constant, 16)
		for i := range words {
			words[i] = U16(1<<i - 1)
		}
		v.LEAQ(v.global("masks", words), table)
		k := v.K()
		v.KMOVW(Mem{Base: table, Index: rest, Scale: 2}, k)
		v.mask = k
		return
	}
	words := make([]Constant, 16)
	for i := range words {
		words[i] = U32(0)
		if i < 8 {
			words[i] = U32(math.MaxUint32)
		}
	}
	v.LEAQ(v.global("window", words), table)
	neg, m := v.GP64(), v.YMM()
	v.MOVQ(rest, neg)
	v.NEGQ(neg)
	v.VMOVUPS(Mem{Base: table, Index: neg, Scale: 4, Disp: 32}, m)
	v.mask = m
}

func (v *vec) at(p reg.Register, u int) Mem {
	return Mem{Base: p, Index: v.index, Scale: 4, Disp: 4 * v.lanes * u}
}

// load reads vector u at p, or the masked rest of it, with zeros behind.
func (v *vec) load(p reg.Register, u int) reg.VecVirtual {
	r := v.reg()
	switch {
	case v.mask == nil:
		v.VMOVUPS(v.at(p, u), r)
	case v.wide():
		v.VMOVUPS_Z(v.at(p, u), v.mask, r)
	default:
		v.VMASKMOVPS(v.at(p, u), v.mask, r)
	}
	return r
}

// store writes what load reads.
func (v *vec) store(r reg.Register, p reg.Register, u int) {
	switch {
	case v.mask == nil:
		v.VMOVUPS(r, v.at(p, u))
	case v.wide():
		v.VMOVUPS(r, v.mask, v.at(p, u))
	default:
		v.VMASKMOVPS(r, v.mask, v.at(p, u))
	}
}

// zeroRest clears the elements of r behind the mask.
func (v *vec) zeroRest(r reg.VecVirtual) {
	switch {
	case v.mask == nil:
	case v.wide():
		v.VMOVUPS_Z(r, v.mask, r)
	default:
		v.VANDPS(v.mask, r, r)
	}
}

// Predicates of VCMPPS; on a NaN only unordered is true.
const (
	lessThan  = 17
	unordered = 3
	equal     = 0
)

// cmp compares a with b, which may be memory.
func (v *vec) cmp(predicate int, a reg.Register, b Op) reg.Register {
	if v.wide() {
		k := v.K()
		v.VCMPPS(U8(predicate), b, a, k)
		return k
	}
	m := v.YMM()
	v.VCMPPS(U8(predicate), b, a, m)
	return m
}

// blend replaces the elements of r under mask m by those of x.
func (v *vec) blend(m reg.Register, x Op, r reg.VecVirtual) {
	if v.wide() {
		v.VBLENDMPS(x, r, m, r)
		return
	}
	v.VBLENDVPS(m, x, r, r)
}

// canonical replaces NaNs by the one that package simd promises.
func (v *vec) canonical(r reg.VecVirtual) {
	v.blend(v.cmp(unordered, r, r), v.k(canonicalNaN), r)
}

const canonicalNaN = 0x7fc00000

// zero is a vector of zeros.
func (v *vec) zero() reg.VecVirtual {
	r := v.reg()
	v.VXORPS(r, r, r)
	return r
}

// zeros is n of them.
func (v *vec) zeros(n int) []reg.VecVirtual {
	rs := make([]reg.VecVirtual, n)
	for i := range rs {
		rs[i] = v.zero()
	}
	return rs
}

// fold combines accumulators, then the elements of what remains in halves, with
// op (VADDPS or VMAXPS); the result is element 0 of the vector returned.
func (v *vec) fold(op func(...Op), acc []reg.VecVirtual) reg.VecVirtual {
	for n := len(acc) / 2; n > 0; n /= 2 {
		for i := range n {
			op(acc[i+n], acc[i], acc[i])
		}
	}
	r := acc[0]
	if v.wide() {
		h := v.YMM()
		v.VEXTRACTF64X4(U8(1), r, h)
		op(h, r.AsY(), r.AsY())
	}
	h := v.XMM()
	v.VEXTRACTF128(U8(1), r.AsY(), h)
	op(h, r.AsX(), r.AsX())
	v.VPERMILPS(U8(0b1110), r.AsX(), h)
	op(h, r.AsX(), r.AsX())
	v.VPERMILPS(U8(1), r.AsX(), h)
	op(h, r.AsX(), r.AsX())
	return r
}

// result stores element 0 of r as result number i.
func (v *vec) result(r reg.VecVirtual, i int) { v.Store(r.AsX(), v.ReturnIndex(i)) }
