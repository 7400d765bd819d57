// Package engine turns a gorgonia graph, given by its loss and parameters, into
// a Plan: the order of its operations, the memory of each of them and the kernel
// that computes it. A Plan runs on a device.Stream and says when each gradient
// is final, so that it can travel while the backward pass goes on.
//
// The graph, its automatic differentiation and its solvers are gorgonia's. Its
// machines are not used: they hand the memory of a reshaped node out again and
// overwrite parameters. Here every node has a place of its own in one arena,
// laid out from lifetimes, and no operation writes to what another still reads.
//
// An operation runs as a kernel of the device where there is one: the ops of
// package nn describe themselves (DeviceOp), and stock gorgonia ops are
// recognised. Whatever is left runs through its own Do, on devices whose memory
// the host can address; other devices refuse it at Compile, by name.
package engine

import (
	"log/slog"

	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// Options of Compile. The zero value, or nil, means the defaults.
type Options struct {
	// Logger gets warnings about hazards of the graph. Nil discards.
	Logger *slog.Logger
	// Outputs are further nodes whose values BindOutputs binds.
	Outputs gorgonia.Nodes
	// ForwardOnly leaves the gradients out: for evaluation and sampling. The
	// loss may then be any node of any shape, and need not reach every
	// parameter. BindParams takes over what the buffers hold.
	ForwardOnly bool
	// Reference runs every operation through its own Do instead of a kernel:
	// slow, and what the kernels are compared against.
	Reference bool
	// Split says whether the gradient of a tied embedding, of a table (V, D), is to
	// come in two parts (see there). nil never splits.
	Split func(s Split, table device.Tensor) bool
	// Poison fills memory with NaN before a run and after its last use, and
	// checks that no Do changes its inputs. It shows in wrong results what a
	// fault in the memory plan would otherwise hide. For tests; host devices only.
	Poison bool
	// Profile records an event between steps, for TakeTimes and Explain.
	Profile bool
}

func (o *Options) withDefaults() Options {
	var r Options
	if o != nil {
		r = *o
	}
	if r.Logger == nil {
		r.Logger = slog.New(slog.DiscardHandler)
	}
	return r
}

// Param describes a parameter of a Plan.
type Param struct {
	Name  string
	Shape []int // nil for a scalar
	Type  dtype.Type
	// OwnGrad says that the gradient's node belongs to this parameter alone, so
	// that param.Grad() gives this gradient once BindGrads was called. Two
	// parameters that are only added to each other share one node.
	OwnGrad bool
	// Direct says that the gradient is written straight to its place, without
	// a copy.
	Direct bool
}

func (p Param) tensor() device.Tensor { return device.Tensor{Shape: p.Shape, Type: p.Type} }

// Elems is the number of elements.
func (p Param) Elems() int { return p.tensor().Elems() }

// Bytes is the size in bytes.
func (p Param) Bytes() int { return p.tensor().Bytes() }

// Hooks are called by Run, in the order in which it enqueues work. An error
// ends Run and is returned as it is. Nil fields are skipped.
type Hooks struct {
	// Read is called before the first work that reads or refreshes a parameter
	// is enqueued.
	Read func(param int) error
	// Write is called before the first work that writes its gradient is enqueued.
	Write func(param int) error
	// LastRead is called after the last work that reads a parameter was
	// enqueued; at the start of a run for a parameter that nothing reads.
	LastRead func(param int) error
	// Rows is called, in split runs, after the last work that writes the rows of a
	// parameter's gradient was enqueued.
	Rows func(param int) error
}

// Plan is a compiled graph. It is not safe for concurrent use, and its runs
// must follow each other on one stream, or on streams ordered by events.
type Plan struct {
	dev  device.Device
	opts Options
	host bool // the device's memory is the host's

	nodes  gorgonia.Nodes // the parameters
	params []Param
	order  []int

	values  []*value // everything with a place, ascending node id
	inputs  []*value
	grads   []*value // per parameter; empty when ForwardOnly
	splits  []*split
	apart   bool // split runs
	steps   []*step
	outputs []*output

	forward  int // the number of steps up to and including the loss
	backward int // the first step of the backward pass; len(steps) without one

	arena  device.Buffer
	static device.Buffer
	items  []*item
	states map[*device.State]*item

	bound    paramBinding
	gradBufs []device.Buffer
	resolved bool
	hooks    Hooks
	adds     bool
	staging  staging
	wasRead  []bool // parameters that this run has announced
	unread   []int  // parameters that no step reads

	forwardDone   device.Event
	backwardStart device.Event
	prof          profile
}

// Params describes the parameters, in the order given to Compile.
func (p *Plan) Params() []Param { return p.params }

// Order is the production order of the gradients: indices of parameters, the
// first final gradient first. It is the same in every process that builds the
// same graph. It is empty for a ForwardOnly plan.
func (p *Plan) Order() []int { return p.order }

// Steps is the number of steps of a run.
func (p *Plan) Steps() int { return len(p.steps) }

// ArenaBytes is the size of the memory that activations share.
func (p *Plan) ArenaBytes() int { return p.arena.Len() }

// BindHooks sets what Run calls. It replaces earlier hooks.
func (p *Plan) BindHooks(h Hooks) { p.hooks = h }

// Accumulate sets whether the next runs add to the gradients (true) or
// overwrite them (false, as after Compile).
func (p *Plan) Accumulate(on bool) { p.adds = on }

// ForwardDone is recorded on the stream of each run right after the loss.
func (p *Plan) ForwardDone() device.Event { return p.forwardDone }

// BackwardStart is recorded before the first work that serves gradients only.
// A ForwardOnly plan never records it.
func (p *Plan) BackwardStart() device.Event { return p.backwardStart }

// LossBuffer holds the loss, one element of its type, from when a run has passed
// ForwardDone until the next run. In a ForwardOnly plan it holds whatever node
// was given as the loss.
func (p *Plan) LossBuffer() device.Buffer { return p.outputs[0].buf }
