package simd

// portableAttention is the table in plain Go.
func portableAttention() attentionTable {
	return attentionTable{softmaxRows: softmaxRowsGo, gradRows: gradRowsGo, dotRows: dotRowsGo, scaleRows: scaleRowsGo}
}

func softmaxRowsGo(s []float32, ld, rows, cols, grow int, scale float32, max, sum []float32) {
	for i := range rows {
		n := cols + i*grow
		row := s[i*ld:][:n]
		m := max[i]
		for _, v := range row {
			if x := scale * v; x > m {
				m = x
			}
		}
		var t float32
		for j, v := range row {
			e := exp32(scale*v - m)
			row[j] = e
			t += e
		}
		max[i], sum[i] = m, t
		clear(s[i*ld+n:][:portableRows])
	}
}

func gradRowsGo(s, dp []float32, ld, rows, cols, grow int, scale float32, lse, delta []float32) {
	for i := range rows {
		n := cols + i*grow
		row, grad := s[i*ld:][:n], dp[i*ld:][:n]
		l, d := lse[i], delta[i]
		for j, v := range row {
			p := exp32(scale*v - l)
			row[j] = p
			grad[j] = scale * p * (grad[j] - d)
		}
		clear(s[i*ld+n:][:portableRows])
		clear(dp[i*ld+n:][:portableRows])
	}
}

func dotRowsGo(dst, a, b []float32, ld, rows, n int) {
	for i := range rows {
		x, y := a[i*ld:][:n], b[i*ld:][:n]
		var sum float32
		for j, v := range x {
			sum += v * y[j]
		}
		dst[i] = sum
	}
}

func scaleRowsGo(y []float32, ld, rows, n int, f []float32) {
	for i := range rows {
		row := y[i*ld:][:n]
		for j := range row {
			row[j] *= f[i]
		}
	}
}
