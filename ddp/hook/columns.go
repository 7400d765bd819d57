package hook

import "math"

// columns is scratch memory of orthonormalise.
type columns struct{ v []float64 }

// orthonormalise makes the r columns of p (n, r) orthonormal, from left to
// right, by modified Gram-Schmidt in float64. A column that is less than a
// millionth away from a combination of those before it, which float32 can't
// tell from one, becomes zero; so float64 loses at most six of its sixteen
// digits, and once over the columns is enough. The same p gives the same bits on
// every machine: no product is fused.
func (c *columns) orthonormalise(p []float32, n, r int) {
	if len(c.v) < n*r {
		c.v = make([]float64, n*r)
	}
	for j := range r {
		v := c.v[j*n : (j+1)*n]
		for i := range v {
			v[i] = float64(p[i*r+j])
		}
		before := math.Sqrt(dot(v, v))
		for l := range j {
			subtract(v, c.v[l*n:(l+1)*n])
		}
		after := math.Sqrt(dot(v, v))
		if !(after > 1e-6*before) && !math.IsNaN(before) {
			clear(v)
			after = 1
		}
		for i := range v {
			v[i] /= after
			p[i*r+j] = float32(v[i])
		}
	}
}

// subtract takes from v its part along the unit vector u.
func subtract(v, u []float64) {
	d := dot(v, u)
	for i := range v {
		v[i] -= float64(d * u[i])
	}
}

func dot(a, b []float64) float64 {
	s := 0.0
	for i := range a {
		s += float64(a[i] * b[i])
	}
	return s
}

func zero(v []float32) bool {
	for _, x := range v {
		if x != 0 {
			return false
		}
	}
	return true
}
