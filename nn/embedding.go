package nn

import (
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem/device"
)

// Embedding adds to each token's row of wte (V, D) its position's row of wpe
// (at least seq, D). tokens is a vector of N, a multiple of seq; row n is at
// position n mod seq. The result is (N, D). A token outside [0, V) is an error
// when it runs.
func Embedding(wte, wpe, tokens *gorgonia.Node, seq int) (*gorgonia.Node, error) {
	c := &checker{layer: "embedding"}
	te, pe, n := c.floats("wte", wte, 2), c.floats("wpe", wpe, 2), c.ints("tokens", tokens)
	c.must(te.Shape[1] == pe.Shape[1], "wte has shape %v and wpe %v: they must have as many columns", te.Shape, pe.Shape)
	c.must(seq > 0, "seq is %d, want at least 1", seq)
	c.must(seq <= pe.Shape[0], "sequences of %d positions, but wpe has only %d rows; shorten the sequence or enlarge the block", seq, pe.Shape[0])
	if c.err == nil {
		c.must(n%seq == 0, "tokens %q has %d elements, want a multiple of the sequence length %d", tokens.Name(), n, seq)
	}
	if c.err != nil {
		return nil, c.err
	}
	attr := device.Attr{Seq: seq}
	o := &op{ref: reference{embedding[float32], embedding[float64]}}
	o.desc = device.Op{Kind: device.Embedding, Attr: attr, Out: []device.Tensor{{Shape: []int{n, te.Shape[1]}, Type: te.Type}}}
	o.diff = []bool{true, true, false}
	o.grad = func(in gorgonia.Nodes, _, dy *gorgonia.Node) (gorgonia.Nodes, error) {
		g := gradientsOf(3)
		dp := &op{ref: reference{embeddingGradPosition[float32], embeddingGradPosition[float64]}}
		dp.desc = device.Op{Kind: device.EmbeddingGradPosition, Attr: attr, Out: []device.Tensor{pe}}
		g.add(1, dp, dy)
		dt := &op{ref: reference{embeddingGradToken[float32], embeddingGradToken[float64]}}
		dt.desc = device.Op{Kind: device.EmbeddingGradToken, Out: []device.Tensor{te}}
		g.add(0, dt, in[2], dy)
		return g.done()
	}
	return apply(o, wte, wpe, tokens)
}

func checkToken(n, token, vocab int) error {
	if token < 0 || token >= vocab {
		return fmt.Errorf("token %d at row %d lies outside [0, %d)", token, n, vocab)
	}
	return nil
}

func embedding[F float](a args[F]) error {
	vocab, d := a.desc.In[0].Shape[0], a.desc.In[0].Shape[1]
	for n, token := range a.i[2] {
		if err := checkToken(n, token, vocab); err != nil {
			return err
		}
		te, pe := a.f[0][token*d:], a.f[1][n%a.desc.Attr.Seq*d:]
		for j := range d {
			a.out[n*d+j] = te[j] + pe[j]
		}
	}
	return nil
}

func embeddingGradToken[F float](a args[F]) error {
	vocab, d := a.desc.Out[0].Shape[0], a.desc.Out[0].Shape[1]
	clear(a.out)
	for n, token := range a.i[0] {
		if err := checkToken(n, token, vocab); err != nil {
			return err
		}
		axpy(a.out[token*d:][:d], 1, a.f[1][n*d:][:d])
	}
	return nil
}

func embeddingGradPosition[F float](a args[F]) error {
	rows, d := a.desc.In[0].Shape[0], a.desc.In[0].Shape[1]
	clear(a.out)
	for n := range rows {
		axpy(a.out[n%a.desc.Attr.Seq*d:][:d], 1, a.f[0][n*d:][:d])
	}
	return nil
}
