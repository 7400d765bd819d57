package engine

import (
	"bytes"
	"fmt"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// matrix is a parameter of two dimensions without values.
func (p *problem) matrix(name string, rows, cols int) *G.Node {
	n := G.NewMatrix(p.g, p.dt, G.WithShape(rows, cols), G.WithName(name))
	p.params = append(p.params, n)
	return n
}

func (p *problem) sum(xs ...*G.Node) {
	p.loss = must(G.Sum(xs[0]))
	for _, x := range xs[1:] {
		p.loss = must(G.Add(p.loss, must(G.Sum(must(G.Square(x))))))
	}
}

// Without it a graph that gorgonia computes wrongly, or may, would train to
// something else without a word.
func TestHazards(t *testing.T) {
	d := newDevice(t)
	for name, c := range map[string]struct {
		build   func(p *problem)
		refused string // the error, or
		warned  string // the warning
	}{
		"inverse square root": {func(p *problem) { p.sum(must(G.InverseSqrt(p.param("w", 2)))) }, "gradient of InverseSqrt is wrong", ""},
		"its value alone": {func(p *problem) {
			p.sum(must(G.HadamardProd(p.param("w", 2), must(G.InverseSqrt(p.input("x", 2))))))
		}, "", ""},
		"log2":                 {func(p *problem) { p.sum(must(G.Log2(p.param("w", 2)))) }, "gradient of Log2 is wrong", ""},
		"outer product":        {func(p *problem) { p.sum(must(G.OuterProd(p.param("v", 2), p.param("w", 2)))) }, "gradient of OuterProd is wrong", ""},
		"indices of a vector":  {func(p *problem) { p.sum(must(G.ByIndices(p.param("w", 4), p.ints("i", 1, 2), 0))) }, "ByIndices is wrong for a vector", ""},
		"indices of a matrix":  {func(p *problem) { p.sum(must(G.ByIndices(p.param("w", 4, 2), p.ints("i", 1, 2), 0))) }, "", ""},
		"two slices in one":    {sliced(768, 0, 256, 512), "two slices may have become one", ""},
		"slices of one hash":   {sliced(384, 0, 256), "two slices may have become one", ""},
		"one slice, wide":      {sliced(384, 0), "", "hashes bounds modulo 256"},
		"slices kept apart":    {sliced(256, 0, 128), "", ""},
		"wide, but not merged": {sliced(300, 64, 128), "", ""},
		"softmax and its log": {func(p *problem) {
			x := p.param("w", 2, 3)
			p.sum(must(G.SoftMax(x)), must(G.Tanh(must(G.LogSoftMax(x)))))
		}, "", "merges SoftMax and LogSoftMax"},
		"dropout": {func(p *problem) { p.sum(must(G.Dropout(p.param("w", 2, 3), 0.5))) }, "", "runs are not repeatable"},
		"two dropouts": {func(p *problem) {
			x := p.param("w", 2, 3)
			p.sum(must(G.Dropout(x, 0.5)), must(G.Tanh(must(G.Dropout(x, 0.5)))))
		}, "", "share one mask"},
		"random node": {func(p *problem) {
			p.sum(must(G.HadamardProd(p.param("w", 2), G.UniformRandomNode(p.g, p.dt, 0, 1, 2))))
		}, "", "runs are not repeatable"},
		"large constant": {func(p *problem) {
			c := G.NewConstant(tensor.New(tensor.WithShape(40, 40), tensor.WithBacking(p.values(1600, false))))
			p.sum(must(G.HadamardProd(p.param("w", 40, 40), c)))
		}, "", "printed form"},
		"small constant": {func(p *problem) {
			c := G.NewConstant(tensor.New(tensor.WithShape(2, 2), tensor.WithBacking(p.values(4, false))))
			p.sum(must(G.HadamardProd(p.param("w", 2, 2), c)))
		}, "", ""},
		"assignment": {func(p *problem) {
			w := p.param("w", 2)
			p.sum(must(G.Square(w)))
			G.Set(w, p.input("x", 2))
		}, "", "not executed"},
		"many nodes": {func(p *problem) {
			x := p.param("w", 2)
			for range 2000 {
				x = must(G.Tanh(x))
			}
			for i := range 1000 {
				G.NewVector(p.g, p.dt, G.WithShape(1), G.WithName(fmt.Sprint(i)))
			}
			p.sum(x)
		}, "", "32-bit hash"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newProblem(tensor.Float32)
			c.build(p)
			var log bytes.Buffer
			_, err := Compile(d, p.loss, p.params, &Options{Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))})
			if c.refused != "" {
				require.ErrorContains(t, err, c.refused)
				return
			}
			require.NoError(t, err)
			if c.warned == "" {
				require.Empty(t, log.String())
			}
			require.Contains(t, log.String(), c.warned)
		})
	}
}

// sliced takes slices of 128 columns from those given on.
func sliced(cols int, from ...int) func(p *problem) {
	return func(p *problem) {
		x := p.matrix("w", 2, cols)
		var parts []*G.Node
		for _, f := range from {
			parts = append(parts, must(G.Tanh(must(G.Slice(x, nil, G.S(f, f+128))))))
		}
		if len(from) > 1 {
			p.sum(must(G.HadamardProd(parts[0], parts[1])), parts[len(parts)-1])
			// Tanh of one node is one node: a reader of the slice itself, too.
			p.loss = must(G.Add(p.loss, must(G.Sum(must(G.Slice(x, nil, G.S(from[1], from[1]+128)))))))
			return
		}
		p.sum(parts...)
	}
}

// Without it gorgonia's merging of inputs would go unnoticed.
func TestNamesOfInputs(t *testing.T) {
	d := newDevice(t)
	for name, c := range map[string]struct {
		build func(p *problem)
		want  string
	}{
		"unnamed input": {func(p *problem) {
			x := G.NewVector(p.g, p.dt, G.WithShape(2))
			p.sum(must(G.HadamardProd(p.param("w", 2), x)))
		}, "has no name"},
		"one name, two shapes": {func(p *problem) {
			p.sum(p.param("w", 2), must(G.Tanh(p.input("w", 3))))
		}, `two inputs are named "w"`},
		"parameter twice": {func(p *problem) {
			p.sum(must(G.Square(p.param("w", 2))))
			p.params = append(p.params, p.params[0])
		}, `"w" is given twice`},
		"not an input": {func(p *problem) {
			p.sum(must(G.Square(p.param("w", 2))))
			p.params = append(p.params, p.loss)
		}, "not an input"},
		"unreached": {func(p *problem) {
			p.param("idle", 2)
			p.sum(must(G.HadamardProd(p.param("w", 2), must(G.Sign(p.param("flat", 2))))))
		}, `on "idle", "flat"`},
		"no scalar": {func(p *problem) { p.loss = must(G.Square(p.param("w", 2))) }, "not a float scalar"},
		"another graph": {func(p *problem) {
			p.sum(must(G.Square(p.param("w", 2))))
			p.params = append(p.params, newProblem(p.dt).param("other", 2))
		}, "in another graph"},
		"gradients of some": {func(p *problem) {
			p.sum(must(G.HadamardProd(p.param("v", 2), p.param("w", 2))))
			must(nil2(G.Grad(p.loss, p.params[0])))
		}, "1 of 2 parameters have no gradient"},
		"gradients of another loss": {func(p *problem) {
			y := must(G.Square(p.param("w", 2)))
			must(nil2(G.Grad(must(G.Sum(y)), p.params...)))
			p.loss = must(G.Mean(must(G.Tanh(y))))
		}, "of another loss"},
		"gradients on a stale index": {func(p *problem) {
			x := must(G.Sigmoid(p.param("w", 2, 2)))
			p.sum(must(G.BinaryXent(x, p.input("y", 2, 2))))
			_, _ = G.Grad(p.loss, p.params...)
		}, "leave the gradients to Compile"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newProblem(tensor.Float32)
			c.build(p)
			_, err := Compile(d, p.loss, p.params, nil)
			require.ErrorContains(t, err, c.want)
		})
	}
}

func nil2(ns G.Nodes, err error) (*G.Node, error) {
	if err != nil {
		return nil, err
	}
	return ns[0], nil
}
