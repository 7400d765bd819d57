package optim

import (
	"context"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// shapes has matrices, vectors, a scalar and an empty tensor; sizes that aren't
// multiples of a slot's alignment leave padding.
var shapes = [][]int{{7, 5}, {5}, nil, {3, 11}, {0, 4}, {33}, {2, 2, 2}, {9}}

// replica is flat parameters and gradients of shapes in some layout.
type replica struct {
	dev           *cpu.Device
	stream        device.Stream
	layout        *bucket.Layout
	params, grads []device.Buffer
}

func newReplica(t *testing.T, caps bucket.Caps) *replica {
	dev, err := cpu.New(&cpu.Options{Threads: 1})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dev.Close()) })
	r := &replica{dev: dev}
	r.stream, err = dev.NewStream(device.Normal)
	require.NoError(t, err)
	var ps []bucket.Param
	var order []int
	for i, s := range shapes {
		ps = append(ps, bucket.Param{Name: string(rune('a' + i)), Shape: s, Type: dtype.Float32})
		order = append(order, len(shapes)-1-i)
	}
	r.layout, err = bucket.Assign(ps, order, caps)
	require.NoError(t, err)
	for _, b := range r.layout.Buckets {
		for _, to := range []*[]device.Buffer{&r.params, &r.grads} {
			buf, err := dev.Alloc(b.Bytes)
			require.NoError(t, err)
			*to = append(*to, buf)
		}
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range shapes {
		for _, v := range [][]float32{r.at(r.params, i), r.at(r.grads, i)} {
			for j := range v {
				v[j] = float32(rng.NormFloat64())
			}
		}
	}
	return r
}

// floats is a buffer as float32.
func floats(b device.Buffer) []float32 {
	h, _ := b.HostBytes()
	if len(h) == 0 {
		return nil
	}
	return unsafe.Slice((*float32)(unsafe.Pointer(&h[0])), len(h)/4)
}

// at is parameter i of the flat buckets.
func (r *replica) at(buckets []device.Buffer, i int) []float32 {
	s := r.layout.Slots[i]
	return floats(buckets[s.Bucket].Slice(s.Offset, s.Bytes))
}

func (r *replica) config(maxNorm float64) Config {
	return Config{Device: r.dev, Layout: r.layout, Params: r.params, Grads: r.grads, MaxNorm: maxNorm}
}

// step runs one update with the norm, if there is one.
func (r *replica) step(t *testing.T, o *Optimizer, n *Norm, lr float64) {
	o.Begin(lr)
	for k := len(r.layout.Buckets) - 1; k >= 0 && n != nil; k-- {
		require.NoError(t, n.Squares(r.stream, k))
	}
	if n != nil {
		require.NoError(t, n.Clip(r.stream))
	}
	for k := range r.layout.Buckets {
		require.NoError(t, o.Update(r.stream, k))
	}
	require.NoError(t, r.stream.Sync(context.Background()))
}

// reference is the same update in float64, element by element.
func reference(rule Rule, p, g, m, v []float64, lr float64, t int, decay bool) {
	for i := range p {
		switch r := rule.(type) {
		case AdamW:
			if decay {
				p[i] *= 1 - lr*r.WeightDecay
			}
			m[i] = r.Beta1*m[i] + (1-r.Beta1)*g[i]
			v[i] = r.Beta2*v[i] + (1-r.Beta2)*g[i]*g[i]
			mh, vh := m[i]/(1-math.Pow(r.Beta1, float64(t))), v[i]/(1-math.Pow(r.Beta2, float64(t)))
			p[i] -= lr * mh / (math.Sqrt(vh) + r.Eps)
		case SGD:
			d := g[i]
			if decay {
				d += r.WeightDecay * p[i]
			}
			m[i] = r.Momentum*m[i] + d
			p[i] -= lr * m[i]
		}
	}
}

// Without it a wrong argument order, decay on a bias, a lost bias correction or
// a clip factor that isn't applied would only show as a worse loss.
func TestUpdatesMatchReference(t *testing.T) {
	for name, c := range map[string]struct {
		rule    Rule
		maxNorm float64
	}{
		"AdamW":         {AdamW{LR: 1, Beta1: 0.8, Beta2: 0.9, Eps: 1e-3, WeightDecay: 0.3}, 0},
		"AdamW clipped": {AdamW{LR: 1, Beta1: 0.8, Beta2: 0.9, Eps: 1e-3, WeightDecay: 0.3}, 0.5},
		"AdamW below":   {AdamW{LR: 1, Beta1: 0.8, Beta2: 0.9, Eps: 1e-3}, 1e6},
		"SGD":           {SGD{LR: 1, Momentum: 0.7, WeightDecay: 0.2}, 0},
		"SGD clipped":   {SGD{LR: 1}, 0.1},
	} {
		t.Run(name, func(t *testing.T) {
			r := newReplica(t, bucket.Caps{First: 100, Cap: []int{200}})
			o, err := New(c.rule, r.config(c.maxNorm))
			require.NoError(t, err)
			n, err := NewNorm(r.dev, r.layout, r.grads, o.Hyper())
			require.NoError(t, err)
			p, g := wide(r, r.params), wide(r, r.grads)
			norm := 0.0
			for _, x := range g {
				for _, v := range x {
					norm += v * v
				}
			}
			norm = math.Sqrt(norm)
			scale := 1.0
			if c.maxNorm > 0 && norm > c.maxNorm {
				scale = c.maxNorm / norm
			}
			m, v := zeros(p), zeros(p)
			for step := 1; step <= 3; step++ {
				lr := 0.1 / float64(step)
				r.step(t, o, n, lr)
				require.InEpsilon(t, norm, n.Value(), 1e-6)
				for i := range p {
					scaled := make([]float64, len(g[i]))
					for j := range scaled {
						scaled[j] = g[i][j] * scale
					}
					reference(c.rule, p[i], scaled, m[i], v[i], lr, step, len(shapes[i]) >= 2)
					require.InDeltaSlice(t, p[i], widen(r.at(r.params, i)), 2e-5, "parameter %d after step %d", i, step)
				}
			}
			require.Equal(t, 3, o.Steps())
			requirePaddingZero(t, r)
		})
	}
}

// Padding that isn't zero would leak into sums over whole buckets.
func requirePaddingZero(t *testing.T, r *replica) {
	for k, b := range r.layout.Buckets {
		used := make([]bool, b.Bytes/4)
		for _, p := range b.Params {
			s := r.layout.Slots[p]
			for i := s.Offset / 4; i < (s.Offset+s.Bytes)/4; i++ {
				used[i] = true
			}
		}
		for i, v := range floats(r.params[k]) {
			require.True(t, used[i] || v == 0, "padding of bucket %d at element %d is %v", k, i, v)
		}
	}
}

func widen(x []float32) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(v)
	}
	return y
}

func wide(r *replica, buckets []device.Buffer) [][]float64 {
	var all [][]float64
	for i := range shapes {
		all = append(all, widen(r.at(buckets, i)))
	}
	return all
}

func zeros(like [][]float64) [][]float64 {
	var all [][]float64
	for _, x := range like {
		all = append(all, make([]float64, len(x)))
	}
	return all
}

// Without it parameters would depend on bucket caps, and a checkpoint could not
// be resumed with others: updates and the norm must give the same bits.
func TestBitsDoNotDependOnBuckets(t *testing.T) {
	run := func(caps bucket.Caps) (params [][]float32, norm float64) {
		r := newReplica(t, caps)
		o, err := New(AdamW{WeightDecay: 0.1}, r.config(0.3))
		require.NoError(t, err)
		n, err := NewNorm(r.dev, r.layout, r.grads, o.Hyper())
		require.NoError(t, err)
		for range 4 {
			r.step(t, o, n, 0.05)
		}
		for i := range shapes {
			params = append(params, r.at(r.params, i))
		}
		return params, n.Value()
	}
	want, norm := run(bucket.One())
	for _, caps := range []bucket.Caps{bucket.Each(), {}, {First: 64, Cap: []int{300, 100}}} {
		got, n := run(caps)
		require.Equal(t, norm, n)
		require.Equal(t, want, got)
	}
}

// Without it nobody could say which parameter's gradient broke a run.
func TestNonFinite(t *testing.T) {
	r := newReplica(t, bucket.Caps{})
	n, err := NewNorm(r.dev, r.layout, r.grads, nil)
	require.NoError(t, err)
	check := func(order []int) int {
		for k := range r.layout.Buckets {
			require.NoError(t, n.Squares(r.stream, k))
		}
		require.NoError(t, n.Clip(r.stream))
		require.NoError(t, r.stream.Sync(context.Background()))
		return n.NonFinite(order)
	}
	order := []int{7, 6, 5, 4, 3, 2, 1, 0}
	require.Equal(t, -1, check(order))
	r.at(r.grads, 0)[3] = float32(math.NaN())
	r.at(r.grads, 5)[32] = float32(math.Inf(-1))
	require.Equal(t, 5, check(order))
	require.True(t, math.IsNaN(n.Value()) || math.IsInf(n.Value(), 0))
	r.at(r.grads, 0)[3], r.at(r.grads, 5)[32] = 0, 3e38
	require.Equal(t, -1, check(order), "a huge gradient is finite")
}

// Without it a step would allocate, or the moments could not be saved.
func TestStatesAndAllocations(t *testing.T) {
	r := newReplica(t, bucket.Caps{})
	o, err := New(AdamW{}, r.config(1))
	require.NoError(t, err)
	n, err := NewNorm(r.dev, r.layout, r.grads, o.Hyper())
	require.NoError(t, err)
	r.step(t, o, n, 0.1)
	states := o.States()
	require.Len(t, states, 2*len(shapes))
	require.Equal(t, "exp_avg", states[0].Name)
	require.Equal(t, "exp_avg_sq", states[1].Name)
	require.Equal(t, 3, states[6].Param)
	require.Equal(t, 4*33, states[6].Buffer.Len())
	require.NotZero(t, floats(states[6].Buffer)[0])
	require.Zero(t, testing.AllocsPerRun(20, func() {
		o.Begin(0.1)
		for k := range r.layout.Buckets {
			_ = n.Squares(r.stream, k)
			_ = o.Update(r.stream, k)
		}
		_ = n.Clip(r.stream)
		_ = r.stream.Sync(context.Background())
	}))
	o.SetSteps(41)
	o.Begin(0.1)
	require.Equal(t, 42, o.Steps())
}

// Without it a typing error in a hyper-parameter would train to nonsense.
func TestRefuses(t *testing.T) {
	r := newReplica(t, bucket.Caps{})
	for want, rule := range map[string]Rule{
		"AdamW.LR is -1":        AdamW{LR: -1},
		"AdamW.Beta1 is 1":      AdamW{Beta1: 1},
		"AdamW.Beta2 is NaN":    AdamW{Beta2: math.NaN()},
		"AdamW.WeightDecay is":  AdamW{WeightDecay: -0.1},
		"SGD.Momentum is 1.5":   SGD{Momentum: 1.5},
		"SGD.WeightDecay is -1": SGD{WeightDecay: -1},
	} {
		_, err := New(rule, r.config(0))
		require.ErrorContains(t, err, want)
	}
	_, err := New(SGD{}, r.config(-1))
	require.ErrorContains(t, err, "MaxNorm is -1")
	wide, err := bucket.Assign([]bucket.Param{{Name: "w", Shape: []int{2}, Type: dtype.Float64}}, []int{0}, bucket.Caps{})
	require.NoError(t, err)
	_, err = New(SGD{}, Config{Device: r.dev, Layout: wide, Params: r.params, Grads: r.grads})
	require.ErrorContains(t, err, `parameter "w" is float64`)
}

// The values are those of shared/peers/train_text.py, PyTorch's yardstick.
func TestWarmupCosine(t *testing.T) {
	w := WarmupCosine{Max: 1e-3, Min: 1e-4, Warmup: 100, Steps: 1000}
	require.NoError(t, w.Validate())
	for step, want := range map[int]float64{
		0: 1e-5, 49: 5e-4, 99: 1e-3, 100: 1e-3, 550: 5.5e-4,
		999: 1e-4 + 0.5*9e-4*(1+math.Cos(math.Pi*899/900)), 1000: 1e-4, 5000: 1e-4,
	} {
		require.InDelta(t, want, w.LR(step), 1e-12, "step %d", step)
	}
	require.Equal(t, 0.5, WarmupCosine{Max: 0.5, Min: 0.1}.LR(0), "no warm-up")
	require.Equal(t, 0.25, Constant(0.25).LR(7))
	for want, bad := range map[string]WarmupCosine{
		"above the highest": {Max: 1, Min: 2}, "negative": {Max: 1, Warmup: -1}, "Max is NaN": {Max: math.NaN()},
	} {
		require.ErrorContains(t, bad.Validate(), want)
	}
}
