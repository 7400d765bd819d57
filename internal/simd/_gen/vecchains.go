package main

import (
	"slices"

	"github.com/mmcloughlin/avo/ir"
)

// A body of each is one long chain of dependent instructions. A processor looks
// only some hundred instructions ahead, which is three or four chains one after
// another, and waits. So the chains of a group are interleaved: instruction i of
// every chain, then i+1. Marks in the instruction stream say where chains begin.

const chainBegins, chainsEnd = "chain begins", "chains end"

// chains runs body for each of n chains and marks them.
func (v *vec) chains(n int, body func(u int)) {
	for u := range n {
		v.Comment(chainBegins)
		body(u)
	}
	v.Comment(chainsEnd)
}

// interleave replaces marked chains, and their marks, by one interleaved stream.
func interleave(nodes []ir.Node) []ir.Node {
	var out []ir.Node
	var open [][]ir.Node
	for _, n := range nodes {
		c, isMark := n.(*ir.Comment)
		isMark = isMark && len(c.Lines) == 1
		switch {
		case isMark && c.Lines[0] == chainBegins:
			open = append(open, nil)
		case isMark && c.Lines[0] == chainsEnd:
			out = append(out, zip(open)...)
			open = nil
		case len(open) > 0:
			open[len(open)-1] = append(open[len(open)-1], n)
		default:
			out = append(out, n)
		}
	}
	return out
}

func zip(chains [][]ir.Node) []ir.Node {
	var out []ir.Node
	for i := 0; slices.ContainsFunc(chains, func(c []ir.Node) bool { return i < len(c) }); i++ {
		for _, c := range chains {
			if i < len(c) {
				out = append(out, c[i])
			}
		}
	}
	return out
}
