// Package nntest evaluates gorgonia graphs for tests: one node after another,
// in order of creation, each through its own Do into fresh memory. It is slow
// and has none of the faults that an executor with memory to reuse can have.
package nntest

import (
	"fmt"

	"gonum.org/v1/gonum/graph"
	"gorgonia.org/gorgonia"
)

// Values are the values of a graph's nodes after a run.
type Values map[*gorgonia.Node]gorgonia.Value

// Eval computes the roots and all that they depend on. Inputs must have values.
// Errors name the node.
func Eval(roots ...*gorgonia.Node) (Values, error) {
	if len(roots) == 0 {
		return Values{}, nil
	}
	sorted, err := gorgonia.Sort(roots[0].Graph())
	if err != nil {
		return nil, err
	}
	needed := ancestors(roots)
	values := Values{}
	for i := len(sorted) - 1; i >= 0; i-- {
		n := sorted[i]
		if !needed[n] {
			continue
		}
		if values[n], err = eval(n, values); err != nil {
			return nil, fmt.Errorf("nntest: node %q: %w", n.Name(), err)
		}
	}
	return values, nil
}

func eval(n *gorgonia.Node, values Values) (gorgonia.Value, error) {
	in := children(n)
	if n.Op() == nil || len(in) == 0 {
		if n.Value() == nil {
			return nil, fmt.Errorf("has no value; bind one with gorgonia.Let")
		}
		return n.Value(), nil
	}
	args := make([]gorgonia.Value, len(in))
	for i, c := range in {
		args[i] = values[c]
	}
	return n.Op().Do(args...)
}

// children are a node's inputs in order, repetitions included.
func children(n *gorgonia.Node) gorgonia.Nodes {
	var in gorgonia.Nodes
	for _, c := range graph.NodesOf(n.Graph().From(n.ID())) {
		in = append(in, c.(*gorgonia.Node))
	}
	return in
}

func ancestors(roots gorgonia.Nodes) map[*gorgonia.Node]bool {
	seen := map[*gorgonia.Node]bool{}
	for todo := roots; len(todo) > 0; {
		n := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if !seen[n] {
			seen[n] = true
			todo = append(todo, children(n)...)
		}
	}
	return seen
}

// Float64s are the elements of a node's value as float64. It panics when the
// node wasn't computed or holds integers: a mistake in the test.
func (v Values) Float64s(n *gorgonia.Node) []float64 {
	val, ok := v[n]
	if !ok {
		panic(fmt.Sprintf("nntest: node %q was not computed", n.Name()))
	}
	switch d := val.Data().(type) {
	case []float64:
		return d
	case float64:
		return []float64{d}
	case float32:
		return []float64{float64(d)}
	case []float32:
		wide := make([]float64, len(d))
		for i, x := range d {
			wide[i] = float64(x)
		}
		return wide
	}
	panic(fmt.Sprintf("nntest: node %q holds %v", n.Name(), val.Dtype()))
}
