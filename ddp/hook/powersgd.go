package hook

import (
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/internal/simd"
)

// PowerSGD sends a factorisation of each matrix M (n, m): P (n, r) and Q (m, r),
// with P·Qᵀ close to M (Vogels, Karimireddy, Jaggi, 2019). One step of the power
// iteration gives it: P = M·Q, summed over ranks and made orthonormal; Q = Mᵀ·P,
// summed; then M ≈ P·Qᵀ on all ranks. What has one dimension, or would not get
// smaller, is sent whole. A tensor of more dimensions is the matrix of its first
// and the rest.
type PowerSGD struct {
	// Rank is r. 0 means 4.
	Rank int
	// Start is the number of steps at the beginning that reduce everything
	// whole: early gradients change fast. 0 means none.
	Start int
	// NoErrorFeedback drops what a step doesn't send, instead of adding it to the
	// next one's gradients: less memory, and in general no convergence.
	NoErrorFeedback bool
	// NoWarmStart begins each step's iteration from random numbers instead of the
	// last step's Q.
	NoWarmStart bool
	// Seed is that of the random numbers.
	Seed uint64
	// Wire reduces the factors, and what is sent whole. nil means AllReduce.
	Wire Hook
}

// Open implements Hook.
func (h PowerSGD) Open(env Env) (Reducer, error) {
	if h.Rank == 0 {
		h.Rank = 4
	}
	if h.Wire == nil {
		h.Wire = AllReduce{}
	}
	if h.Rank < 0 || h.Start < 0 {
		return nil, fmt.Errorf("hook: PowerSGD: rank %d, start step %d: neither may be negative", h.Rank, h.Start)
	}
	k, grads, err := env.open("PowerSGD")
	if err != nil {
		return nil, err
	}
	p := &powerSGD{h: h, env: env, k: k, work: k.NewWorkspace(), feedback: newFeedback(!h.NoErrorFeedback, grads)}
	var factors []Bucket
	for i, b := range env.Buckets {
		f, err := p.newFactors(i, b, grads[i])
		if err != nil {
			return nil, err
		}
		p.buckets = append(p.buckets, f)
		factors = append(factors, whole(f.first), whole(f.second))
	}
	var err1, err2 error
	p.plain, err1 = h.Wire.Open(env)
	env.Buckets = factors
	p.wire, err2 = h.Wire.Open(env)
	return p, errors.Join(err1, err2)
}

// whole is a bucket of one vector.
func whole(b device.Buffer) Bucket {
	return Bucket{Grad: b, Type: dtype.Float32, Params: []Param{{Shape: []int{b.Len() / 4}, Bytes: b.Len()}}}
}

type powerSGD struct {
	h        PowerSGD
	env      Env
	k        *simd.Kernels
	work     *simd.Workspace
	step     Step
	feedback feedback
	plain    Reducer // of whole buckets, before Start
	wire     Reducer // of factors: 2k is P and what is whole of bucket k, 2k+1 is Q
	buckets  []*factors
}

// factors are those of one bucket's matrices.
type factors struct {
	grads         []float32
	sum           []float32 // scaled gradients and what was left over; the residual itself with feedback
	matrices      []matrix
	vectors       []vector
	first, second device.Buffer
	project, back func() error
	rebuild       func() error
}

// matrix is a gradient that is factorised. q is Q transposed, so that rows of
// the product P·Qᵀ are sums of contiguous rows.
type matrix struct {
	n, m, r int
	at      int // in the bucket, in elements
	p, q    []float32
	seed    uint64
}

// vector is a gradient that is sent whole.
type vector struct {
	at   int
	sent []float32
}

func (p *powerSGD) newFactors(bucket int, b Bucket, grads []float32) (*factors, error) {
	f := &factors{grads: grads, sum: p.feedback[bucket]}
	if f.sum == nil {
		f.sum = make([]float32, len(grads))
	}
	first, second := 0, 0
	for i, q := range b.Params {
		n, m := sides(q.Shape)
		if r := min(p.h.Rank, n, m); q.Bytes > 0 && len(q.Shape) > 1 && (n+m)*r < n*m {
			f.matrices = append(f.matrices, matrix{n: n, m: m, r: r, at: q.Offset / 4, seed: uint64(bucket)<<32 | uint64(i)})
			first, second = first+n*r, second+m*r
			continue
		}
		f.vectors = append(f.vectors, vector{at: q.Offset / 4, sent: make([]float32, 0, n*m)})
		first += n * m
	}
	var ps, qs []float32
	var err1, err2 error
	f.first, ps, err1 = alloc[float32](p.env.Comm, first)
	f.second, qs, err2 = alloc[float32](p.env.Comm, second)
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	for i := range f.vectors {
		n := cap(f.vectors[i].sent)
		f.vectors[i].sent, ps = ps[:n], ps[n:]
	}
	row := 0
	for i := range f.matrices {
		x := &f.matrices[i]
		x.p, ps = ps[:x.n*x.r], ps[x.n*x.r:]
		x.q, qs = qs[:x.m*x.r], qs[x.m*x.r:]
		row = max(row, x.m)
		for c := range x.r {
			x.refill(p.h.Seed, c, 0)
		}
	}
	tmp, cols := make([]float32, row), new(columns)
	f.project = func() error { p.projectBucket(f, p.feedback[bucket]); return nil }
	f.back = func() error { p.backBucket(f, cols); return nil }
	f.rebuild = func() error { p.rebuildBucket(f, p.feedback[bucket], tmp); return nil }
	return f, nil
}

// sides are the rows and columns of a shape seen as a matrix.
func sides(shape []int) (n, m int) {
	n, m = 1, 1
	for i, d := range shape {
		if i == 0 {
			n = d
			continue
		}
		m *= d
	}
	return n, m
}

// refill gives column c of Q random numbers, the same on all ranks.
func (x *matrix) refill(seed uint64, c, step int) {
	var rng rand.PCG
	rng.Seed(seed^x.seed, uint64(step)<<16|uint64(c))
	for j := range x.m {
		x.q[c*x.m+j] = float32(rng.Uint64()>>40)/(1<<24) - 0.5
	}
}

// projectBucket makes P = M·Q of this rank's share of the sum.
func (p *powerSGD) projectBucket(f *factors, left residual) {
	left.take(p.k, f.sum, f.grads, p.step.Scale)
	for i := range f.vectors {
		v := &f.vectors[i]
		copy(v.sent, f.sum[v.at:])
	}
	for i := range f.matrices {
		x := &f.matrices[i]
		for c := range x.r {
			if p.h.NoWarmStart || zero(x.q[c*x.m:(c+1)*x.m]) {
				x.refill(p.h.Seed, c, p.step.Number)
			}
		}
		p.k.Gemm(p.work, &simd.Gemm{M: x.n, N: x.r, K: x.m, A: f.sum[x.at:], RsA: x.m, CsA: 1, B: x.q, RsB: 1, CsB: x.m, C: x.p, LdC: x.r})
	}
}

// backBucket makes Q = Mᵀ·P of the orthonormal P.
func (p *powerSGD) backBucket(f *factors, cols *columns) {
	for i := range f.matrices {
		x := &f.matrices[i]
		cols.orthonormalise(x.p, x.n, x.r)
		p.k.Gemm(p.work, &simd.Gemm{M: x.r, N: x.m, K: x.n, A: x.p, RsA: 1, CsA: x.r, B: f.sum[x.at:], RsB: x.m, CsB: 1, C: x.q, LdC: x.m})
	}
}

// rebuildBucket makes P·Qᵀ, which all ranks compute alike: every product and
// sum is rounded by itself. A rank's residual is its own gradient less its part
// of what was applied.
func (p *powerSGD) rebuildBucket(f *factors, left residual, tmp []float32) {
	for i := range f.matrices {
		x := &f.matrices[i]
		for r := range x.n {
			row := f.grads[x.at+r*x.m:][:x.m]
			p.k.Scale(row, x.q[:x.m], x.p[r*x.r])
			for c := 1; c < x.r; c++ {
				p.k.Scale(tmp[:x.m], x.q[c*x.m:(c+1)*x.m], x.p[r*x.r+c])
				p.k.Add(row, row, tmp[:x.m])
			}
			if left != nil {
				p.k.Axpy(left[x.at+r*x.m:][:x.m], row, float32(-1/float64(p.env.Comm.Size())))
			}
		}
	}
	for i := range f.vectors {
		v := &f.vectors[i]
		copy(f.grads[v.at:], v.sent)
		if left != nil {
			clear(left[v.at:][:len(v.sent)])
		}
	}
}

func (p *powerSGD) Reduce(s device.Stream, bucket int, step Step) error {
	if step.Number < p.h.Start {
		return p.plain.Reduce(s, bucket, step)
	}
	p.step.become(step)
	f := p.buckets[bucket]
	if err := s.HostFunc(f.project); err != nil {
		return err
	}
	step.Scale = 1 // the factors are those of scaled gradients
	if err := p.reduceFactors(s, 2*bucket, step, f.first); err != nil {
		return err
	}
	if err := s.HostFunc(f.back); err != nil {
		return err
	}
	if err := p.reduceFactors(s, 2*bucket+1, step, f.second); err != nil {
		return err
	}
	return s.HostFunc(f.rebuild)
}

func (p *powerSGD) reduceFactors(s device.Stream, i int, step Step, b device.Buffer) error {
	if b.Len() == 0 {
		return nil
	}
	return p.wire.Reduce(s, i, step)
}

func (p *powerSGD) States() []State {
	all := p.feedback.states()
	for i, f := range p.buckets {
		for j, x := range f.matrices {
			all = append(all, State{fmt.Sprintf("q.%d.%d", i, j), raw(x.q)})
		}
	}
	for _, w := range []struct {
		name string
		r    Reducer
	}{{"plain", p.plain}, {"wire", p.wire}} {
		for _, st := range w.r.States() {
			all = append(all, State{w.name + "." + st.Name, st.Data})
		}
	}
	return all
}
