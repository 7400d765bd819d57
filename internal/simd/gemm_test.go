package simd

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"pgregory.net/rapid"
)

// runnable runs a test on the kernels of each instruction set of the machine.
func runnable(t *testing.T, f func(t *testing.T, k *Kernels)) {
	for _, isa := range Supported() {
		k, err := For(isa)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(isa.String(), func(t *testing.T) { f(t, k) })
	}
}

// everyISA is eachISA, and also interprets AVX2, which must give the bits that
// the machine gives.
func everyISA(t *testing.T, f func(t *testing.T, k *Kernels)) {
	eachISA(t, f)
	for name, k := range interpretedKernels(t) {
		if k.isa == AVX2 {
			t.Run(name, func(t *testing.T) { f(t, k) })
		}
	}
}

// random fills a slice with normal values.
func random(r *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	return x
}

// The assembly reads gemmArgs by offset: a field that moves would make it read
// another.
func TestGemmArgsOffsets(t *testing.T) {
	var g gemmArgs
	offsets := map[string][2]uintptr{
		"k": {unsafe.Offsetof(g.k), 0}, "tiles": {unsafe.Offsetof(g.tiles), 8},
		"a": {unsafe.Offsetof(g.a), 16}, "rsA": {unsafe.Offsetof(g.rsA), 40},
		"csA": {unsafe.Offsetof(g.csA), 48}, "tileA": {unsafe.Offsetof(g.tileA), 56},
		"b": {unsafe.Offsetof(g.b), 64}, "rsB": {unsafe.Offsetof(g.rsB), 88},
		"c": {unsafe.Offsetof(g.c), 96}, "ldC": {unsafe.Offsetof(g.ldC), 120},
		"bias": {unsafe.Offsetof(g.bias), 128}, "accumulate": {unsafe.Offsetof(g.accumulate), 152},
		"mask":  {unsafe.Offsetof(g.mask), 160},
		"tileB": {unsafe.Offsetof(g.tileB), 168}, "tileK": {unsafe.Offsetof(g.tileK), 176},
		"offB": {unsafe.Offsetof(g.offB), 184},
	}
	for name, o := range offsets {
		if unsafe.Sizeof(uintptr(0)) == 8 && o[0] != o[1] {
			t.Errorf("%s lies at %d, _gen/gemm.go says %d", name, o[0], o[1])
		}
	}
}

// gemmCase is a random product with guard zones around every matrix.
type gemmCase struct {
	g      Gemm
	before []float32 // C as it was
	guard  []float32 // C with what lies around it
	off    int       // of C in guard
}

const guardValue = -12345.5

// drawGemm draws a product: any transposes, leading dimensions, misalignment,
// and NaN in C where it is to be overwritten.
func drawGemm(t *rapid.T, sizes *rapid.Generator[int]) *gemmCase {
	m, n, k := sizes.Draw(t, "m"), sizes.Draw(t, "n"), sizes.Draw(t, "k")
	r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
	c := &gemmCase{off: rapid.IntRange(0, 9).Draw(t, "offset")}
	matrix := func(name string, rows, cols int) (x []float32, rs, cs int) {
		trans := rapid.Bool().Draw(t, name+" transposed")
		rs, cs = cols+rapid.IntRange(0, 3).Draw(t, name+" gap"), 1
		outer := rows
		if trans {
			rs, cs, outer = 1, rows+rs-cols, cols
		}
		off := rapid.IntRange(0, 5).Draw(t, name+" offset")
		x = random(r, off+outer*max(rs, cs))[off:]
		if need := (rows-1)*rs + (cols-1)*cs + 1; rows > 0 && cols > 0 {
			x = x[:need:need] // nothing behind the last element
		}
		return x, rs, cs
	}
	g := &c.g
	*g = Gemm{M: m, N: n, K: k, Accumulate: rapid.Bool().Draw(t, "accumulate")}
	g.A, g.RsA, g.CsA = matrix("A", m, k)
	g.B, g.RsB, g.CsB = matrix("B", k, n)
	if rapid.Bool().Draw(t, "bias") {
		g.Bias = random(r, n)
	}
	g.LdC = n + rapid.IntRange(0, 4).Draw(t, "C gap")
	c.guard = make([]float32, c.off+m*g.LdC+40)
	for i := range c.guard {
		c.guard[i] = guardValue
	}
	g.C = c.guard[c.off:]
	c.before = make([]float32, m*n)
	for i := range m {
		for j := range n {
			v := float32(math.NaN())
			if g.Accumulate {
				v = float32(r.NormFloat64())
			}
			g.C[i*g.LdC+j], c.before[i*n+j] = v, v
		}
	}
	return c
}

// check compares with a float64 reference and looks at the guard zones.
func (c *gemmCase) check(t interface{ Fatalf(string, ...any) }) {
	g := &c.g
	inside := make([]bool, len(c.guard))
	for i := range g.M {
		for j := range g.N {
			var sum, scale float64
			if g.Accumulate {
				sum = float64(c.before[i*g.N+j])
				scale = math.Abs(sum)
			}
			if g.Bias != nil {
				sum += float64(g.Bias[j])
				scale += math.Abs(float64(g.Bias[j]))
			}
			for k := range g.K {
				x := float64(g.A[i*g.RsA+k*g.CsA]) * float64(g.B[k*g.RsB+j*g.CsB])
				sum, scale = sum+x, scale+math.Abs(x)
			}
			got := float64(g.C[i*g.LdC+j])
			inside[c.off+i*g.LdC+j] = true
			if !(math.Abs(got-sum) <= 1e-6*(scale+1e-30)*math.Sqrt(float64(g.K+1))) {
				t.Fatalf("C[%d,%d] = %v, want %v", i, j, got, sum)
			}
		}
	}
	for i, v := range c.guard {
		if !inside[i] && v != guardValue {
			t.Fatalf("wrote outside C, at %d of %d (C begins at %d)", i, len(c.guard), c.off)
		}
	}
}

// Any size, any transposes, any leading dimension, misaligned slices: a tail or
// a stride that a kernel gets wrong shows here, as does a write outside C, or C
// being read when it's to be overwritten.
func TestGemmMatchesReference(t *testing.T) {
	everyISA(t, func(t *testing.T, k *Kernels) {
		w := k.NewWorkspace()
		rapid.Check(t, func(t *rapid.T) {
			c := drawGemm(t, rapid.IntRange(0, 70))
			k.Gemm(w, &c.g)
			c.check(t)
		})
	})
}

// Every kernel for every number of rows and columns, with and without what its
// epilogue can do.
func TestGemmEveryTile(t *testing.T) {
	everyISA(t, func(t *testing.T, k *Kernels) { everyTile(t, k) })
}

func everyTile(t *testing.T, k *Kernels) {
	w := k.NewWorkspace()
	r := rand.New(rand.NewPCG(8, 9))
	for m := 1; m <= 13; m++ {
		for n := 1; n <= 33; n++ {
			d := (m + n) % 7
			for flags := range 4 {
				c := gemmCase{g: Gemm{M: m, N: n, K: d, RsA: d, CsA: 1, RsB: n, CsB: 1, LdC: n, Accumulate: flags&1 != 0}}
				g := &c.g
				g.A, g.B, g.C = random(r, m*d), random(r, d*n), random(r, m*n)
				if flags&2 != 0 {
					g.Bias = random(r, n)
				}
				c.before, c.guard = slices.Clone(g.C), g.C
				k.Gemm(w, g)
				c.check(t)
			}
		}
	}
}

// Sizes beyond a cache block and strides beyond a page: an error in the cutting
// of K or M, or in the copies of A that such strides call for, shows here.
func TestGemmBlocks(t *testing.T) {
	shapes := []struct{ m, n, k, gap int }{
		{blockRows + 5, 33, 7, 0}, {5, 17, 2*blockDepth + 1, 0}, {2*blockRows + 1, 17, blockDepth + 3, 0},
		{1, 1, 1000, 0}, {1000, 1, 1, 0}, {65, packColsFrom, 30, packStride}, {blockRows + 1, packColsFrom + 1, 10, packStride},
	}
	everyISA(t, func(t *testing.T, k *Kernels) {
		w := k.NewWorkspace()
		r := rand.New(rand.NewPCG(1, 2))
		for _, s := range shapes {
			for trans := range 3 { // A as it is, transposed, with gaps both ways
				c := gemmCase{g: Gemm{M: s.m, N: s.n, K: s.k, RsA: s.k + s.gap, CsA: 1, RsB: s.n, CsB: 1, LdC: s.n}}
				g := &c.g
				switch trans {
				case 1:
					g.RsA, g.CsA = 1, s.m+s.gap
				case 2:
					g.RsA, g.CsA = 2*(s.k+s.gap), 2
				}
				g.A = random(r, (s.m-1)*g.RsA+(s.k-1)*g.CsA+1)
				g.B, g.C, g.Bias = random(r, s.k*s.n), random(r, s.m*s.n), random(r, s.n)
				c.guard = g.C
				k.Gemm(w, g)
				c.check(t)
			}
		}
	})
}

// The triangular products of attention: what lies beyond the diagonal must not
// count, whatever it holds farther away than a tile.
func TestGemmTriangles(t *testing.T) {
	everyISA(t, func(t *testing.T, k *Kernels) {
		w := k.NewWorkspace()
		rapid.Check(t, func(t *rapid.T) {
			m, n := rapid.IntRange(1, 140).Draw(t, "m"), rapid.IntRange(1, 40).Draw(t, "n")
			shape := rapid.SampledFrom([]triangle{lowerA, upperA, lowerC}).Draw(t, "shape")
			r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
			g := Gemm{M: m, N: n, K: m, shape: shape, RsA: m, CsA: 1, RsB: n, CsB: 1, LdC: n}
			if shape == lowerC {
				g.K, g.N, g.RsA, g.RsB, g.CsB, g.LdC = n, m, n, 1, n, m
			}
			if shape == upperA {
				g.RsA, g.CsA = 1, m
			}
			g.A, g.B, g.C = random(r, m*g.K), random(r, g.K*g.N), random(r, m*g.N)
			for i := range m {
				for j := range g.K {
					beyond := map[triangle]int{lowerA: j - i, upperA: i - j}[shape]
					switch {
					case beyond >= 16:
						g.A[i*g.RsA+j*g.CsA] = float32(math.NaN())
					case beyond > 0:
						g.A[i*g.RsA+j*g.CsA] = 0
					}
				}
			}
			k.Gemm(w, &g)
			for i := range m {
				for j := range g.N {
					var sum, scale float64
					for p := range g.K {
						if a := float64(g.A[i*g.RsA+p*g.CsA]); a == a {
							x := a * float64(g.B[p*g.RsB+j*g.CsB])
							sum, scale = sum+x, scale+math.Abs(x)
						}
					}
					got := float64(g.C[i*g.LdC+j])
					if shape == lowerC && j > i {
						continue
					}
					if !(math.Abs(got-sum) <= 1e-5*scale+1e-6) {
						t.Fatalf("shape %d: C[%d,%d] = %v, want %v", shape, i, j, got, sum)
					}
				}
			}
		})
	})
}

// NaN and Inf in an operand reach exactly the elements that depend on them: a
// kernel that skips or adds lanes would lose or spread them.
func TestGemmSpreadsNaN(t *testing.T) {
	everyISA(t, func(t *testing.T, k *Kernels) {
		w := k.NewWorkspace()
		r := rand.New(rand.NewPCG(3, 4))
		for _, bad := range []float32{float32(math.NaN()), float32(math.Inf(1))} {
			const m, n, d = 20, 37, 19
			g := Gemm{M: m, N: n, K: d, RsA: d, CsA: 1, RsB: n, CsB: 1, LdC: n,
				A: random(r, m*d), B: random(r, d*n), C: make([]float32, m*n)}
			g.A[7*d+18], g.B[3*n+36] = bad, bad
			k.Gemm(w, &g)
			for i, v := range g.C {
				finite := !math.IsNaN(float64(v)) && !math.IsInf(float64(v), 0)
				if want := i/n != 7 && i%n != 36; finite != want {
					t.Fatalf("%v in row 7 and column 36: C[%d,%d] = %v", bad, i/n, i%n, v)
				}
			}
		}
	})
}

// A slice that is shorter than its shape is refused: the assembly would read or
// write past it.
func TestGemmRefusesShortSlices(t *testing.T) {
	k, err := For(Portable)
	if err != nil {
		t.Fatal(err)
	}
	good := Gemm{M: 3, N: 4, K: 5, RsA: 5, CsA: 1, RsB: 4, CsB: 1, LdC: 4,
		A: make([]float32, 15), B: make([]float32, 20), C: make([]float32, 12)}
	k.Gemm(k.NewWorkspace(), &good)
	for name, f := range map[string]func(*Gemm){
		"A": func(g *Gemm) { g.A = g.A[1:] }, "B": func(g *Gemm) { g.B = g.B[1:] },
		"C": func(g *Gemm) { g.C = g.C[1:] }, "bias": func(g *Gemm) { g.Bias = make([]float32, 3) },
		"stride": func(g *Gemm) { g.RsA = -1 }, "rows of C": func(g *Gemm) { g.LdC = 3 }, "size": func(g *Gemm) { g.K = -1 },
	} {
		g := good
		f(&g)
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: accepted", name)
				}
			}()
			k.Gemm(k.NewWorkspace(), &g)
		}()
	}
}

// A training step must not allocate: neither may its products.
func TestGemmAllocatesNothing(t *testing.T) {
	runnable(t, func(t *testing.T, k *Kernels) {
		w := k.NewWorkspace()
		x := make([]float32, 70*70)
		y := make([]float32, 70*70)
		if n := testing.AllocsPerRun(10, func() {
			k.Gemm(w, &Gemm{M: 70, N: 70, K: 70, A: x, RsA: 1, CsA: 70, B: x, RsB: 1, CsB: 70, C: y, LdC: 70})
		}); n != 0 {
			t.Errorf("%v allocations a product", n)
		}
	})
}

// gemmShapes are the products of GPT-2 mini and small, and cubes. TA: dW; TB: dX.
var gemmShapes = []struct {
	m, k, n int
	trans   string
}{
	{512, 512, 512, "NN"}, {1024, 1024, 1024, "NN"}, {1024, 1024, 1024, "TN"}, {1024, 1024, 1024, "NT"},
	{512, 128, 384, "NN"}, {512, 128, 512, "NN"}, {512, 512, 128, "NN"}, {512, 128, 128, "NN"},
	{512, 384, 128, "NT"}, {512, 128, 512, "NT"}, {512, 128, 256, "NT"},
	{128, 512, 384, "TN"}, {128, 512, 512, "TN"}, {512, 512, 128, "TN"}, {256, 512, 128, "TN"},
	{512, 384, 1152, "NN"}, {512, 1536, 384, "NN"}, {384, 512, 1536, "TN"}, {1536, 512, 384, "TN"}, {512, 384, 65, "NT"}, {65, 512, 384, "TN"},
	{64, 32, 64, "NT"}, {64, 64, 32, "NN"}, {64, 64, 32, "TN"}, {16, 32, 16, "NT"},
}

func BenchmarkGemm(b *testing.B) {
	for _, isa := range Supported() {
		k, err := For(isa)
		if err != nil {
			b.Fatal(err)
		}
		w := k.NewWorkspace()
		r := rand.New(rand.NewPCG(1, 1))
		for _, s := range gemmShapes {
			g := Gemm{M: s.m, N: s.n, K: s.k, RsA: s.k, CsA: 1, RsB: s.n, CsB: 1, LdC: s.n}
			if s.trans[0] == 'T' {
				g.RsA, g.CsA = 1, s.m
			}
			if s.trans[1] == 'T' {
				g.RsB, g.CsB = 1, s.k
			}
			g.A, g.B, g.C = random(r, s.m*s.k), random(r, s.k*s.n), make([]float32, s.m*s.n)
			b.Run(fmt.Sprintf("%v/%dx%dx%d%s", isa, s.m, s.k, s.n, s.trans), func(b *testing.B) {
				for b.Loop() {
					k.Gemm(w, &g)
				}
				flop := 2 * float64(s.m) * float64(s.k) * float64(s.n)
				b.ReportMetric(flop*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
			})
		}
	}
}
