package nn

import (
	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem/device"
)

// KeyLen is the length of Dropout's key.
const KeyLen = 3

// Dropout sets elements of x (N, D) to zero with probability p, 0 ≤ p < 1, and
// divides the others by 1−p. Which ones is a pure function of the seed, the
// step, the sample and the element (device.DropoutKeep), so it doesn't depend
// on how the batch is spread over ranks. key holds seed, step and the index of
// the first sample; a sample is seq rows. salt tells the dropouts of a model
// apart. With p = 0 the result is x itself.
func Dropout(x, key *gorgonia.Node, p float64, seq int, salt int64) (*gorgonia.Node, error) {
	c := &checker{layer: "dropout"}
	s := c.floats("x", x, 2)
	c.must(p >= 0 && float32(p) < 1, "probability is %v, want 0 ≤ p < 1", p)
	c.must(seq > 0, "seq is %d, want at least 1", seq)
	if c.err == nil {
		c.must(s.Shape[0]%seq == 0, "x %q has %d rows, want a multiple of the sequence length %d", x.Name(), s.Shape[0], seq)
	}
	if c.err == nil && p == 0 {
		return x, nil
	}
	n := c.ints("key", key)
	c.must(n == KeyLen, "key has %d elements, want %d: seed, step, first sample", n, KeyLen)
	if c.err != nil {
		return nil, c.err
	}
	return apply(dropoutOp(s, device.Attr{P: float32(p), Seq: seq, Salt: salt}), x, key)
}

// dropoutOp is its own gradient: the mask is computed again, not kept.
func dropoutOp(s device.Tensor, attr device.Attr) *op {
	o := &op{ref: reference{dropout[float32], dropout[float64]}}
	o.desc = device.Op{Kind: device.Dropout, Attr: attr, Out: []device.Tensor{s}}
	o.diff = []bool{true, false}
	o.grad = func(in gorgonia.Nodes, _, dy *gorgonia.Node) (gorgonia.Nodes, error) {
		g := gradientsOf(2)
		g.add(0, dropoutOp(s, attr), dy, in[1])
		return g.done()
	}
	return o
}

func dropout[F float](a args[F]) error {
	at, key := a.desc.Attr, a.i[1]
	size := at.Seq * a.desc.In[0].Shape[1]
	scale, bound := 1/(1-float64(at.P)), device.DropoutThreshold(at.P)
	for first := 0; first < len(a.out); first += size {
		k := device.DropoutKey(int64(key[0]), int64(key[1]), at.Salt, int64(key[2]+first/size))
		for i, x := range a.f[0][first : first+size] {
			a.out[first+i] = 0
			if device.DropoutBits(k, i) >= bound {
				a.out[first+i] = F(scale * float64(x))
			}
		}
	}
	return nil
}
