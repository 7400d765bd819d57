// Package optim updates parameters that lie in flat buckets, where a gradient
// has the same offset in its bucket as its parameter in the parameter's. It
// knows neither graphs nor communication.
//
// A Rule (AdamW, SGD) is a plain struct of hyper-parameters; New makes an
// Optimizer of it, which owns the moments and enqueues kernels. Hyper-parameters
// reach the kernels through memory, so another learning rate needs no new kernel.
package optim

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// Rule is an update rule: AdamW or SGD.
type Rule interface {
	// validate fills in defaults and names the bound that a value breaks.
	validate() (Rule, error)
	// kind is the device's kernel, and states the names of the buffers of the
	// parameters' size that follow the parameter in its arguments.
	kind() (k device.Kind, states []string)
	// hyper writes the hyper-parameters of update number t ≥ 1.
	hyper(h *[device.HyperLen]float32, t int)
	rate() float64
}

// AdamW is Adam with decoupled weight decay (Loshchilov, Hutter, 2019):
//
//	m ← β1·m + (1−β1)·g,  v ← β2·v + (1−β2)·g²
//	p ← p·(1 − lr·decay) − lr · m/(1−β1^t) / (√(v/(1−β2^t)) + ε)
//
// Decay applies to tensors of two or more dimensions only.
type AdamW struct {
	LR          float64 // learning rate where there is no schedule; 0 means 1e-3
	Beta1       float64 // in [0, 1); 0 means 0.9
	Beta2       float64 // in [0, 1); 0 means 0.95
	Eps         float64 // 0 means 1e-8
	WeightDecay float64 // 0 means none
}

func (a AdamW) validate() (Rule, error) {
	a.LR, a.Beta1, a.Beta2, a.Eps = or(a.LR, 1e-3), or(a.Beta1, 0.9), or(a.Beta2, 0.95), or(a.Eps, 1e-8)
	return a, errors.Join(
		within("AdamW.LR", a.LR, 0, math.MaxFloat32), within("AdamW.Beta1", a.Beta1, 0, 1),
		within("AdamW.Beta2", a.Beta2, 0, 1), within("AdamW.Eps", a.Eps, 0, 1),
		within("AdamW.WeightDecay", a.WeightDecay, 0, math.MaxFloat32))
}

func (a AdamW) kind() (device.Kind, []string) {
	return device.AdamW, []string{"exp_avg", "exp_avg_sq"}
}

func (a AdamW) hyper(h *[device.HyperLen]float32, t int) {
	h[device.HyperBeta1], h[device.HyperBeta2] = float32(a.Beta1), float32(a.Beta2)
	h[device.HyperEps], h[device.HyperDecay] = float32(a.Eps), float32(a.WeightDecay)
	h[device.HyperBias1] = float32(1 - math.Pow(a.Beta1, float64(t)))
	h[device.HyperBias2] = float32(1 - math.Pow(a.Beta2, float64(t)))
}

func (a AdamW) rate() float64 { return a.LR }

// SGD is gradient descent with momentum, as PyTorch defines it:
//
//	b ← momentum·b + g + decay·p,  p ← p − lr·b
//
// Decay applies to tensors of two or more dimensions only.
type SGD struct {
	LR          float64 // learning rate where there is no schedule; 0 means 1e-2
	Momentum    float64 // in [0, 1); 0 means none
	WeightDecay float64 // 0 means none
}

func (s SGD) validate() (Rule, error) {
	s.LR = or(s.LR, 1e-2)
	return s, errors.Join(within("SGD.LR", s.LR, 0, math.MaxFloat32),
		within("SGD.Momentum", s.Momentum, 0, 1), within("SGD.WeightDecay", s.WeightDecay, 0, math.MaxFloat32))
}

func (s SGD) kind() (device.Kind, []string) { return device.SGD, []string{"momentum_buffer"} }

func (s SGD) hyper(h *[device.HyperLen]float32, _ int) {
	h[device.HyperBeta1], h[device.HyperDecay] = float32(s.Momentum), float32(s.WeightDecay)
}

func (s SGD) rate() float64 { return s.LR }

func or(v, def float64) float64 {
	if v == 0 {
		return def
	}
	return v
}

func within(name string, v, low, below float64) error {
	if v >= low && v < below {
		return nil
	}
	return fmt.Errorf("optim: %s is %v; it must be in [%v, %v)", name, v, low, below)
}

// Config is what an Optimizer works on.
type Config struct {
	Device device.Device
	Layout *bucket.Layout
	// Params and Grads are the memory of each bucket, of the same layout.
	Params, Grads []device.Buffer
	// MaxNorm is the global gradient norm above which gradients are scaled down
	// to it; 0 means no clipping.
	MaxNorm float64
}

// Optimizer updates parameters bucket by bucket. Its methods are called from
// one goroutine; what they enqueue goes to one stream.
type Optimizer struct {
	cfg     Config
	rule    Rule
	hyper   device.Buffer
	host    []byte // hyper, as the host sees it
	values  [device.HyperLen]float32
	states  []string
	arenas  []device.Buffer   // by state
	moments [][]device.Buffer // by state, by bucket
	updates [][]launch        // by bucket
	single  []launch          // by parameter, made when one of its bucket is left out
	skipped []bool            // by parameter; nil: none
	t       int
}

// launch is a kernel with its arguments.
type launch struct {
	kernel device.Kernel
	args   []device.Buffer
}

// New allocates the moments, zero, and compiles the kernels. Only float32
// parameters are supported.
func New(rule Rule, cfg Config) (*Optimizer, error) {
	rule, err := rule.validate()
	if err != nil {
		return nil, err
	}
	if err := within("MaxNorm", cfg.MaxNorm, 0, math.MaxFloat32); err != nil {
		return nil, err
	}
	o := &Optimizer{cfg: cfg, rule: rule}
	if o.hyper, err = cfg.Device.Alloc(4 * device.HyperLen); err != nil {
		return nil, fmt.Errorf("optim: cannot allocate the hyper-parameters: %w", err)
	}
	var ok bool
	if o.host, ok = o.hyper.HostBytes(); !ok {
		return nil, fmt.Errorf("optim: %s: hyper-parameters need memory that the host can write", cfg.Device.Name())
	}
	_, states := rule.kind()
	if err := o.allocate(states); err != nil {
		return nil, err
	}
	return o, o.arrange()
}

// Relayout continues with the same parameters in other buckets: params and
// grads are their memory, moved already. The moments move here. No update may be
// in flight.
func (o *Optimizer) Relayout(layout *bucket.Layout, params, grads []device.Buffer) error {
	for _, a := range o.arenas {
		mem, ok := a.HostBytes()
		if !ok {
			return fmt.Errorf("optim: %s: optimizer state that the host cannot reach cannot be rearranged", o.cfg.Device.Name())
		}
		if err := bucket.Move(mem, o.cfg.Layout, layout); err != nil {
			return err
		}
	}
	o.cfg.Layout, o.cfg.Params, o.cfg.Grads = layout, params, grads
	return o.arrange()
}

// arrange cuts the moments into buckets and compiles their updates.
func (o *Optimizer) arrange() error {
	o.moments, o.single = nil, nil
	for _, a := range o.arenas {
		var buckets []device.Buffer
		offset := 0
		for _, b := range o.cfg.Layout.Buckets {
			buckets = append(buckets, a.Slice(offset, b.Bytes))
			offset += b.Bytes
		}
		o.moments = append(o.moments, buckets)
	}
	kind, _ := o.rule.kind()
	o.updates = make([][]launch, len(o.cfg.Layout.Buckets))
	for k := range o.cfg.Layout.Buckets {
		if err := o.compile(kind, k); err != nil {
			return err
		}
	}
	return nil
}

func (o *Optimizer) allocate(states []string) error {
	o.states = states
	for range states {
		arena, err := o.cfg.Device.Alloc(o.cfg.Layout.Bytes())
		if err != nil {
			return fmt.Errorf("optim: cannot allocate %d bytes of optimizer state: %w", o.cfg.Layout.Bytes(), err)
		}
		o.arenas = append(o.arenas, arena)
	}
	return nil
}

// compile prepares the updates of bucket k: one kernel for each run of
// neighbours that agree on decay. A run takes the padding between its slots
// along, which holds zeros and stays zero.
func (o *Optimizer) compile(kind device.Kind, k int) error {
	b := o.cfg.Layout.Buckets[k]
	if b.Type != dtype.Float32 {
		p := o.cfg.Layout.Params[b.Params[0]]
		return fmt.Errorf("optim: parameter %q is %v; only float32 can be updated here: use an external optimizer", p.Name, p.Type)
	}
	for i := 0; i < len(b.Params); {
		decay := o.decays(b.Params[i])
		start, end := o.cfg.Layout.Slots[b.Params[i]].Offset, 0
		for ; i < len(b.Params) && o.decays(b.Params[i]) == decay; i++ {
			s := o.cfg.Layout.Slots[b.Params[i]]
			end = s.Offset + s.Bytes
		}
		if end == start {
			continue // nothing but empty tensors
		}
		l, err := o.update(kind, k, decay, start, end-start)
		if err != nil {
			return err
		}
		o.updates[k] = append(o.updates[k], l)
	}
	return nil
}

func (o *Optimizer) decays(param int) bool { return len(o.cfg.Layout.Params[param].Shape) >= 2 }

// update compiles the update of a part of bucket k.
func (o *Optimizer) update(kind device.Kind, k int, decay bool, offset, bytes int) (launch, error) {
	flat := device.Tensor{Shape: []int{bytes / 4}, Type: dtype.Float32}
	op := device.Op{
		Kind: kind,
		Attr: device.Attr{Decay: decay},
		In:   []device.Tensor{flat, {Shape: []int{device.HyperLen}, Type: dtype.Float32}},
		Out:  []device.Tensor{flat},
	}
	args := []device.Buffer{o.cfg.Grads[k].Slice(offset, bytes), o.hyper, o.cfg.Params[k].Slice(offset, bytes)}
	for _, m := range o.moments {
		op.Out = append(op.Out, flat)
		args = append(args, m[k].Slice(offset, bytes))
	}
	kernel, err := o.cfg.Device.Compile(op)
	if err != nil {
		return launch{}, fmt.Errorf("optim: cannot compile the update of bucket %d: %w", k, err)
	}
	return launch{kernel, args}, nil
}

// Begin sets the learning rate and counts the update that follows. No update
// may be in flight: the hyper-parameters are in memory that kernels read.
func (o *Optimizer) Begin(lr float64) {
	o.t++
	o.values = [device.HyperLen]float32{device.HyperLR: float32(lr), device.HyperMaxNorm: float32(o.cfg.MaxNorm), device.HyperScale: 1}
	o.rule.hyper(&o.values, o.t)
	for i, v := range o.values {
		binary.NativeEndian.PutUint32(o.host[4*i:], math.Float32bits(v))
	}
}

// Update enqueues the update of a bucket's parameters.
func (o *Optimizer) Update(s device.Stream, k int) error {
	if o.skipsSome(k) {
		return o.updateOthers(s, k)
	}
	for i := range o.updates[k] {
		l := &o.updates[k][i]
		if err := s.Launch(l.kernel, l.args); err != nil {
			return err
		}
	}
	return nil
}

// Hyper is the memory of the hyper-parameters, device.HyperLen float32.
func (o *Optimizer) Hyper() device.Buffer { return o.hyper }

// LR is the rule's own learning rate.
func (o *Optimizer) LR() float64 { return o.rule.rate() }

// Steps is the number of updates begun; bias correction depends on it.
func (o *Optimizer) Steps() int { return o.t }

// SetSteps continues the count of another run.
func (o *Optimizer) SetSteps(t int) { o.t = t }

// State is one moment of one parameter: its memory, to be read and written
// while no update is in flight.
type State struct {
	Name   string // such as "exp_avg"
	Param  int
	Buffer device.Buffer
}

// States lists the moments in parameter order, for checkpoints.
func (o *Optimizer) States() []State {
	var all []State
	for p, slot := range o.cfg.Layout.Slots {
		for i, name := range o.states {
			all = append(all, State{name, p, o.moments[i][slot.Bucket].Slice(slot.Offset, slot.Bytes)})
		}
	}
	return all
}
