package ddp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/engine"
)

// Graph is a further loss of the same model, with nodes of its own (see
// Options.Graphs). A parameter is the one of that name in the other graphs.
type Graph struct {
	Loss    *gorgonia.Node
	Params  gorgonia.Nodes
	Outputs gorgonia.Nodes
}

// branch is one graph of the model, compiled.
type branch struct {
	plan   *engine.Plan
	nodes  gorgonia.Nodes // that the plan has, in its order
	params []int          // the parameters they are
	others []int          // parameters that this graph doesn't use
	ready  func(int) error
	begun  bool // ready was called in this run
}

// compileAll makes a plan of each graph and the model's parameters of theirs:
// those given to New, then whatever other graphs add.
func (d *DDP) compileAll(loss *gorgonia.Node) ([]bucket.Param, error) {
	var params []bucket.Param
	byName := map[string]int{}
	all := append([]Graph{{loss, d.nodes, d.opts.Outputs}}, d.opts.Graphs...)
	d.nodes = nil
	for i, g := range all {
		if err := d.claim(g.Params); err != nil {
			return nil, d.ofGraph(i, err)
		}
		if len(g.Params) == 0 {
			return nil, d.ofGraph(i, errors.New("no parameter to train"))
		}
		b, err := d.compileGraph(g)
		if err != nil {
			return nil, d.ofGraph(i, err)
		}
		for _, n := range g.Params {
			p, err := describe(n)
			if err != nil {
				return nil, d.ofGraph(i, err)
			}
			at, known := byName[p.Name]
			if !known {
				at = len(params)
				byName[p.Name] = at
				params, d.nodes = append(params, p), append(d.nodes, n)
			}
			if q := params[at]; q.Type != p.Type || !slices.Equal(q.Shape, p.Shape) {
				return nil, d.ofGraph(i, fmt.Errorf("parameter %v is %v in another graph", p, q))
			}
			if slices.Contains(b.nodes, n) {
				b.params = append(b.params, at)
			}
		}
		if t := lossType(b.plan); t != lossType(d.first(b).plan) {
			return nil, d.ofGraph(i, fmt.Errorf("its loss is %v, that of the first is not", t))
		}
		d.branches = append(d.branches, b)
	}
	d.settleBranches(len(params))
	return params, nil
}

func (d *DDP) ofGraph(i int, err error) error {
	if len(d.opts.Graphs) == 0 {
		return err
	}
	return fmt.Errorf("graph %d: %w", i, err)
}

// first is the first graph, which b is when there is none yet.
func (d *DDP) first(b *branch) *branch {
	if len(d.branches) == 0 {
		return b
	}
	return d.branches[0]
}

func (d *DDP) compileGraph(g Graph) (*branch, error) {
	b := &branch{nodes: g.Params}
	if d.opts.FindUnused {
		unreached, err := engine.Unreached(g.Loss, g.Params)
		if err != nil {
			return nil, err
		}
		b.nodes = nil
		for i, n := range g.Params {
			if !slices.Contains(unreached, i) {
				b.nodes = append(b.nodes, n)
			}
		}
		if len(b.nodes) == 0 {
			return nil, errors.New("the loss reaches none of the parameters")
		}
	}
	var err error
	b.plan, err = engine.Compile(d.dev, g.Loss, b.nodes, &engine.Options{Logger: d.log, Outputs: g.Outputs, Split: d.splitRule()})
	return b, err
}

func describe(n *gorgonia.Node) (bucket.Param, error) {
	p := bucket.Param{Name: n.Name()}
	if s := n.Shape(); !n.IsScalar() && len(s) > 0 {
		p.Shape = slices.Clone([]int(s))
	}
	var err error
	p.Type, err = engine.TypeOf(n.Dtype())
	if err == nil && !p.Type.Float() {
		err = fmt.Errorf("parameter %q is %v; only floating-point parameters can be averaged", p.Name, p.Type)
	}
	return p, err
}

// settleBranches finds the production order of all gradients, and what each
// graph lacks.
func (d *DDP) settleBranches(params int) {
	seen := make([]bool, params)
	add := func(p int) {
		if !seen[p] {
			seen[p] = true
			d.order = append(d.order, p)
		}
	}
	for _, b := range d.branches {
		for _, i := range b.plan.Order() {
			add(b.params[i])
		}
	}
	for p := range params {
		add(p) // no graph reaches it
		for _, b := range d.branches {
			if !slices.Contains(b.params, p) {
				b.others = append(b.others, p)
			}
		}
	}
	d.use(0)
}

// describeBranches is what must agree between ranks about graphs: their
// production orders, which the layout doesn't show of any but the first.
func (d *DDP) describeBranches() ([]byte, error) {
	var names [][]string
	for _, b := range d.branches {
		var order []string
		for _, i := range b.plan.Order() {
			order = append(order, b.nodes[i].Name())
		}
		names = append(names, order)
	}
	return json.Marshal(names)
}

// use makes graph i the one that runs next.
func (d *DDP) use(i int) {
	d.branch = d.branches[i]
	d.plan, d.ready = d.branch.plan, d.branch.ready
}

// StepGraph is Step on graph i: 0 is the one given to New, i that of
// Options.Graphs[i-1]. Ranks may run different graphs in one step, and
// micro-steps of one accumulation too.
func (d *DDP) StepGraph(ctx context.Context, i int) error {
	if err := d.usable(); err != nil {
		return err
	}
	if i < 0 || i >= len(d.branches) {
		return fmt.Errorf("ddp: StepGraph(%d): there are %d graphs", i, len(d.branches))
	}
	d.use(i)
	return d.step1(ctx)
}

// bindBranches moves the parameters to their memory, in every graph. The first
// graph that has a parameter gives its value.
func (d *DDP) bindBranches() error {
	bound := make([]bool, len(d.nodes))
	for _, b := range d.branches {
		var params, grads []device.Buffer
		for i, p := range b.params {
			if bound[p] {
				if err := d.letNode(p, b.nodes[i]); err != nil {
					return err
				}
			}
			bound[p] = true
			params, grads = append(params, d.paramBufs[p]), append(grads, d.gradBufs[p])
		}
		if err := errors.Join(b.plan.BindParams(params), b.plan.BindGrads(grads)); err != nil {
			return err
		}
	}
	for p, n := range d.nodes {
		if bound[p] {
			continue
		}
		q := d.layout.Params[p]
		if err := engine.Store(d.paramBufs[p], n.Value(), q.Shape, q.Type); err != nil {
			return fmt.Errorf("parameter %q: %w", q.Name, err)
		}
		if err := d.letNode(p, n); err != nil {
			return err
		}
	}
	return nil
}

// letNode binds n to the memory of parameter p.
func (d *DDP) letNode(p int, n *gorgonia.Node) error {
	q := d.layout.Params[p]
	view, err := engine.View(d.paramBufs[p], q.Shape, q.Type)
	if err != nil {
		return err
	}
	return gorgonia.UnsafeLet(n, view)
}

// hookBranches connects every plan with the reducer. Plans count their own
// parameters; the reducer counts the model's.
func (d *DDP) hookBranches() {
	for _, b := range d.branches {
		of := func(f func(int) error) func(int) error {
			return func(i int) error { return f(b.params[i]) }
		}
		b.plan.BindHooks(engine.Hooks{Read: of(d.red.Read), Write: of(d.red.Write), LastRead: of(d.red.LastRead), Rows: func(int) error { return d.red.Rows() }})
		b.ready = func(i int) error {
			if !b.begun {
				b.begun = true
				if err := d.each(b.others, d.red.Ready); err != nil {
					return err
				}
			}
			return d.red.Ready(b.params[i])
		}
	}
	d.use(0)
}

func (d *DDP) each(params []int, f func(int) error) error {
	for _, p := range params {
		if err := f(p); err != nil {
			return err
		}
	}
	return nil
}
