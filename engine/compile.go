package engine

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// gradMu serialises gorgonia.Grad: it adds constants of gorgonia's own, which
// all graphs of the process share, and hashing writes to them.
var gradMu sync.Mutex

// Compile makes a plan that computes loss, a scalar, and its gradients with
// respect to params. It calls gorgonia.Grad unless the caller has; every other
// node is left as it is. Two processes that build the same graph get the same
// plan.
//
// It fails, naming nodes, where an input or parameter has no name or shares it,
// where the loss doesn't depend on a parameter, where an op has no kernel and
// the device is not the host, and where gorgonia would silently compute
// something else (see the list of hazards).
func Compile(dev device.Device, loss *gorgonia.Node, params gorgonia.Nodes, o *Options) (*Plan, error) {
	p := &Plan{dev: dev, opts: o.withDefaults(), nodes: slices.Clone(params)}
	if err := p.check(loss); err != nil {
		return nil, err
	}
	gr, err := p.differentiate(loss)
	if err != nil {
		return nil, err
	}
	if err := p.events(); err != nil {
		return nil, err
	}
	if p.host, err = hostMemory(dev); err != nil {
		return nil, err
	}
	if p.opts.Poison && !p.host {
		return nil, fmt.Errorf("engine: Options.Poison needs memory that the host can address, and %s has other", dev.Name())
	}
	if err := lower(dev, gr, p.opts); err != nil {
		return nil, err
	}
	if err := p.roots(gr); err != nil {
		return nil, err
	}
	if err := p.hostOps(); err != nil {
		return nil, err
	}
	s := p.schedule(gr.loss)
	if err := p.adders(); err != nil {
		return nil, err
	}
	if err := p.splitAdders(); err != nil {
		return nil, err
	}
	if err := p.allocate(s); err != nil {
		return nil, err
	}
	if err := p.startProfile(); err != nil {
		return nil, err
	}
	p.logSummary()
	return p, nil
}

// logSummary says what was made of the graph, and which ops have no kernel.
func (p *Plan) logSummary() {
	var do []string
	for _, st := range p.steps {
		if !st.copy && st.v.kernel == nil {
			do = append(do, st.v.name())
		}
	}
	p.opts.Logger.Debug("engine: compiled", "steps", len(p.steps), "params", len(p.params),
		"bytes", p.arena.Len(), "without_kernel", do)
}

// check refuses what can't be compiled, or only to something wrong.
func (p *Plan) check(loss *gorgonia.Node) error {
	if loss == nil || loss.Graph() == nil {
		return errors.New("engine: the loss is nil or in no graph")
	}
	for _, n := range slices.Concat(p.nodes, p.opts.Outputs) {
		if n == nil || n.Graph() != loss.Graph() {
			return errors.New("engine: a parameter or output is nil or in another graph than the loss")
		}
	}
	for _, n := range p.nodes {
		if n.Op() != nil {
			return fmt.Errorf("engine: parameter %s is the result of an op, not an input", nodeName(n))
		}
	}
	if mend(loss.Graph()) && !p.opts.ForwardOnly && len(p.nodes) > 0 && p.nodes[0].Deriv() != nil {
		return errors.New("engine: gorgonia removed a node of this graph, as it does for log(1-x), and gorgonia.Grad " +
			"may then have mixed nodes up: leave the gradients to Compile")
	}
	gr, err := collect(loss, p.nodes, p.opts.Outputs)
	if err != nil {
		return err
	}
	if err := gr.inputNames(); err != nil {
		return err
	}
	f, err := analyse(gr, p.opts)
	if err != nil {
		return err
	}
	collisions(gr.g, p.opts.Logger)
	if err := f.report(p.opts.Logger); err != nil {
		return err
	}
	if p.opts.ForwardOnly {
		return nil
	}
	if !loss.IsScalar() || gr.loss.t.Type != dtype.Float32 && gr.loss.t.Type != dtype.Float64 {
		return fmt.Errorf("engine: the loss %s is %v, not a float scalar", gr.loss.name(), gr.loss.t)
	}
	return f.refuseUnreached()
}

// differentiate adds the gradients to the graph, if they aren't there, and
// collects all that the plan needs.
func (p *Plan) differentiate(loss *gorgonia.Node) (*graph, error) {
	if p.opts.ForwardOnly {
		return collect(loss, p.nodes, p.opts.Outputs)
	}
	missing := 0
	for _, n := range p.nodes {
		if n.Deriv() == nil {
			missing++
		}
	}
	switch {
	case missing == 0 && len(p.nodes) > 0 && loss.Deriv() == nil:
		return nil, fmt.Errorf("engine: the parameters have gradients, but of another loss than %s: use one graph for each loss", nodeName(loss))
	case missing > 0 && missing < len(p.nodes):
		return nil, fmt.Errorf("engine: %d of %d parameters have no gradient yet: call gorgonia.Grad once with all of them, or not at all", missing, len(p.nodes))
	case missing > 0:
		if err := grad(loss, p.nodes); err != nil {
			return nil, err
		}
	}
	roots := slices.Clone(p.opts.Outputs)
	for _, n := range p.nodes {
		if n.Deriv() == nil {
			return nil, fmt.Errorf("engine: gorgonia gave parameter %q no gradient", n.Name())
		}
		roots = append(roots, n.Deriv())
	}
	return collect(loss, p.nodes, roots)
}

func grad(loss *gorgonia.Node, params gorgonia.Nodes) (err error) {
	gradMu.Lock()
	defer gradMu.Unlock()
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("engine: gorgonia.Grad of %s panicked: %v", nodeName(loss), r)
		}
	}()
	if _, err := gorgonia.Grad(loss, params...); err != nil {
		return fmt.Errorf("engine: gorgonia.Grad of %s: %w", nodeName(loss), err)
	}
	return nil
}

// roots settles what is needed: parameters, gradients and outputs.
func (p *Plan) roots(gr *graph) error {
	p.addOutput(gr.loss, true)
	for _, n := range p.opts.Outputs {
		p.addOutput(gr.byID[n.ID()], true)
	}
	for _, t := range gr.reads {
		o := p.addOutput(gr.byID[t.node.ID()], false)
		o.into = append(o.into, t.into)
	}
	var fwd []*value
	for _, o := range p.outputs {
		fwd = append(fwd, o.v)
	}
	if !p.opts.ForwardOnly {
		for _, n := range p.nodes {
			p.grads = append(p.grads, gr.byID[n.Deriv().ID()])
		}
	}
	p.findSplits(gr)
	p.values = needed(gr, fwd, slices.Concat(p.grads, p.lookups()))
	for _, v := range p.values {
		if v.kind == input {
			p.inputs = append(p.inputs, v)
		}
	}
	return p.describeParams()
}

func (p *Plan) describeParams() error {
	owners := map[*gorgonia.Node]int{}
	for _, g := range p.grads {
		owners[g.node]++
	}
	for i, n := range p.nodes {
		q := Param{Name: n.Name()}
		if s := n.Shape(); !n.IsScalar() && len(s) > 0 {
			q.Shape = []int(s)
		}
		var ok bool
		if q.Type, ok = typeOf(n.Dtype()); !ok || !q.Type.Float() {
			return fmt.Errorf("engine: parameter %q has elements of %v, not float32 or float64", q.Name, n.Dtype())
		}
		if p.grads != nil {
			g := p.grads[i]
			if g.t.Type != q.Type || g.t.Elems() != q.Elems() {
				return fmt.Errorf("engine: the gradient %s of parameter %q is %v, not %v", g.name(), q.Name, g.t, q.tensor())
			}
			q.OwnGrad = owners[g.node] == 1 && g.kind == computed
		}
		p.params = append(p.params, q)
	}
	return nil
}

func (p *Plan) addOutput(v *value, bind bool) *output {
	bind = bind && v.op != nil && typeName(v.op) != "gorgonia.constantTensor" && typeName(v.op) != "gorgonia.constantScalar"
	for _, o := range p.outputs {
		if o.v == v {
			o.bind = o.bind || bind
			return o
		}
	}
	o := &output{v: v, bind: bind}
	p.outputs = append(p.outputs, o)
	return o
}

// hostOps refuses ops without a kernel where the host can't reach the memory.
func (p *Plan) hostOps() error {
	if p.host {
		return nil
	}
	var bad []error
	for _, v := range p.values {
		if v.kind == computed && v.base == v && v.kernel == nil {
			bad = append(bad, fmt.Errorf("engine: %s: %s has no kernel for %v", v.name(), p.dev.Name(), v.t))
		}
	}
	return errors.Join(bad...)
}

func hostMemory(dev device.Device) (bool, error) {
	b, err := dev.Alloc(align)
	if err != nil {
		return false, fmt.Errorf("engine: %w", err)
	}
	_, ok := b.HostBytes()
	return ok, nil
}

func (p *Plan) events() (err error) {
	if p.forwardDone, err = p.dev.NewEvent(); err != nil {
		return fmt.Errorf("engine: %w", err)
	}
	if p.backwardStart, err = p.dev.NewEvent(); err != nil {
		return fmt.Errorf("engine: %w", err)
	}
	for i := range p.staging.copied {
		if p.staging.copied[i], err = p.dev.NewEvent(); err != nil {
			return fmt.Errorf("engine: %w", err)
		}
	}
	return nil
}

// adders compiles, for each gradient, what adds to it instead of overwriting it.
func (p *Plan) adders() error {
	for at, st := range p.steps {
		if st.grad < 0 {
			continue
		}
		if k := st.v.kernel; !st.copy && k != nil {
			op := st.v.desc
			switch op.Kind {
			case device.MatMul, device.BatchedMatMul, device.ColSum, device.EmbeddingGradToken, device.EmbeddingGradPosition:
				op.Attr.Accumulate = true
				add, err := p.dev.Compile(op)
				if err == nil {
					st.add = add
					continue
				}
				if !errors.Is(err, device.ErrUnsupported) {
					return fmt.Errorf("engine: %s: %w", st.v.name(), err)
				}
			}
			st.scratch = &item{size: aligned(st.v.t.Bytes()), first: at, last: at}
		}
		if err := p.sum(st); err != nil {
			return err
		}
	}
	return nil
}

// sum gives st the kernel that adds a buffer to the gradient, if there is one.
func (p *Plan) sum(st *step) error {
	t := device.Tensor{Shape: []int{st.v.t.Elems()}, Type: st.v.t.Type}
	k, err := p.dev.Compile(device.Op{Kind: device.Binary, Attr: device.Attr{Func: device.Add},
		In: []device.Tensor{t, t}, Out: []device.Tensor{t}})
	switch {
	case err == nil:
		st.sum = k
	case !errors.Is(err, device.ErrUnsupported):
		return fmt.Errorf("engine: %s: %w", st.v.name(), err)
	case !p.host:
		return fmt.Errorf("engine: %s: %s can't add to a gradient of %v", st.v.name(), p.dev.Name(), t)
	}
	return nil
}
