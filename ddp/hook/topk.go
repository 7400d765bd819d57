package hook

import (
	"fmt"
	"math"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/internal/simd"
)

// TopK sends the elements of the largest magnitude of each bucket, with their
// indices; what it doesn't send it adds to the next step's gradients (Stich,
// Cordonnier, Jaggi, 2018). Each rank picks its own. All ranks gather what all
// have picked, so bytes grow with the number of ranks: for few ranks and small
// Ratios.
type TopK struct {
	// Ratio is the share of elements that is sent. 0 means 0.01.
	Ratio float64
	// NoErrorFeedback drops what is not sent: less memory, and in general no
	// convergence.
	NoErrorFeedback bool
}

// Open implements Hook.
func (h TopK) Open(env Env) (Reducer, error) {
	if h.Ratio == 0 {
		h.Ratio = 0.01
	}
	if !(h.Ratio > 0 && h.Ratio <= 1) {
		return nil, fmt.Errorf("hook: TopK: a ratio of %v; it must be above 0 and at most 1", h.Ratio)
	}
	k, grads, err := env.open("TopK")
	if err != nil {
		return nil, err
	}
	t := &topK{env: env, k: k, feedback: newFeedback(!h.NoErrorFeedback, grads)}
	for i, g := range grads {
		b := &topBucket{g: g, n: int(math.Ceil(h.Ratio * float64(len(g)))), sum: t.feedback[i]}
		if b.sum == nil {
			b.sum = make([]float32, len(g))
		}
		// Indices and values travel together: n of either.
		if b.mine, b.out, err = alloc[uint32](env.Comm, 2*b.n); err != nil {
			return nil, err
		}
		if b.all, b.in, err = alloc[uint32](env.Comm, 2*b.n*env.Comm.Size()); err != nil {
			return nil, err
		}
		b.pick = func() error { t.pickLargest(b, t.feedback[i]); return nil }
		b.add = func() error { return t.addAll(b) }
		t.buckets = append(t.buckets, b)
	}
	return t, nil
}

type topK struct {
	env      Env
	k        *simd.Kernels
	step     Step
	feedback feedback
	buckets  []*topBucket
	counts   [1 << 16]int
}

type topBucket struct {
	g         []float32
	n         int       // elements that are sent
	sum       []float32 // scaled gradients and what was left over; the residual itself with feedback
	mine, all device.Buffer
	out, in   []uint32
	pick, add func() error
}

func (t *topK) Reduce(s device.Stream, bucket int, step Step) error {
	t.step.become(step)
	b := t.buckets[bucket]
	if err := s.HostFunc(b.pick); err != nil {
		return err
	}
	if err := t.env.Comm.AllGather(s, b.all, b.mine, dtype.Int32, comm.Tag{Name: "bucket", Bucket: bucket}); err != nil {
		return err
	}
	return s.HostFunc(b.add)
}

// pickLargest fills the message, in the order of indices.
func (t *topK) pickLargest(b *topBucket, left residual) {
	left.take(t.k, b.sum, b.g, t.step.Scale)
	limit, ties := t.limit(b.sum, b.n)
	sent := 0
	for i, v := range b.sum {
		m := magnitude(v)
		if m < limit || m == limit && ties == 0 {
			continue
		}
		if m == limit {
			ties--
		}
		b.out[sent], b.out[b.n+sent] = uint32(i), math.Float32bits(v)
		sent++
		if left != nil {
			left[i] = 0
		}
	}
}

// magnitude orders floats by size; NaN comes after infinity, so it is sent.
func magnitude(v float32) uint32 { return math.Float32bits(v) &^ (1 << 31) }

// limit is the n-th largest magnitude, and how many elements that have just it
// are among the n: a radix selection, half of the bits at a time.
func (t *topK) limit(x []float32, n int) (limit uint32, ties int) {
	if n == 0 {
		return math.MaxUint32, 0
	}
	clear(t.counts[:])
	for _, v := range x {
		t.counts[magnitude(v)>>16]++
	}
	high, n := t.descend(n)
	clear(t.counts[:])
	for _, v := range x {
		if m := magnitude(v); m>>16 == high {
			t.counts[m&0xffff]++
		}
	}
	low, n := t.descend(n)
	return high<<16 | low, n
}

// descend is the largest digit at which n elements are reached, and how many of
// them have it.
func (t *topK) descend(n int) (digit uint32, left int) {
	for d := len(t.counts) - 1; ; d-- {
		if c := t.counts[d]; n > c {
			n -= c
			continue
		}
		return uint32(d), n
	}
}

// addAll adds up what all ranks have sent, in the order of ranks.
func (t *topK) addAll(b *topBucket) error {
	clear(b.g)
	for r := range t.env.Comm.Size() {
		from := b.in[2*b.n*r : 2*b.n*(r+1)]
		for j, at := range from[:b.n] {
			if int(at) >= len(b.g) {
				return fmt.Errorf("hook: TopK: rank %d sent element %d of a bucket of %d", r, at, len(b.g))
			}
			b.g[at] += math.Float32frombits(from[b.n+j])
		}
	}
	return nil
}

func (t *topK) States() []State { return t.feedback.states() }
