package simd

// The tile of the portable kernel: its accumulators and operands fit the 16
// floating-point registers of amd64; twice as many gain little where they fit.
const portableRows, portableCols = 4, 2

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
			portableTile(g, a, &sum)
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

// portableTile computes a whole tile in registers.
func portableTile(g *gemmArgs, a []float32, sum *[portableRows][portableCols]float32) {
	var s00, s01, s10, s11, s20, s21, s30, s31 float32
	b, csA, rsB := g.b, g.csA, g.rsB
	i0, j := 0, 0
	i1, i2, i3 := g.rsA, 2*g.rsA, 3*g.rsA
	for n := g.k; n > 0; n-- {
		b0, b1 := b[j], b[j+1]
		x := a[i0]
		s00 += x * b0
		s01 += x * b1
		x = a[i1]
		s10 += x * b0
		s11 += x * b1
		x = a[i2]
		s20 += x * b0
		s21 += x * b1
		x = a[i3]
		s30 += x * b0
		s31 += x * b1
		i0, i1, i2, i3, j = i0+csA, i1+csA, i2+csA, i3+csA, j+rsB
	}
	sum[0] = [portableCols]float32{s00, s01}
	sum[1] = [portableCols]float32{s10, s11}
	sum[2] = [portableCols]float32{s20, s21}
	sum[3] = [portableCols]float32{s30, s31}
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
