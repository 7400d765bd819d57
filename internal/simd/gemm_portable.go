package simd

// The tile of the portable kernel: its accumulators fit the registers of arm64,
// and nearly those of amd64.
const portableRows, portableCols = 4, 4

// portableGemm is the micro-kernel table in plain Go.
func portableGemm() gemmTable {
	t := gemmTable{rows: portableRows, cols: portableCols}
	t.kernels[0] = []func(*gemmArgs){
		func(g *gemmArgs) { portableTiles(g, 1) },
		func(g *gemmArgs) { portableTiles(g, 2) },
		func(g *gemmArgs) { portableTiles(g, 3) },
		func(g *gemmArgs) { portableTiles(g, portableRows) },
	}
	return t
}

// portableTiles multiplies g.tiles tiles of rows rows.
func portableTiles(g *gemmArgs, rows int) {
	for t := range g.tiles {
		a := g.a[min(len(g.a), t*g.tileA):]
		c := g.c[t*rows*g.ldC:]
		var sum [portableRows][portableCols]float32
		if rows == portableRows && g.k > 0 {
			portable4x4(g, a, &sum)
		} else {
			for i := range rows {
				portableRow(g, a, i, &sum[i])
			}
		}
		for i := range rows {
			portableStore(g, c[i*g.ldC:], &sum[i])
		}
		g.k, g.b = g.k+g.tileK, g.b[min(len(g.b), g.tileB):]
	}
}

// portableRow computes one row of a tile.
func portableRow(g *gemmArgs, a []float32, i int, sum *[portableCols]float32) {
	for k := range g.k {
		x := a[i*g.rsA+k*g.csA]
		b := (*[portableCols]float32)(g.b[k*g.rsB:])
		for j, v := range b {
			sum[j] += x * v
		}
	}
}

// portable4x4 computes a whole tile in registers.
func portable4x4(g *gemmArgs, a []float32, sum *[portableRows][portableCols]float32) {
	var s00, s01, s02, s03, s10, s11, s12, s13 float32
	var s20, s21, s22, s23, s30, s31, s32, s33 float32
	a0, a1, a2, a3 := a, a[g.rsA:], a[2*g.rsA:], a[3*g.rsA:]
	b, ia := g.b, 0
	for k := range g.k {
		r := (*[portableCols]float32)(b[k*g.rsB:])
		b0, b1, b2, b3 := r[0], r[1], r[2], r[3]
		x := a0[ia]
		s00, s01, s02, s03 = s00+x*b0, s01+x*b1, s02+x*b2, s03+x*b3
		x = a1[ia]
		s10, s11, s12, s13 = s10+x*b0, s11+x*b1, s12+x*b2, s13+x*b3
		x = a2[ia]
		s20, s21, s22, s23 = s20+x*b0, s21+x*b1, s22+x*b2, s23+x*b3
		x = a3[ia]
		s30, s31, s32, s33 = s30+x*b0, s31+x*b1, s32+x*b2, s33+x*b3
		ia += g.csA
	}
	sum[0] = [portableCols]float32{s00, s01, s02, s03}
	sum[1] = [portableCols]float32{s10, s11, s12, s13}
	sum[2] = [portableCols]float32{s20, s21, s22, s23}
	sum[3] = [portableCols]float32{s30, s31, s32, s33}
}

// portableStore is the epilogue for one row of a tile.
func portableStore(g *gemmArgs, c []float32, sum *[portableCols]float32) {
	c = c[:portableCols]
	for j, v := range sum {
		if g.bias != nil {
			v += g.bias[j]
		}
		if g.accumulate != 0 {
			v += c[j]
		}
		c[j] = v
	}
}
