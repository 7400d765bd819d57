package hook

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/comm/inmem"
	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// shapes of the test's two buckets, an empty tensor among them.
var shapes = [][][]int{{{12, 9}, {5}, nil, {6, 2, 8}}, {{0}, {31, 17}}}

// rig is one rank's opened hook and gradients.
type rig struct {
	rank, size int
	s          device.Stream
	r          Reducer
	buckets    []Bucket
	grads      [][]float32 // by bucket
}

// onRanks opens h on n ranks and runs f on all at once.
func onRanks(t *testing.T, n int, h Hook, f func(r *rig) error) {
	t.Helper()
	shared, err := cpu.New(&cpu.Options{Threads: 1})
	require.NoError(t, err)
	world, err := inmem.New(shared, n, &inmem.Options{Timeout: 10 * time.Second})
	require.NoError(t, err)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() { errs[r] = onRank(world[r], shared, h, f) })
	}
	wg.Wait()
	for r, err := range errs {
		require.NoError(t, err, "rank %d", r)
		require.NoError(t, world[r].Close())
	}
	require.NoError(t, shared.Close())
}

func onRank(c comm.Communicator, dev device.Device, h Hook, f func(r *rig) error) error {
	r := &rig{rank: c.Rank(), size: c.Size()}
	for _, list := range shapes {
		b := Bucket{Type: dtype.Float32}
		at := 0
		for i, shape := range list {
			n := 1
			for _, d := range shape {
				n *= d
			}
			b.Params = append(b.Params, Param{Name: fmt.Sprint(i), Shape: shape, Offset: at, Bytes: 4 * n})
			at += (4*n + 63) / 64 * 64
		}
		var err error
		var mem []float32
		if b.Grad, mem, err = alloc[float32](c, at/4); err != nil {
			return err
		}
		r.buckets, r.grads = append(r.buckets, b), append(r.grads, mem)
	}
	var err error
	if r.s, err = dev.NewStream(device.High); err != nil {
		return err
	}
	if r.r, err = h.Open(Env{Device: dev, Comm: c, Buckets: r.buckets}); err != nil {
		return err
	}
	return f(r)
}

// each calls f for every element of a bucket that belongs to a parameter.
func (r *rig) each(bucket int, f func(i int)) {
	for _, p := range r.buckets[bucket].Params {
		for i := range p.Bytes / 4 {
			f(p.Offset/4 + i)
		}
	}
}

// reduce runs a step on gradients that fill gives for each rank, and returns
// the exact sums.
func (r *rig) reduce(step Step, fill func(rank, bucket int, g []float32)) (exact [][]float64, err error) {
	for k, g := range r.grads {
		sum := make([]float64, len(g))
		for rank := range r.size {
			all := make([]float32, len(g))
			fill(rank, k, all)
			r.each(k, func(i int) { sum[i] += step.Scale * float64(all[i]) })
			if rank == r.rank {
				clear(g)
				r.each(k, func(i int) { g[i] = all[i] })
			}
		}
		exact = append(exact, sum)
		if err := r.r.Reduce(r.s, k, step); err != nil {
			return nil, err
		}
	}
	return exact, r.s.Sync(context.Background())
}

func gaussian(seed uint64) func(rank, bucket int, g []float32) {
	return func(rank, bucket int, g []float32) {
		rng := rand.New(rand.NewPCG(seed, uint64(rank<<8|bucket)))
		for i := range g {
			g[i] = float32(rng.NormFloat64())
		}
	}
}

// alike compares what ranks hold, bit for bit.
type alike struct {
	mu    sync.Mutex
	first [][]uint32
}

func (a *alike) check(t *testing.T, grads [][]float32) {
	var bits [][]uint32
	for _, g := range grads {
		var b []uint32
		for _, v := range g {
			b = append(b, math.Float32bits(v))
		}
		bits = append(bits, b)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.first == nil {
		a.first = bits
	}
	require.Equal(t, a.first, bits, "ranks differ")
}

// Without it a hook could divide twice or not at all, lose a tensor or a rank,
// or leave ranks with different bits.
func TestHooksReduceToTheAverage(t *testing.T) {
	for name, c := range map[string]struct {
		h   Hook
		tol float64
	}{
		"all-reduce":           {AllReduce{}, 1e-6},
		"bf16":                 {BF16{}, 0.03},
		"bf16, feedback":       {BF16{ErrorFeedback: true}, 0.03},
		"bf16, float32 sum":    {BF16{Float32Sum: true}, 0.012},
		"fp16":                 {FP16{}, 0.004},
		"fp16, float32 sum":    {FP16{Float32Sum: true, ErrorFeedback: true}, 0.0015},
		"top-k of all":         {TopK{Ratio: 1}, 1e-6},
		"PowerSGD of all":      {PowerSGD{Rank: 1, Start: 9}, 1e-6},
		"PowerSGD, bf16 start": {PowerSGD{Rank: 1, Start: 9, Wire: BF16{}}, 0.03},
	} {
		for n := 1; n <= 4; n++ {
			var same alike
			onRanks(t, n, c.h, func(r *rig) error {
				for step := range 2 {
					exact, err := r.reduce(Step{Number: step, Scale: 1 / float64(n)}, gaussian(uint64(step)))
					if err != nil {
						return err
					}
					for k, g := range r.grads {
						for i, v := range g {
							require.InDelta(t, exact[k][i], v, c.tol*(1+float64(step)), "%s on %d ranks: bucket %d, element %d", name, n, k, i)
						}
					}
				}
				same.check(t, r.grads)
				return nil
			})
		}
	}
}

// Without it the sum in float32 could be one that rounds at every addition: one
// large element would swallow what three small ones add up to.
func TestFloat32SumRoundsOnce(t *testing.T) {
	fill := func(rank, _ int, g []float32) {
		for i := range g {
			g[i] = []float32{256, 0.75, 0.75, 0.75}[rank] // bfloat16 has steps of 2 above 256
		}
	}
	for _, c := range []struct {
		h    Hook
		want float32
	}{{BF16{}, 256}, {BF16{Float32Sum: true}, 258}} {
		onRanks(t, 4, c.h, func(r *rig) error {
			if _, err := r.reduce(Step{Scale: 1}, fill); err != nil {
				return err
			}
			require.InDelta(t, c.want, r.grads[0][0], 0)
			return nil
		})
	}
}

// Without it the factors could be those of something else: gradients whose sum
// has no more than the rank of the factors come back as they are.
func TestPowerSGDIsExactOnLowRank(t *testing.T) {
	fill := func(rank, bucket int, g []float32) {
		rng := rand.New(rand.NewPCG(5, uint64(bucket))) // the same columns on all ranks
		at := 0
		for _, shape := range shapes[bucket] {
			n, m := sides(shape)
			u, v := make([]float64, 2*n), make([]float64, 2*m)
			for i := range u {
				u[i] = rng.NormFloat64()
			}
			for i := range v {
				v[i] = rng.NormFloat64()
			}
			for i := range n * m {
				a, b := i/max(1, m), i%max(1, m)
				g[at+i] = float32(float64(rank+1)*u[a]*v[b] + u[n+a]*v[m+b])
			}
			at += (4*n*m + 63) / 64 * 16
		}
	}
	for _, h := range []PowerSGD{{Rank: 2}, {Rank: 3}, {Rank: 2, NoWarmStart: true}} {
		for n := 1; n <= 4; n++ {
			var same alike
			onRanks(t, n, h, func(r *rig) error {
				for step := range 3 {
					exact, err := r.reduce(Step{Number: step, Scale: 1 / float64(n)}, fill)
					if err != nil {
						return err
					}
					for k, g := range r.grads {
						for i, v := range g {
							require.InDelta(t, exact[k][i], v, 1e-4, "%+v on %d ranks, step %d: bucket %d, element %d", h, n, step, k, i)
						}
					}
				}
				same.check(t, r.grads)
				return nil
			})
		}
	}
}

// Without error feedback, or with a wrong one, what a step doesn't send would be
// lost: what was applied and what is left over add up to all there was.
func TestErrorFeedbackLosesNothing(t *testing.T) {
	for name, h := range map[string]Hook{
		"bf16": BF16{ErrorFeedback: true, Float32Sum: true}, "fp16": FP16{ErrorFeedback: true, Float32Sum: true}, "top-k": TopK{Ratio: 0.05},
		"PowerSGD": PowerSGD{Rank: 1}, "PowerSGD after a start": PowerSGD{Rank: 2, Start: 3},
	} {
		for _, n := range []int{1, 3} {
			var mu sync.Mutex
			left := [][]float64{}
			onRanks(t, n, h, func(r *rig) error {
				applied, total := [2][]float64{}, [2][]float64{}
				for step := range 12 {
					exact, err := r.reduce(Step{Number: step, Scale: 1 / float64(n)}, gaussian(uint64(step%3)))
					if err != nil {
						return err
					}
					for k, g := range r.grads {
						applied[k], total[k] = grow(applied[k], len(g)), grow(total[k], len(g))
						for i := range g {
							applied[k][i] += float64(g[i])
							total[k][i] += exact[k][i]
						}
					}
				}
				mu.Lock()
				defer mu.Unlock()
				for _, st := range r.r.States() {
					var k int
					if _, err := fmt.Sscanf(st.Name, "residual.%d", &k); err != nil {
						continue
					}
					for len(left) <= k {
						left = append(left, grow(nil, len(applied[len(left)])))
					}
					for i, v := range cast[float32](st.Data) {
						left[k][i] += float64(v)
					}
				}
				if r.rank == 0 {
					t.Cleanup(func() {
						for k := range left {
							for i := range left[k] {
								require.InDelta(t, total[k][i], applied[k][i]+left[k][i], 2e-4, "%s on %d ranks: bucket %d, element %d", name, n, k, i)
							}
						}
					})
				}
				return nil
			})
			require.Len(t, left, 2)
		}
	}
}

func grow(v []float64, n int) []float64 {
	if v == nil {
		return make([]float64, n)
	}
	return v
}

// Without it top-k could be any k: the reference sorts.
func TestLimitIsThatOfASort(t *testing.T) {
	var sel topK
	rapid.Check(t, func(t *rapid.T) {
		x := rapid.SliceOfN(rapid.OneOf(rapid.Float32(), rapid.SampledFrom([]float32{0, 1, -1, 1.0000001})), 1, 50).Draw(t, "x")
		n := rapid.IntRange(1, len(x)).Draw(t, "n")
		limit, ties := sel.limit(x, n)
		sorted := slices.Clone(x)
		slices.SortFunc(sorted, func(a, b float32) int { return int(magnitude(b)) - int(magnitude(a)) })
		require.Equal(t, magnitude(sorted[n-1]), limit)
		above := 0
		for _, v := range x {
			if magnitude(v) > limit {
				above++
			}
		}
		require.Equal(t, n, above+ties)
	})
}

// Without it nearly parallel columns, which a warm start tends to, would give
// factors that are not orthonormal, and so a wrong product.
func TestOrthonormalColumns(t *testing.T) {
	var c columns
	rapid.Check(t, func(t *rapid.T) {
		n, r := rapid.IntRange(1, 40).Draw(t, "n"), rapid.IntRange(1, 6).Draw(t, "r")
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		near := rapid.Float64Range(1e-5, 1).Draw(t, "near") // how far a column is from the one before
		p := make([]float32, n*r)
		for i := range n {
			for j := range r {
				p[i*r+j] = float32(rng.NormFloat64())
				if j > 0 {
					p[i*r+j] = p[i*r+j-1] + float32(near)*p[i*r+j]
				}
			}
		}
		c.orthonormalise(p, n, r)
		for j := range r {
			for l := range j + 1 {
				s := 0.0
				for i := range n {
					s += float64(p[i*r+j]) * float64(p[i*r+l])
				}
				if j == l { // a column that float32 can't tell from its predecessors is zero
					require.InDelta(t, min(1, math.Round(s)), s, 1e-5)
				} else {
					require.InDelta(t, 0, s, 1e-5)
				}
			}
		}
	})
	p := make([]float32, 40*6)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range p {
		p[i] = float32(rng.NormFloat64())
	}
	c.orthonormalise(p, 40, 6)
	for j := range 6 {
		s := 0.0
		for i := range 40 {
			s += float64(p[i*6+j]) * float64(p[i*6+j])
		}
		require.InDelta(t, 1, s, 1e-5, "column %d of six that are far apart", j)
	}
	p = []float32{1, 2, 0, 1, 2, 0, 1, 2, 0}
	c.orthonormalise(p, 3, 3)
	require.Equal(t, []float32{0, 0}, p[1:3], "a multiple of another column, and zeros")
}

// Without it options that make no sense would divide by zero or never send.
func TestHooksRefuse(t *testing.T) {
	for want, h := range map[string]Hook{
		"rank -1": PowerSGD{Rank: -1}, "start step -2": PowerSGD{Start: -2}, "ratio of 1.5": TopK{Ratio: 1.5},
		"ratio of NaN": TopK{Ratio: math.NaN()},
	} {
		_, err := h.Open(Env{})
		require.ErrorContains(t, err, want)
	}
	_, err := BF16{}.Open(Env{Buckets: []Bucket{{Grad: hostBuffer(make([]byte, 64)), Type: dtype.Float64}}})
	require.ErrorContains(t, err, "bucket 0 is float64")
}

type hostBuffer []byte

func (b hostBuffer) Len() int                       { return len(b) }
func (b hostBuffer) Slice(off, n int) device.Buffer { return b[off : off+n] }
func (b hostBuffer) HostBytes() ([]byte, bool)      { return b, true }
