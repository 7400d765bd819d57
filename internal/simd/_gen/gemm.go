package main

import (
	"fmt"
	"go/token"
	"go/types"

	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/gotypes"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Offsets into gemmArgs of package simd; a test there compares them.
const (
	argK          = 0
	argTiles      = 8
	argA          = 16
	argRsA        = 40
	argCsA        = 48
	argTileA      = 56
	argB          = 64
	argRsB        = 88
	argC          = 96
	argLdC        = 120
	argBias       = 128
	argAccumulate = 152
	argMask       = 160
	argTileB      = 168
	argTileK      = 176
	argOffB       = 184
)

// rowGroup is how many rows of A one pointer serves: (p), (p)(rs*1), (p)(rs*2).
const rowGroup = 3

// gemmAVX2 generates tiles of up to 6 rows by two or one vectors of 8: 12
// accumulators cover the latency of 4 cycles at two FMAs a cycle.
func gemmAVX2(c *build.Context) {
	for vecs := 1; vecs <= 2; vecs++ {
		for rows := 1; rows <= 6; rows++ {
			t := &tile{Context: c, rows: rows, vecs: vecs, lanes: 8, vec: func() reg.VecVirtual { return c.YMM() }}
			t.generate(fmt.Sprintf("gemmAVX2x%dx%d", rows, 8*vecs))
		}
	}
}

// gemmAVX512 generates tiles of up to 12 rows by two or one vectors of 16. The
// last vector is masked, so that any number of columns will do.
func gemmAVX512(c *build.Context) {
	for vecs := 1; vecs <= 2; vecs++ {
		for rows := 1; rows <= 12; rows++ {
			t := &tile{Context: c, rows: rows, vecs: vecs, lanes: 16, masked: true, vec: func() reg.VecVirtual { return c.ZMM() }}
			t.generate(fmt.Sprintf("gemmAVX512x%dx%d", rows, 16*vecs))
		}
	}
}

// gemmSignature is func(args *gemmArgs), with a type that avo can't look up since
// it lives in another module.
func gemmSignature() *gotypes.Signature {
	pkg := types.NewPackage("simd", "simd")
	args := types.NewNamed(types.NewTypeName(token.NoPos, pkg, "gemmArgs", nil), types.NewStruct(nil, nil), nil)
	g := types.NewParam(token.NoPos, pkg, "args", types.NewPointer(args))
	return gotypes.NewSignature(pkg, types.NewSignatureType(nil, nil, nil, types.NewTuple(g), nil, false))
}

// tile generates one micro-kernel.
type tile struct {
	*build.Context
	rows, vecs, lanes int
	masked            bool
	vec               func() reg.VecVirtual

	args            reg.Register
	rsA, csA        reg.Register
	rsB, ldC, cPtr  reg.Register
	bPtr, base, cnt reg.Register
	aPtr            []reg.Register
	acc             [][]reg.VecVirtual
	mask            reg.OpmaskVirtual
}

func (t *tile) arg(off int) Mem { return Mem{Base: t.args, Disp: off} }

// gp loads a field of the arguments; strides are turned into bytes.
func (t *tile) gp(off int, stride bool) reg.Register {
	r := t.GP64()
	t.MOVQ(t.arg(off), r)
	if stride {
		t.SHLQ(U8(2), r)
	}
	return r
}

func (t *tile) generate(name string) {
	textOf(t.Context, name, gemmSignature(),
		fmt.Sprintf("%s multiplies args.tiles tiles of %d rows by %d columns; see gemmArgs.", name, t.rows, t.vecs*t.lanes))
	t.args = t.Load(t.Param("args"), t.GP64())
	t.base = t.gp(argA, false)
	t.cPtr = t.gp(argC, false)
	t.rsA, t.csA = t.gp(argRsA, true), t.gp(argCsA, true)
	t.rsB, t.ldC = t.gp(argRsB, true), t.gp(argLdC, true)
	t.bPtr, t.cnt = t.GP64(), t.GP64()
	for i := 0; i < t.rows; i += rowGroup {
		t.aPtr = append(t.aPtr, t.GP64())
	}
	if t.masked {
		t.mask = t.K()
		t.KMOVW(t.arg(argMask), t.mask)
	}
	t.Label("tile")
	t.start()
	t.loop()
	t.epilogue()
	// The pointer to B lies where the garbage collector looks: an offset moves
	// on instead, so that it never leaves its object.
	step := t.GP64()
	t.MOVQ(t.arg(argTileA), step)
	t.LEAQ(Mem{Base: t.base, Index: step, Scale: 4}, t.base)
	t.MOVQ(t.arg(argTileB), step)
	t.SHLQ(U8(2), step)
	t.ADDQ(step, t.arg(argOffB))
	t.MOVQ(t.arg(argTileK), step)
	t.ADDQ(step, t.arg(argK))
	t.DECQ(t.arg(argTiles))
	t.JNZ(LabelRef("tile"))
	t.VZEROUPPER()
	t.RET()
}

// start points at the tile's first row and clears the accumulators.
func (t *tile) start() {
	step := t.GP64()
	t.LEAQ(Mem{Base: t.rsA, Index: t.rsA, Scale: 2}, step)
	t.MOVQ(t.base, t.aPtr[0])
	for i := 1; i < len(t.aPtr); i++ {
		t.LEAQ(Mem{Base: t.aPtr[i-1], Index: step, Scale: 1}, t.aPtr[i])
	}
	// The old C, or the lines to write, arrive while the sum is built.
	row := t.GP64()
	t.MOVQ(t.cPtr, row)
	for i := range t.rows {
		if i > 0 {
			t.ADDQ(t.ldC, row)
		}
		for off := 0; off < 4*t.lanes*t.vecs; off += 64 {
			t.PREFETCHT0(Mem{Base: row, Disp: off})
		}
	}
	t.MOVQ(t.arg(argB), t.bPtr)
	t.ADDQ(t.arg(argOffB), t.bPtr)
	t.MOVQ(t.arg(argK), t.cnt)
	t.acc = make([][]reg.VecVirtual, t.rows)
	for i := range t.acc {
		for range t.vecs {
			v := t.vec()
			t.clear(v)
			t.acc[i] = append(t.acc[i], v)
		}
	}
}

func (t *tile) clear(v reg.VecVirtual) {
	if t.masked {
		t.VPXORD(v, v, v)
		return
	}
	t.VXORPS(v, v, v)
}

// loop runs over k, four at a time and then the rest one by one.
func (t *tile) loop() {
	const unroll = 4
	t.SUBQ(U8(unroll), t.cnt)
	t.JLT(LabelRef("rest"))
	t.Label("four")
	for range unroll {
		t.step()
	}
	t.SUBQ(U8(unroll), t.cnt)
	t.JGE(LabelRef("four"))
	t.Label("rest")
	t.ADDQ(U8(unroll), t.cnt)
	t.JZ(LabelRef("sum"))
	t.Label("one")
	t.step()
	t.DECQ(t.cnt)
	t.JNZ(LabelRef("one"))
	t.Label("sum")
}

// step adds the outer product of a column of A and a row of B.
func (t *tile) step() {
	b := make([]reg.VecVirtual, t.vecs)
	for j := range b {
		b[j] = t.vec()
		m := Mem{Base: t.bPtr, Disp: 4 * t.lanes * j}
		if t.masked && j == t.vecs-1 {
			t.VMOVUPS_Z(m, t.mask, b[j])
		} else {
			t.VMOVUPS(m, b[j])
		}
	}
	t.ADDQ(t.rsB, t.bPtr)
	for i := range t.rows {
		p := t.aPtr[i/rowGroup]
		m := Mem{Base: p}
		if r := i % rowGroup; r > 0 {
			m.Index, m.Scale = t.rsA, uint8(r)
		}
		a := t.vec()
		t.VBROADCASTSS(m, a)
		for j := range b {
			t.VFMADD231PS(a, b[j], t.acc[i][j])
		}
		if i%rowGroup == rowGroup-1 || i == t.rows-1 {
			t.ADDQ(t.csA, p)
		}
	}
}

// epilogue adds the bias and the old C as asked, and stores.
func (t *tile) epilogue() {
	p := t.GP64()
	t.MOVQ(t.arg(argBias), p)
	t.TESTQ(p, p)
	t.JZ(LabelRef("nobias"))
	for j := range t.vecs {
		bias := t.vec()
		t.load(Mem{Base: p, Disp: 4 * t.lanes * j}, bias, j)
		for i := range t.rows {
			t.VADDPS(bias, t.acc[i][j], t.acc[i][j])
		}
	}
	t.Label("nobias")
	t.CMPQ(t.arg(argAccumulate), U8(0))
	t.JE(LabelRef("store"))
	q := t.GP64()
	t.MOVQ(t.cPtr, q)
	for i := range t.rows {
		for j, v := range t.acc[i] {
			old := t.vec()
			t.load(Mem{Base: q, Disp: 4 * t.lanes * j}, old, j)
			t.VADDPS(old, v, v)
		}
		t.ADDQ(t.ldC, q)
	}
	t.Label("store")
	for i := range t.rows {
		for j, v := range t.acc[i] {
			m := Mem{Base: t.cPtr, Disp: 4 * t.lanes * j}
			if t.masked && j == t.vecs-1 {
				t.VMOVUPS(v, t.mask, m)
			} else {
				t.VMOVUPS(v, m)
			}
		}
		t.ADDQ(t.ldC, t.cPtr)
	}
}

// load reads vector j of a row, the last one under the mask.
func (t *tile) load(m Mem, v reg.VecVirtual, j int) {
	if t.masked && j == t.vecs-1 {
		t.VMOVUPS_Z(m, t.mask, v)
		return
	}
	t.VMOVUPS(m, v)
}
