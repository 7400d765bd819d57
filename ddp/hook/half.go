package hook

import (
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/internal/simd"
)

// BF16 sends gradients as bfloat16: half the bytes, float32's range, 8 bits of
// precision.
type BF16 struct {
	// ErrorFeedback adds what rounding this rank's gradients lost to the next
	// step's, at the cost of memory of their size. What rounding their sum loses
	// is fed back too with Float32Sum, and lost without.
	ErrorFeedback bool
	// Float32Sum adds up in float32 and rounds once, instead of at every
	// addition: each rank adds up its share of the bucket from all others. As
	// many bytes travel, in more messages.
	Float32Sum bool
}

// Open implements Hook.
func (h BF16) Open(env Env) (Reducer, error) {
	return openHalf(env, "BF16", dtype.BFloat16, h.ErrorFeedback, h.Float32Sum)
}

// FP16 sends gradients as float16: half the bytes, 11 bits of precision, and a
// range of 6e-8 … 65504. Gradients are divided before they are added, so the
// sum does not overflow where the average fits. Options are those of BF16.
type FP16 struct {
	ErrorFeedback bool
	Float32Sum    bool
}

// Open implements Hook.
func (h FP16) Open(env Env) (Reducer, error) {
	return openHalf(env, "FP16", dtype.Float16, h.ErrorFeedback, h.Float32Sum)
}

// half reduces in a type of two bytes.
type half struct {
	env      Env
	t        dtype.Type
	k        *simd.Kernels
	step     Step
	feedback feedback
	buckets  []halfBucket
}

type halfBucket struct {
	wire         device.Buffer
	pack, unpack func() error
	shares       *shares // with Float32Sum
}

func openHalf(env Env, name string, t dtype.Type, feed, float32Sum bool) (Reducer, error) {
	k, grads, err := env.open(name)
	if err != nil {
		return nil, err
	}
	h := &half{env: env, t: t, k: k, feedback: newFeedback(feed, grads)}
	most := 0
	for _, g := range grads {
		most = max(most, len(g))
	}
	scratch := make([]float32, most) // one stream runs one bucket after another
	for i, g := range grads {
		var b halfBucket
		var wire []uint16
		n := len(g)
		if float32Sum {
			n = (n + env.Comm.Size() - 1) / env.Comm.Size() * env.Comm.Size()
		}
		if b.wire, wire, err = alloc[uint16](env.Comm, n); err != nil {
			return nil, err
		}
		if float32Sum {
			if b.shares, err = newShares(h, b.wire, wire, h.feedback[i]); err != nil {
				return nil, err
			}
		}
		b.pack = func() error { h.packBucket(wire[:len(g)], g, scratch[:len(g)], h.feedback[i]); return nil }
		b.unpack = func() error { h.unscaled(g, wire[:len(g)]); return nil }
		h.buckets = append(h.buckets, b)
	}
	return h, nil
}

func (h *half) narrow(dst []uint16, src []float32) {
	if h.t == dtype.Float16 {
		h.k.F32ToF16(dst, src)
		return
	}
	h.k.F32ToBF16(dst, src)
}

func (h *half) widen(dst []float32, src []uint16) {
	if h.t == dtype.Float16 {
		h.k.F16ToF32(dst, src)
		return
	}
	h.k.BF16ToF32(dst, src)
}

// unscaled widens and takes the loss scale away, which is exact.
func (h *half) unscaled(dst []float32, src []uint16) {
	h.widen(dst, src)
	if l := h.step.lossScale(); l != 1 {
		h.k.Scale(dst, dst, float32(1/l))
	}
}

// packBucket rounds the gradients to wire and keeps what that lost. g is free
// afterwards: the averages overwrite it.
func (h *half) packBucket(wire []uint16, g, v []float32, lost residual) {
	lost.take(h.k, v, g, h.step.Scale)
	if l := h.step.lossScale(); l != 1 {
		h.k.Scale(v, v, float32(l))
		h.narrow(wire, v)
		h.k.Scale(v, v, float32(1/l))
	} else {
		h.narrow(wire, v)
	}
	if lost != nil {
		h.unscaled(g, wire)
		h.k.Sub(lost, v, g)
		lost.drop()
	}
}

// drop forgets what isn't finite: where a sum overflows the step is skipped, or
// is an error, and what was left over must not spoil the next.
func (r residual) drop() {
	for i, v := range r {
		if v-v != 0 {
			r[i] = 0
		}
	}
}

func (h *half) Reduce(s device.Stream, bucket int, step Step) error {
	h.step.become(step)
	b := &h.buckets[bucket]
	if err := s.HostFunc(b.pack); err != nil {
		return err
	}
	tag := comm.Tag{Name: "bucket", Bucket: bucket}
	var err error
	if b.shares != nil {
		err = b.shares.reduce(s, tag)
	} else {
		err = h.env.Comm.AllReduce(s, b.wire, b.wire, h.t, comm.Sum, tag)
	}
	if err != nil {
		return err
	}
	return s.HostFunc(b.unpack)
}

func (h *half) States() []State { return h.feedback.states() }

// shares adds up in float32: rank r collects part r of the wire from all ranks,
// adds the parts in the order of ranks, rounds once, and gives the sum to all.
type shares struct {
	h       *half
	out, in []device.Buffer // by rank: its part of the wire, and where its part for this rank arrives
	mine    device.Buffer
	wire    device.Buffer
	add     func() error
}

func newShares(h *half, wire device.Buffer, elems []uint16, lost residual) (*shares, error) {
	c := h.env.Comm
	n := len(elems) / c.Size()
	inbox, arrived, err := alloc[uint16](c, len(elems))
	if err != nil {
		return nil, err
	}
	mine, sum, err := alloc[uint16](c, n)
	if err != nil {
		return nil, err
	}
	r := &shares{h: h, mine: mine, wire: wire}
	for p := range c.Size() {
		r.out = append(r.out, wire.Slice(2*n*p, 2*n))
		r.in = append(r.in, inbox.Slice(2*n*p, 2*n))
	}
	total, part := make([]float32, n), make([]float32, n)
	r.add = func() error {
		for p := range c.Size() {
			from := arrived[n*p : n*(p+1)]
			if p == c.Rank() {
				from = elems[n*p : n*(p+1)]
			}
			if p == 0 {
				h.widen(total, from)
				continue
			}
			h.widen(part, from)
			h.k.Add(total, total, part)
		}
		h.narrow(sum, total)
		if at := n * c.Rank(); at < len(lost) {
			own := lost[at:min(at+n, len(lost))]
			h.widen(part, sum)
			h.k.Sub(total, total, part)
			h.k.Scale(total, total, float32(1/h.step.lossScale()))
			h.k.Add(own, own, total[:len(own)])
			own.drop()
		}
		return nil
	}
	return r, nil
}

// reduce pairs ranks off in rounds: in round k those whose numbers add up to k
// modulo the size exchange parts, the lower one sends first. So no rank waits
// for one that waits for it, directly or around a circle.
func (r *shares) reduce(s device.Stream, tag comm.Tag) error {
	c := r.h.env.Comm
	for round := range c.Size() {
		peer := (round - c.Rank() + c.Size()) % c.Size()
		if peer == c.Rank() {
			continue
		}
		if err := r.exchange(s, peer, tag); err != nil {
			return err
		}
	}
	if err := s.HostFunc(r.add); err != nil {
		return err
	}
	return c.AllGather(s, r.wire, r.mine, r.h.t, tag)
}

func (r *shares) exchange(s device.Stream, peer int, tag comm.Tag) error {
	c, t := r.h.env.Comm, r.h.t
	if c.Rank() < peer {
		if err := c.Send(s, r.out[peer], t, peer, tag); err != nil {
			return err
		}
	}
	if err := c.Recv(s, r.in[peer], t, peer, tag); err != nil {
		return err
	}
	if c.Rank() < peer {
		return nil
	}
	return c.Send(s, r.out[peer], t, peer, tag)
}
