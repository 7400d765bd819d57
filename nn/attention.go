package nn

import (
	"math"

	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem/device"
)

// CausalSelfAttention lets each position look at itself and those before it in
// its sequence. Row n of qkv (N, 3D) holds query, key and value one after
// another, each split into heads of D/heads elements; N is a multiple of seq,
// the length of a sequence. Scores are scaled by 1/√(D/heads). The result is
// (N, D). After Vaswani et al., arXiv:1706.03762, section 3.2.
func CausalSelfAttention(qkv *gorgonia.Node, heads, seq int) (*gorgonia.Node, error) {
	c := &checker{layer: "attention"}
	s := c.floats("qkv", qkv, 2)
	c.must(heads > 0, "heads is %d, want at least 1", heads)
	c.must(seq > 0, "seq is %d, want at least 1", seq)
	if c.err != nil {
		return nil, c.err
	}
	n, d := s.Shape[0], s.Shape[1]/3
	c.must(s.Shape[1]%3 == 0, "qkv %q has %d columns, want a multiple of 3 (query, key, value)", qkv.Name(), s.Shape[1])
	c.must(d%heads == 0, "d-model %d of qkv %q is not divisible by %d heads", d, qkv.Name(), heads)
	c.must(n%seq == 0, "qkv %q has %d rows, want a multiple of the sequence length %d", qkv.Name(), n, seq)
	if c.err != nil {
		return nil, c.err
	}
	attr := device.Attr{Heads: heads, Seq: seq}
	lse := &device.State{Name: "attention.lse", Tensor: device.Tensor{Shape: []int{n * heads}, Type: s.Type}}
	o := &op{ref: reference{attention[float32], attention[float64]}}
	o.desc = device.Op{
		Kind: device.Attention, Attr: attr, State: []*device.State{lse},
		Out: []device.Tensor{{Shape: []int{n, d}, Type: s.Type}},
	}
	o.diff = []bool{true}
	o.grad = func(in gorgonia.Nodes, y, dy *gorgonia.Node) (gorgonia.Nodes, error) {
		g := gradientsOf(1)
		dqkv := &op{ref: reference{attentionGrad[float32], attentionGrad[float64]}}
		dqkv.desc = device.Op{Kind: device.AttentionGrad, Attr: attr, State: []*device.State{lse}, Out: []device.Tensor{s}}
		g.add(0, dqkv, in[0], y, dy)
		return g.done()
	}
	return apply(o, qkv)
}

// head is the part of packed activations that one head of one sequence sees.
type head struct {
	d, dh   int // features of the model and of a head
	row     int // first row of the sequence
	off     int // first column of the head
	weights []float64
}

// eachHead calls f for every head of every sequence of qkv.
func eachHead(o device.Op, f func(h head, seq int)) {
	n, d := o.In[0].Shape[0], o.In[0].Shape[1]/3
	h := head{d: d, dh: d / o.Attr.Heads, weights: make([]float64, o.Attr.Seq)}
	for h.row = 0; h.row < n; h.row += o.Attr.Seq {
		for h.off = 0; h.off < d; h.off += h.dh {
			f(h, o.Attr.Seq)
		}
	}
}

// of is position i's query (part 0), key (1) or value (2) in packed rows.
func of[F float](h head, qkv []F, i, part int) []F {
	return qkv[(h.row+i)*3*h.d+part*h.d+h.off:][:h.dh]
}

// out is position i's slice of an output row.
func out[F float](h head, y []F, i int) []F { return y[(h.row+i)*h.d+h.off:][:h.dh] }

func dot[F float](a, b []F) (s float64) {
	for i, v := range a {
		s += float64(v) * float64(b[i])
	}
	return s
}

func axpy[F float](dst []F, s float64, x []F) {
	for i, v := range x {
		dst[i] += F(s * float64(v))
	}
}

// softmaxRow is how position i weighs positions 0 … i.
func softmaxRow[F float](h head, qkv []F, i int) []float64 {
	w, most, sum := h.weights[:i+1], math.Inf(-1), 0.0
	for j := range w {
		w[j] = dot(of(h, qkv, i, 0), of(h, qkv, j, 1)) / math.Sqrt(float64(h.dh))
		most = max(most, w[j])
	}
	for j := range w {
		w[j] = math.Exp(w[j] - most)
		sum += w[j]
	}
	for j := range w {
		w[j] /= sum
	}
	return w
}

func attention[F float](a args[F]) error {
	clear(a.out)
	eachHead(a.desc, func(h head, seq int) {
		for i := range seq {
			for j, w := range softmaxRow(h, a.f[0], i) {
				axpy(out(h, a.out, i), w, of(h, a.f[0], j, 2))
			}
		}
	})
	return nil
}

// attentionGrad uses Σⱼ wⱼ·(dy·vⱼ) = dy·y, as FlashAttention does
// (arXiv:2205.14135, appendix B.2).
func attentionGrad[F float](a args[F]) error {
	qkv, y, dy := a.f[0], a.f[1], a.f[2]
	clear(a.out)
	eachHead(a.desc, func(h head, seq int) {
		for i := range seq {
			g := out(h, dy, i)
			mean := dot(g, out(h, y, i))
			for j, w := range softmaxRow(h, qkv, i) {
				axpy(of(h, a.out, j, 2), w, g)
				ds := w * (dot(g, of(h, qkv, j, 2)) - mean) / math.Sqrt(float64(h.dh))
				axpy(of(h, a.out, i, 0), ds, of(h, qkv, j, 1))
				axpy(of(h, a.out, j, 1), ds, of(h, qkv, i, 0))
			}
		}
	})
	return nil
}
