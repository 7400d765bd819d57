package main

import (
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// vecNorm generates one row of layer norm and its gradients.
func vecNorm(v *vec) {
	v.layerNorm()
	v.layerNormGradInput()
	v.layerNormGradParams()
}

// broadcast fills a vector with element 0 of r.
func (v *vec) broadcast(r reg.VecVirtual) reg.VecVirtual {
	b := v.reg()
	v.VBROADCASTSS(r.AsX(), b)
	return b
}

// floatOf is an integer as element 0 of a vector.
func (v *vec) floatOf(n reg.Register) reg.VecVirtual {
	f := v.XMM()
	v.VXORPS(f, f, f)
	v.VCVTSI2SSQ(n, f, f)
	return f
}

func (v *vec) layerNorm() {
	v.fn("layerNorm", "func(y, x, gamma, beta []float32, eps float32) (mean, rstd float32)",
		"normalises one row; see Kernels.LayerNorm.")
	y, x, gamma, beta, n := v.ptr("y"), v.ptr("x"), v.ptr("gamma"), v.ptr("beta"), v.len("x")
	count := v.floatOf(n)
	acc := v.zeros(4)
	v.each(n, len(acc), func(u int) {
		a := v.load(x, u)
		v.VADDPS(a, acc[u], acc[u])
	})
	sum := v.fold(v.VADDPS, acc)
	v.VDIVSS(count, sum.AsX(), sum.AsX())
	v.result(sum, 0)
	mean := v.broadcast(sum)
	sq := v.zeros(4)
	v.each(n, len(sq), func(u int) {
		a := v.load(x, u)
		v.VSUBPS(mean, a, a)
		v.zeroRest(a)
		v.VFMADD231PS(a, a, sq[u])
	})
	variance := v.fold(v.VADDPS, sq).AsX()
	v.VDIVSS(count, variance, variance)
	eps, err := v.Param("eps").Resolve()
	if err != nil {
		panic(err)
	}
	v.VADDSS(eps.Addr, variance, variance)
	v.VSQRTSS(variance, variance, variance)
	unit := v.kcopy(f32(1))
	v.VDIVSS(variance, unit.AsX(), unit.AsX())
	v.result(unit, 1)
	rstd := v.broadcast(unit)
	v.each(n, 4, func(u int) {
		a, g, b := v.load(x, u), v.load(gamma, u), v.load(beta, u)
		v.VSUBPS(mean, a, a)
		v.VMULPS(rstd, a, a)
		v.VFMADD231PS(g, a, b)
		v.store(b, y, u)
	})
	v.end()
}

func (v *vec) layerNormGradInput() {
	v.fn("layerNormGradInput", "func(dx, x, gamma, dy []float32, mean, rstd float32)",
		"is the gradient of one row; see Kernels.LayerNormGradInput.")
	dx, x, gamma, dy, n := v.ptr("dx"), v.ptr("x"), v.ptr("gamma"), v.ptr("dy"), v.len("x")
	mean, rstd := v.scalar("mean"), v.scalar("rstd")
	row := func(u int) (g, h reg.VecVirtual) {
		h, g = v.load(x, u), v.load(dy, u)
		w := v.load(gamma, u)
		v.VMULPS(w, g, g)
		v.VSUBPS(mean, h, h)
		v.VMULPS(rstd, h, h)
		return g, h
	}
	sg, sgh := v.zeros(2), v.zeros(2)
	v.each(n, len(sg), func(u int) {
		g, h := row(u)
		v.VADDPS(g, sg[u], sg[u])
		v.VFMADD231PS(h, g, sgh[u])
	})
	count := v.floatOf(n)
	a, b := v.fold(v.VADDPS, sg), v.fold(v.VADDPS, sgh)
	v.VDIVSS(count, a.AsX(), a.AsX())
	v.VDIVSS(count, b.AsX(), b.AsX())
	mg, mgh := v.broadcast(a), v.broadcast(b)
	v.each(n, 2, func(u int) {
		g, h := row(u)
		v.VSUBPS(mg, g, g)
		v.VFNMADD231PS(mgh, h, g)
		v.VMULPS(rstd, g, g)
		v.store(g, dx, u)
	})
	v.end()
}

func (v *vec) layerNormGradParams() {
	v.fn("layerNormGradParams", "func(dgamma, dbeta, x, dy, mean, rstd []float32, stride int)",
		"adds the gradients of gamma and beta; see Kernels.LayerNormGradParams.")
	dgamma, dbeta, x, dy := v.ptr("dgamma"), v.ptr("dbeta"), v.ptr("x"), v.ptr("dy")
	mean, rstd, n, rows := v.ptr("mean"), v.ptr("rstd"), v.len("dgamma"), v.len("mean")
	stride := v.Load(v.Param("stride"), v.GP64())
	v.SHLQ(U8(2), stride)
	v.blocks(n, 4, func(vecs int) {
		dg, db := make([]reg.VecVirtual, vecs), make([]reg.VecVirtual, vecs)
		for u := range vecs {
			dg[u], db[u] = v.load(dgamma, u), v.load(dbeta, u)
		}
		i := v.GP64()
		v.XORQ(i, i)
		v.down(rows, []reg.Register{x, dy}, stride, func(p []reg.Register) {
			m, s := v.reg(), v.reg()
			v.VBROADCASTSS(Mem{Base: mean, Index: i, Scale: 4}, m)
			v.VBROADCASTSS(Mem{Base: rstd, Index: i, Scale: 4}, s)
			v.INCQ(i)
			for u := range vecs {
				h, g := v.load(p[0], u), v.load(p[1], u)
				v.VSUBPS(m, h, h)
				v.VMULPS(s, h, h)
				v.VFMADD231PS(h, g, dg[u])
				v.VADDPS(g, db[u], db[u])
			}
		})
		for u := range vecs {
			v.store(dg[u], dgamma, u)
			v.store(db[u], dbeta, u)
		}
	})
	v.end()
}
