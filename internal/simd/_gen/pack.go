package main

import (
	"fmt"

	"github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// pack generates what brings a panel of a matrix into the order in which the
// micro-kernels read it. AVX2 suffices: the AVX-512 kernels use these, too.
func pack(c *build.Context) {
	for _, width := range []int{6, 8, 12, 16, 32} {
		copyRows(c, width)
	}
	transpose8(c)
}

// copyRows copies rows of a fixed width.
func copyRows(c *build.Context, width int) {
	name := fmt.Sprintf("copyRows%d", width)
	text(c, name, "func(dst, src []float32, n, stride int)",
		fmt.Sprintf("%s copies n rows of %d elements, stride apart, to contiguous rows.", name, width))
	dst, src := c.Load(c.Param("dst").Base(), c.GP64()), c.Load(c.Param("src").Base(), c.GP64())
	n, stride := c.Load(c.Param("n"), c.GP64()), c.Load(c.Param("stride"), c.GP64())
	c.SHLQ(U8(2), stride)
	c.Label("row")
	// The next panel lies beside this one, out of reach of hardware prefetchers,
	// which stop at pages.
	for off := 0; off < 4*width; off += 64 {
		c.PREFETCHT1(Mem{Base: src, Disp: 4*width + off})
	}
	for off := 0; off < width; {
		from, to := Mem{Base: src, Disp: 4 * off}, Mem{Base: dst, Disp: 4 * off}
		switch left := width - off; {
		case left >= 8 && width%8 == 0:
			v := c.YMM()
			c.VMOVUPS(from, v)
			c.VMOVUPS(v, to)
			off += 8
		case left >= 4:
			v := c.XMM()
			c.VMOVUPS(from, v)
			c.VMOVUPS(v, to)
			off += 4
		default:
			v := c.XMM()
			c.VMOVSD(from, v)
			c.VMOVSD(v, to)
			off += 2
		}
	}
	c.ADDQ(stride, src)
	c.ADDQ(U32(4*width), dst)
	c.DECQ(n)
	c.JNZ(LabelRef("row"))
	c.VZEROUPPER()
	c.RET()
}

// transpose8 turns 8 contiguous runs into rows of 8.
func transpose8(c *build.Context) {
	text(c, "transpose8", "func(dst []float32, dstStride int, src []float32, srcStride, blocks int)",
		"transpose8 sets dst[i*dstStride+j] = src[j*srcStride+i] for j < 8, i < 8*blocks.")
	dst, src := c.Load(c.Param("dst").Base(), c.GP64()), c.Load(c.Param("src").Base(), c.GP64())
	ds, ss := c.Load(c.Param("dstStride"), c.GP64()), c.Load(c.Param("srcStride"), c.GP64())
	n := c.Load(c.Param("blocks"), c.GP64())
	c.SHLQ(U8(2), ds)
	c.SHLQ(U8(2), ss)
	ss3, ds3, p, q := c.GP64(), c.GP64(), c.GP64(), c.GP64()
	c.LEAQ(Mem{Base: ss, Index: ss, Scale: 2}, ss3)
	c.LEAQ(Mem{Base: ds, Index: ds, Scale: 2}, ds3)
	row := func(base, far reg.Register, s, s3 reg.Register, i int) Mem {
		m := Mem{Base: base}
		if i >= 4 {
			m.Base = far
		}
		switch i % 4 {
		case 1, 2:
			m.Index, m.Scale = s, uint8(i%4)
		case 3:
			m.Index, m.Scale = s3, 1
		}
		return m
	}
	c.Label("block")
	c.LEAQ(Mem{Base: src, Index: ss, Scale: 4}, p)
	c.LEAQ(Mem{Base: dst, Index: ds, Scale: 4}, q)
	// Rows j and j+4 share a register, so that the rest stays within lanes.
	var r [8]reg.VecVirtual
	for i := range 4 {
		lo, hi := c.YMM(), c.YMM()
		for half, v := range []reg.VecVirtual{lo, hi} {
			x := row(src, p, ss, ss3, i)
			x.Disp = 16 * half
			y := row(src, p, ss, ss3, i+4)
			y.Disp = 16 * half
			c.VMOVUPS(x, v.AsX())
			c.VINSERTF128(U8(1), y, v, v)
		}
		r[i], r[i+4] = lo, hi
	}
	for half := 0; half < 8; half += 4 {
		t := [4]reg.VecVirtual{c.YMM(), c.YMM(), c.YMM(), c.YMM()}
		c.VUNPCKLPS(r[half+1], r[half], t[0])
		c.VUNPCKHPS(r[half+1], r[half], t[1])
		c.VUNPCKLPS(r[half+3], r[half+2], t[2])
		c.VUNPCKHPS(r[half+3], r[half+2], t[3])
		for i := range 4 {
			v := c.YMM()
			if i%2 == 0 {
				c.VUNPCKLPD(t[2+i/2], t[i/2], v)
			} else {
				c.VUNPCKHPD(t[2+i/2], t[i/2], v)
			}
			c.VMOVUPS(v, row(dst, q, ds, ds3, half+i))
		}
	}
	c.ADDQ(U8(32), src)
	c.LEAQ(Mem{Base: dst, Index: ds, Scale: 8}, dst)
	c.DECQ(n)
	c.JNZ(LabelRef("block"))
	c.VZEROUPPER()
	c.RET()
}
