package engine

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// stockGPT is GPT-2 from gorgonia's own ops, without our layers: what a user's
// graph looks like.
type stockGPT struct {
	*problem
	batch, seq, heads, width, vocab, layers int
	mask                                    *G.Node
}

func (m *stockGPT) norm(x *G.Node, name string) *G.Node {
	rows := x.Shape()[0]
	column := func(x *G.Node) *G.Node { return must(G.Reshape(must(G.Mean(x, 1)), tensor.Shape{rows, 1})) }
	x = must(G.BroadcastSub(x, column(x), nil, []byte{1}))
	deviation := must(G.Sqrt(must(G.Add(column(must(G.Square(x))), m.constant(1e-5)))))
	x = must(G.BroadcastHadamardDiv(x, deviation, nil, []byte{1}))
	x = must(G.BroadcastHadamardProd(x, m.param(name+".gamma", 1, m.width), nil, []byte{0}))
	return must(G.BroadcastAdd(x, m.param(name+".beta", 1, m.width), nil, []byte{0}))
}

// small are parameters about zero, so that nothing saturates.
func (p *problem) small(name string, shape ...int) *G.Node {
	n := p.param(name, shape...)
	for i, v := range n.Value().Data().([]float32) {
		n.Value().Data().([]float32)[i] = v / 50
	}
	return n
}

func (p *problem) linear(x *G.Node, name string, in, out int) *G.Node {
	return must(G.BroadcastAdd(must(G.Mul(x, p.small(name+".w", in, out))), p.small(name+".b", 1, out), nil, []byte{0}))
}

func (m *stockGPT) gelu(x *G.Node) *G.Node {
	u := must(G.Add(x, must(G.Mul(must(G.Cube(x)), m.constant(0.044715)))))
	t := must(G.Tanh(must(G.Mul(u, m.constant(math.Sqrt(2/math.Pi))))))
	return must(G.HadamardProd(must(G.Mul(x, m.constant(0.5))), must(G.Add(t, m.constant(1)))))
}

func (m *stockGPT) attention(x *G.Node, name string) *G.Node {
	d := m.width / m.heads
	split := func(part string) *G.Node {
		n := m.linear(x, name+part, m.width, m.width)
		n = must(G.Transpose(must(G.Reshape(n, tensor.Shape{m.batch, m.seq, m.heads, d})), 0, 2, 1, 3))
		return must(G.Reshape(n, tensor.Shape{m.batch * m.heads, m.seq, d}))
	}
	q, k, v := split(".q"), split(".k"), split(".v")
	s := must(G.Mul(must(G.BatchedMatMul(q, k, false, true)), m.constant(1/math.Sqrt(float64(d)))))
	s = must(G.SoftMax(must(G.BroadcastAdd(s, m.mask, nil, []byte{0})), 2))
	y := must(G.Reshape(must(G.BatchedMatMul(s, v)), tensor.Shape{m.batch, m.heads, m.seq, d}))
	y = must(G.Reshape(must(G.Transpose(y, 0, 2, 1, 3)), tensor.Shape{m.batch * m.seq, m.width}))
	return m.linear(y, name+".o", m.width, m.width)
}

// buildGPT makes the loss of a GPT-2 of layers blocks.
func buildGPT(p *problem, batch, seq, heads, width, vocab, layers int) {
	m := &stockGPT{problem: p, batch: batch, seq: seq, heads: heads, width: width, vocab: vocab, layers: layers}
	m.mask = m.input("mask", 1, seq, seq)
	for i := range m.mask.Value().Data().([]float32) {
		m.mask.Value().Data().([]float32)[i] = 0
		if i%seq > i/seq {
			m.mask.Value().Data().([]float32)[i] = -1e9
		}
	}
	rows := batch * seq
	tokens, positions := make([]int, rows), make([]int, rows)
	for i := range tokens {
		tokens[i], positions[i] = i*7%vocab, i%seq
	}
	wte := m.small("wte", vocab, width)
	x := must(G.Add(must(G.ByIndices(wte, m.ints("tokens", tokens...), 0)),
		must(G.ByIndices(m.small("wpe", seq, width), m.ints("positions", positions...), 0))))
	for i := range layers {
		h := fmt.Sprint("h", i)
		x = must(G.Add(x, m.attention(m.norm(x, h+".ln1"), h)))
		y := m.gelu(m.linear(m.norm(x, h+".ln2"), h+".fc", width, 4*width))
		x = must(G.Add(x, m.linear(y, h+".proj", 4*width, width)))
	}
	logits := must(G.Mul(m.norm(x, "lnf"), must(G.Transpose(wte, 1, 0))))
	m.crossEntropy(logits, rows, vocab)
}

func (p *problem) crossEntropy(logits *G.Node, rows, classes int) {
	oneHot := p.input("one hot", rows, classes)
	for i := range oneHot.Value().Data().([]float32) {
		oneHot.Value().Data().([]float32)[i] = 0
		if i/classes*5%classes == i%classes {
			oneHot.Value().Data().([]float32)[i] = 1
		}
	}
	sum := must(G.Sum(must(G.HadamardProd(must(G.LogSoftMax(logits, 1)), oneHot))))
	p.loss = must(G.Mul(sum, p.constant(-1/float64(rows))))
}

// buildMLP makes the loss of two layers with rectifiers between them.
func buildMLP(p *problem, batch, in, hidden, out int) {
	h := must(G.Rectify(p.linear(p.input("x", batch, in), "fc1", in, hidden)))
	p.crossEntropy(p.linear(h, "fc2", hidden, out), batch, out)
}

var stockModels = map[string]func(p *problem){
	"mlp": func(p *problem) { buildMLP(p, 64, 784, 512, 10) },
	"gpt": func(p *problem) { buildGPT(p, 8, 64, 4, 128, 256, 4) },
}

// Without it a model of stock ops could fall back to the ops' own Do, an order of
// magnitude slower, without anybody noticing.
func TestStockModelsRunAsKernels(t *testing.T) {
	d := newDevice(t)
	for name, build := range map[string]func(p *problem){
		"mlp": func(p *problem) { buildMLP(p, 5, 7, 6, 3) },
		"gpt": func(p *problem) { buildGPT(p, 2, 3, 2, 4, 5, 2) },
	} {
		p := newProblem(tensor.Float32)
		build(p)
		r := compile(t, d, p, nil)
		for _, st := range r.steps {
			require.True(t, st.copy || st.v.kernel != nil, "%s: %s", name, st.v.name())
		}
		q := newProblem(tensor.Float32)
		build(q)
		loss, want := compile(t, d, q, &Options{Reference: true}).run()
		got, grads := r.run()
		require.InDelta(t, loss, got, 1e-5*max(1, loss), name)
		for i := range want {
			if slices.Max(want[i])-slices.Min(want[i]) < 1e-9 {
				grads[i] = want[i] // that of a key's bias: a softmax takes what all keys share away
			}
		}
		requireClose(t, p, grads, want, 2e-5)
		bindBuffers(t, d, r.Plan)
		ctx := t.Context()
		require.Zero(t, testing.AllocsPerRun(10, func() {
			require.NoError(t, r.Run(r.s, nil))
			require.NoError(t, r.s.Sync(ctx))
		}), name)
	}
}

// A forward and backward pass of models of stock ops, one compute thread, and
// the same graphs on gorgonia's TapeMachine, which takes all cores it wants.
func BenchmarkStock(b *testing.B) {
	for name, build := range stockModels {
		b.Run(name+"/plan", func(b *testing.B) {
			d := newDevice(b)
			p := newProblem(tensor.Float32)
			build(p)
			r := compile(b, d, p, nil)
			bindBuffers(b, d, r.Plan)
			r.run()
			b.ReportAllocs()
			for b.Loop() {
				require.NoError(b, r.Run(r.s, nil))
				require.NoError(b, r.s.Sync(b.Context()))
			}
		})
		b.Run(name+"/tapemachine", func(b *testing.B) {
			p := newProblem(tensor.Float32)
			build(p)
			_, err := G.Grad(p.loss, p.params...)
			require.NoError(b, err)
			m := G.NewTapeMachine(p.g, G.BindDualValues(p.params...))
			defer m.Close()
			b.ReportAllocs()
			for b.Loop() {
				require.NoError(b, m.RunAll())
				m.Reset()
			}
		})
	}
}
