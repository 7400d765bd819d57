package ddp

import (
	"context"
	"errors"
	"fmt"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/optim"
	"github.com/tandem-go/tandem/overlap"
)

// New prepares the graph of loss for data-parallel steps over the ranks of c.
// It is collective: every rank builds the same graph and calls New. It
//
//   - compiles the graph, calling gorgonia.Grad if the caller hasn't;
//   - lays parameters and gradients out in buckets, compares layouts and options
//     of all ranks, and names the first parameter that differs;
//   - moves the parameters to that memory, rebinds their nodes to it, and
//     broadcasts those of rank 0 to all.
//
// An error on one rank is an error on all. c stays the caller's; it must outlive
// the DDP. Close the DDP to end what it has started.
func New(ctx context.Context, c comm.Communicator, loss *gorgonia.Node, params gorgonia.Nodes, o *Options) (*DDP, error) {
	opts, optErr := o.validate()
	if opts.Timeout <= 0 {
		return nil, optErr
	}
	if _, has := ctx.Deadline(); !has {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, opts.Timeout,
			fmt.Errorf("ddp: New not done after %v: %w", opts.Timeout, context.DeadlineExceeded))
		defer cancel()
	}
	child, err := c.Split(ctx, 0, c.Rank())
	if err != nil {
		return nil, fmt.Errorf("ddp: rank %d: cannot make a communicator of its own: %w", c.Rank(), err)
	}
	d := &DDP{opts: opts, comm: child, log: opts.Logger, nodes: params, weight: 1, lr: math.NaN()}
	d.watch = newWatchdog(child.Abort)
	if opts.Fingerprint && optErr == nil {
		optErr = d.fingerprint(ctx)
	}
	if err := d.setUp(ctx, loss, optErr); err != nil {
		child.Abort(err)
		d.err = err
		return nil, errors.Join(fmt.Errorf("ddp: rank %d: %w", c.Rank(), err), d.Close())
	}
	d.opened = true
	d.announce()
	return d, nil
}

// fingerprint makes d compare collectives: bounded by New's context until
// there are steps, and then by theirs.
func (d *DDP) fingerprint(ctx context.Context) error {
	f, err := newFingerprinted(d.comm, func() context.Context {
		if d.opened {
			return d.watch
		}
		return ctx
	})
	if err == nil {
		d.comm = f
	}
	return err
}

// setUp is New once there is a communicator; refused is an error to share.
func (d *DDP) setUp(ctx context.Context, loss *gorgonia.Node, refused error) error {
	if err := d.openDevice(); err != nil {
		return err
	}
	stream, err := d.dev.NewStream(device.High)
	if err != nil {
		return fmt.Errorf("cannot create a stream: %w", err)
	}
	if refused == nil {
		refused = d.compile(loss)
	}
	if refused == nil {
		refused = d.prepareBuffers()
	}
	if err := d.consent(ctx, stream, refused); err != nil {
		return err
	}
	if err := d.compareAll(ctx, stream); err != nil {
		return err
	}
	if err := d.allocate(); err != nil {
		return err
	}
	if err := d.wire(stream); err != nil {
		return err
	}
	if err := d.exchanges(); err != nil {
		return err
	}
	if err := d.startTuning(); err != nil {
		return err
	}
	// Rank 0's parameters are everybody's.
	if err := d.broadcast(ctx, 0, comm.Tag{Name: "parameters", Bucket: -1}); err != nil {
		return err
	}
	return d.broadcastBuffers(ctx, 0)
}

func (d *DDP) openDevice() (err error) {
	d.dev = d.opts.Device
	if d.dev == nil {
		if d.ownDev, err = cpu.New(&cpu.Options{Logger: d.log}); err != nil {
			return err
		}
		d.dev = d.ownDev
	}
	return nil
}

// compile makes the plans and the layout.
func (d *DDP) compile(loss *gorgonia.Node) error {
	ps, err := d.compileAll(loss)
	if err != nil {
		return err
	}
	for _, b := range d.branches {
		d.usage.on = d.usage.on || len(b.others) > 0
	}
	if d.caps, err = d.opts.Caps.Resolve(ps, d.order); err != nil {
		return err
	}
	d.layout, err = bucket.Assign(ps, d.order, d.opts.Caps)
	return err
}

// allocate makes one arena for the parameters and one for the gradients, of one
// layout, in memory that the communicator reaches without a copy.
func (d *DDP) allocate() error {
	for i := range d.arenas {
		var err error
		if d.arenas[i], err = d.comm.Alloc(d.layout.Bytes()); err != nil {
			return fmt.Errorf("cannot allocate %d bytes: %w", d.layout.Bytes(), err)
		}
	}
	d.place()
	if err := d.bindBranches(); err != nil {
		return err
	}
	if err := d.prepareUsage(); err != nil {
		return err
	}
	if err := d.prepareSplits(); err != nil {
		return err
	}
	return d.makeValueGrads()
}

// place cuts the arenas into the layout's buckets and slots.
func (d *DDP) place() {
	for i, a := range []struct{ buckets, each *[]device.Buffer }{{&d.params, &d.paramBufs}, {&d.grads, &d.gradBufs}} {
		*a.buckets, *a.each = nil, nil
		offset := 0
		for _, b := range d.layout.Buckets {
			*a.buckets = append(*a.buckets, d.arenas[i].Slice(offset, b.Bytes))
			offset += b.Bytes
		}
		for _, s := range d.layout.Slots {
			*a.each = append(*a.each, (*a.buckets)[s.Bucket].Slice(s.Offset, s.Bytes))
		}
	}
}

// wire connects plan, reducer and optimizer.
func (d *DDP) wire(stream device.Stream) error {
	d.meter = &meter{Communicator: d.comm}
	cfg := overlap.Config{
		Device: d.dev, Comm: d.meter, Layout: d.layout, CommStream: stream, Grads: d.grads,
		Agree: d.agree, Prepare: d.prepare, After: d.restore, Whole: d.opts.whole(),
	}
	if cfg.Late = d.lateBuckets(); cfg.Late != nil {
		cfg.Tail = d.gatherRows
	}
	var hyper device.Buffer
	if d.opts.Optimizer != nil {
		if err := d.openOptimizer(); err != nil {
			return err
		}
		cfg.Update = d.opt.Update
		if cfg.Whole {
			hyper = d.opt.Hyper()
		}
	}
	if d.opts.Norm || cfg.Whole {
		var err error
		if d.norm, err = optim.NewNorm(d.dev, d.layout, d.grads, hyper); err != nil {
			return err
		}
		cfg.Reduced = d.norm.Squares
	}
	d.lossScale, _ = d.opts.lossScaling() // validated
	if d.opts.Hook != nil {
		if err := d.openHook(); err != nil {
			return err
		}
		cfg.Reduce = d.reduceByHook
	}
	if d.red != nil { // of the layout before
		cfg.ComputeStream, cfg.UpdateStream = d.red.Compute(), d.red.UpdateStream()
	}
	var err error
	if d.red, err = overlap.New(cfg); err != nil {
		return err
	}
	d.hookBranches()
	if d.opts.Weighted {
		if err := d.prepareScaling(); err != nil {
			return err
		}
	}
	return nil
}

// openOptimizer makes the built-in optimizer, or moves it to a new layout.
func (d *DDP) openOptimizer() (err error) {
	if d.opt != nil {
		return d.opt.Relayout(d.layout, d.params, d.grads)
	}
	d.opt, err = optim.New(d.opts.Optimizer, optim.Config{
		Device: d.dev, Layout: d.layout, Params: d.params, Grads: d.grads, MaxNorm: d.opts.MaxNorm,
	})
	return err
}

// exchanges prepares the small collectives and the events of a step.
func (d *DDP) exchanges() (err error) {
	if d.header, err = newHeader(d.dev, d.comm, d.usageLanes()); err != nil {
		return err
	}
	if d.loss, err = newLossExchange(d.dev, d.comm, lossType(d.plan)); err != nil {
		return err
	}
	for _, e := range []*device.Event{&d.begin, &d.end, &d.clipped} {
		if *e, err = d.dev.NewEvent(); err != nil {
			return fmt.Errorf("cannot create an event: %w", err)
		}
	}
	return nil
}

// broadcast gives all ranks the parameters of rank root, a bucket at a time.
func (d *DDP) broadcast(ctx context.Context, root int, tag comm.Tag) error {
	s := d.red.Comm()
	for k, b := range d.layout.Buckets {
		tag.Bucket = k
		if err := d.comm.Broadcast(s, d.params[k], b.Type, root, tag); err != nil {
			return err
		}
	}
	return s.Sync(ctx)
}

// noteLayout puts the layout in the statistics.
func (d *DDP) noteLayout() {
	s := &d.stats
	s.Buckets, s.Bytes, s.BucketBytes, s.ReadyOrder = len(d.layout.Buckets), d.layout.Bytes(), nil, d.order
	for _, b := range d.layout.Buckets {
		s.BucketBytes = append(s.BucketBytes, b.Bytes)
	}
}

// announce logs what was decided.
func (d *DDP) announce() {
	d.noteLayout()
	d.log.Info("ddp: ready", "rank", d.Rank(), "ranks", d.Size(), "parameters", len(d.layout.Params),
		"buckets", d.stats.Buckets, "bytes", d.stats.Bytes, "device", d.dev.Name())
	if d.opts.MaxNorm > 0 {
		d.log.Info("ddp: clipping needs the whole gradient: updates wait for the last bucket", "rank", d.Rank(), "max_norm", d.opts.MaxNorm)
	}
	if d.opts.LossScale != nil {
		d.log.Info("ddp: loss scaling needs the whole gradient: updates wait for the last bucket", "rank", d.Rank(), "scale", d.lossScale.scale)
	}
	for _, p := range d.branches[0].plan.Params() {
		if !p.OwnGrad {
			d.log.Warn("ddp: the parameter's gradient node is not its own: use ValueGrads, not its Grad()", "rank", d.Rank(), "parameter", p.Name)
		}
	}
}
