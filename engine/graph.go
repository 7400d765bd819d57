package engine

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/device"
)

type kind uint8

const (
	computed kind = iota
	input
	param
	static // its value is known at compile
)

// value is a node of the graph that a plan needs, and where its result lies.
type value struct {
	index  int // position among the graph's values, ascending node id
	node   *gorgonia.Node
	op     gorgonia.Op
	in     []*value
	t      device.Tensor
	dt     tensor.Dtype
	scalar bool // gorgonia holds it as *F32 and the like, not as a tensor
	kind   kind
	param  int            // the parameter's number, or -1
	known  gorgonia.Value // what a static value is

	forward bool // needed by the loss or an output, not only by gradients

	base   *value // whose memory it is: itself, unless it is a view
	kernel device.Kernel
	desc   device.Op // what kernel was compiled from
	place  place
	item   *item // its memory in the arena, when it has some
}

// name is how errors call v.
func (v *value) name() string { return nodeName(v.node) }

func nodeName(n *gorgonia.Node) string {
	if n.Op() == nil {
		return fmt.Sprintf("%q", n.Name())
	}
	return fmt.Sprintf("node %d %q", n.ID(), n.Name())
}

func (v *value) computedBase() bool { return v.base.kind == computed }

// target is a variable that a gorgonia.Read points at.
type target struct {
	node *gorgonia.Node
	into *gorgonia.Value
}

// graph is the part of a gorgonia graph that a plan needs.
type graph struct {
	g      *gorgonia.ExprGraph
	values []*value // ascending node id: children first, creation order
	byID   map[int64]*value
	params gorgonia.Nodes
	loss   *value
	reads  []target
	sets   gorgonia.Nodes // assignments, which nothing here executes
}

// collect returns the ancestors of the roots. What each needs is settled later.
func collect(loss *gorgonia.Node, params, roots gorgonia.Nodes) (*graph, error) {
	gr := &graph{g: loss.Graph(), byID: map[int64]*value{}, params: params}
	if err := gr.statements(); err != nil {
		return nil, err
	}
	all := append(gorgonia.Nodes{loss}, roots...)
	for _, t := range gr.reads {
		all = append(all, t.node)
	}
	nodes, err := gr.ancestors(all)
	if err != nil {
		return nil, err
	}
	for _, n := range nodes {
		if err := gr.add(n); err != nil {
			return nil, err
		}
	}
	gr.loss = gr.byID[loss.ID()]
	for i, n := range params {
		if v := gr.byID[n.ID()]; v != nil {
			v.kind, v.param = param, i
		}
	}
	return gr, nil
}

// mend clears gorgonia's cache of node positions by id when it has gone stale,
// and reports that it had. Removing a node, as gorgonia does where it rewrites
// log(1−x), moves the nodes behind it but not their cached positions: gorgonia
// then takes one node for another when it sorts and differentiates. The cache is
// filled again from the nodes themselves.
func mend(g *gorgonia.ExprGraph) bool {
	stale := false
	for _, n := range g.AllNodes() {
		stale = stale || g.Node(n.ID()) != n
	}
	if !stale {
		return false
	}
	cache := reflect.ValueOf(g).Elem().FieldByName("byID")
	if cache.IsValid() && cache.Type() == reflect.TypeFor[map[int64]int]() {
		clear(*(*map[int64]int)(cache.Addr().UnsafePointer()))
	}
	return true
}

// statements finds the nodes that are orders to a machine, not results.
func (gr *graph) statements() error {
	for _, n := range gr.g.AllNodes() {
		switch typeName(n.Op()) {
		case "gorgonia.readOp":
			kids := gr.children(n)
			into := reflect.ValueOf(n.Op()).FieldByName("into")
			if len(kids) != 1 || into.Kind() != reflect.Pointer {
				return fmt.Errorf("engine: %s: a gorgonia.Read of an unknown layout", nodeName(n))
			}
			if into.IsNil() {
				return fmt.Errorf("engine: gorgonia.Read of %s into a nil pointer", nodeName(kids[0]))
			}
			gr.reads = append(gr.reads, target{kids[0], (*gorgonia.Value)(into.UnsafePointer())})
		case "gorgonia.letOp":
			gr.sets = append(gr.sets, n)
		}
	}
	return nil
}

// children are n's operands in order, with duplicates.
func (gr *graph) children(n *gorgonia.Node) gorgonia.Nodes {
	var kids gorgonia.Nodes
	for it := gr.g.From(n.ID()); it != nil && it.Next(); {
		kids = append(kids, it.Node().(*gorgonia.Node))
	}
	return kids
}

func (gr *graph) ancestors(roots gorgonia.Nodes) (gorgonia.Nodes, error) {
	seen := map[int64]bool{}
	var found, stack gorgonia.Nodes
	push := func(n *gorgonia.Node) {
		if !seen[n.ID()] {
			seen[n.ID()] = true
			stack = append(stack, n)
		}
	}
	for _, n := range roots {
		push(n)
	}
	for len(stack) > 0 {
		n := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		if n.Graph() != gr.g || gr.g.Node(n.ID()) != n {
			return nil, fmt.Errorf("engine: %s is not in the loss's graph", nodeName(n))
		}
		found = append(found, n)
		for _, c := range gr.children(n) {
			push(c)
		}
	}
	slices.SortFunc(found, func(a, b *gorgonia.Node) int { return int(a.ID() - b.ID()) })
	return found, nil
}

func (gr *graph) add(n *gorgonia.Node) error {
	v := &value{index: len(gr.values), node: n, op: n.Op(), param: -1, scalar: n.IsScalar()}
	v.base = v
	v.dt = n.Dtype()
	t, ok := typeOf(v.dt)
	if !ok {
		return fmt.Errorf("engine: %s has elements of %v, which no plan holds", v.name(), v.dt)
	}
	v.t = device.Tensor{Type: t}
	if s := n.Shape(); !v.scalar && len(s) > 0 {
		v.t.Shape = []int(s)
	} else {
		v.scalar = true
	}
	if v.t.Elems() <= 0 {
		return fmt.Errorf("engine: %s has shape %v: no elements", v.name(), v.t.Shape)
	}
	for _, c := range gr.children(n) {
		w := gr.byID[c.ID()]
		if w == nil {
			return fmt.Errorf("engine: %s was created before its operand %s", v.name(), nodeName(c))
		}
		v.in = append(v.in, w)
	}
	switch {
	case v.op == nil:
		v.kind = input
	case len(v.in) == 0 && n.Value() != nil && typeName(v.op) != "gorgonia.randomOp":
		v.kind, v.known = static, n.Value()
	}
	gr.values = append(gr.values, v)
	gr.byID[n.ID()] = v
	return nil
}

// inputNames refuses inputs that gorgonia can't tell apart: it merges two of
// one name, type and shape into one node, without a word.
func (gr *graph) inputNames() error {
	seen := map[string]int64{}
	check := func(n *gorgonia.Node) error {
		name := n.Name()
		if name == "" || strings.HasPrefix(name, "%!s(<nil>)") || strings.HasPrefix(name, "<nil>(") {
			return fmt.Errorf("engine: the input of id %d, %v %v, has no name: gorgonia merges unnamed inputs; use WithName",
				n.ID(), n.Type(), n.Shape())
		}
		if id, ok := seen[name]; ok && id != n.ID() {
			return fmt.Errorf("engine: two inputs are named %q: gorgonia merges inputs of one name; rename one", name)
		}
		seen[name] = n.ID()
		return nil
	}
	for _, n := range gr.params {
		if _, dup := seen[n.Name()]; dup {
			return fmt.Errorf("engine: parameter %q is given twice", n.Name())
		}
		if err := check(n); err != nil {
			return err
		}
	}
	for _, v := range gr.values {
		if v.op == nil {
			if err := check(v.node); err != nil {
				return err
			}
		}
	}
	return nil
}

// typeName is the name of an op's type, such as "gorgonia.linAlgBinOp", without
// the star of a pointer. Stock ops are told apart by it: their types are unexported.
func typeName(op any) string {
	if op == nil {
		return ""
	}
	return strings.TrimPrefix(reflect.TypeOf(op).String(), "*")
}
