// Package overlap orders everything that is in flight during a training step:
// a gradient is final → its bucket is full → event → collective → event →
// update → event → the next step's first reader. It is written once, against
// device and comm, so what the CPU tests exercise is what runs on GPUs.
//
// Three streams, ordered only by four events a bucket:
//
//	compute  … kernels … ready[k] … kernels … lastRead[k] …      wait updated[k], first reader of the next step
//	comm     wait ready[k], collective k, done[k]
//	update   wait done[k], wait lastRead[k], update k, updated[k]
//
// ready[k] says that every gradient of bucket k is final, done[k] that they are
// averages, lastRead[k] that nothing of this step reads the bucket's parameters
// any more (dX = dY·Wᵀ reads W after dW exists), and updated[k] that parameters
// may be read, and gradients overwritten, again.
//
// Collectives start in bucket order whatever became ready first, so the order
// is the same on every rank.
package overlap

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
)

// Schedule is how the collectives of a step are arranged. All ranks must use
// the same one. The last two exist for measurement.
type Schedule uint8

// The schedules.
const (
	// Normal starts a bucket's collective as soon as its gradients are final.
	Normal Schedule = iota
	// NoOverlap starts the first collective after the whole backward pass.
	NoOverlap
	// NoComm does everything but the collectives, so ranks drift apart.
	NoComm
)

func (s Schedule) String() string {
	switch s {
	case Normal:
		return "normal"
	case NoOverlap:
		return "no-overlap"
	case NoComm:
		return "no-comm"
	}
	return fmt.Sprintf("schedule(%d)", uint8(s))
}

// Config is what a Reducer works on. Functions that are nil are skipped; those
// that get a stream enqueue work on it and must not block.
type Config struct {
	Device device.Device
	Comm   comm.Communicator
	Layout *bucket.Layout
	// CommStream is the stream for collectives, ComputeStream that for the passes
	// and UpdateStream that for updates. nil means one of its own.
	CommStream, ComputeStream, UpdateStream device.Stream
	// Grads is the memory of each bucket, of the length that Layout says.
	Grads []device.Buffer
	// Agree is called once in a synchronised step, before the first bucket's
	// collective is enqueued. It may block until all ranks' decisions are known,
	// and returns the reduction to use.
	Agree func() (comm.Op, error)
	// Prepare precedes the collective of a bucket on the comm stream.
	Prepare func(s device.Stream, bucket int) error
	// Reduce takes the place of the in-place all-reduce of a bucket, on the comm
	// stream; op is what Agree has returned.
	Reduce func(s device.Stream, bucket int, op comm.Op) error
	// After follows the collective of a bucket on the comm stream; averages are
	// complete when it is.
	After func(s device.Stream, bucket int) error
	// Late, one entry a bucket, marks those that the collective of a bucket doesn't
	// complete: Tail, on the comm stream behind all of them, does. nil marks none.
	Late []bool
	Tail func(s device.Stream) error
	// Reduced follows the collective of a bucket on the update stream.
	Reduced func(s device.Stream, bucket int) error
	// Update applies a bucket's averages to its parameters, on the update
	// stream. nil leaves parameters to the caller (an external optimizer).
	Update func(s device.Stream, bucket int) error
	// Whole says that no update may start before every bucket is reduced, and
	// only when the caller says so by Updates.
	Whole bool
}

func (c *Config) validate() error {
	switch {
	case c.Device == nil || c.Comm == nil || c.Layout == nil:
		return errors.New("overlap: Config needs Device, Comm and Layout")
	case len(c.Grads) != len(c.Layout.Buckets):
		return fmt.Errorf("overlap: %d gradient buffers for %d buckets", len(c.Grads), len(c.Layout.Buckets))
	}
	for k, b := range c.Layout.Buckets {
		if c.Grads[k].Len() != b.Bytes {
			return fmt.Errorf("overlap: the buffer of bucket %d has %d bytes, its layout says %d", k, c.Grads[k].Len(), b.Bytes)
		}
	}
	return nil
}

// Reducer orders the steps of one replica. Its methods are called from one
// goroutine. A method that fails leaves the step undefined: the communicator is
// then to be aborted, so that no rank waits for this one.
type Reducer struct {
	cfg                   Config
	compute, comm, update device.Stream
	buckets               []state
	sets                  [2]set // of synchronised steps, alternating: the last one may still be in flight
	cur                   *set
	flip                  int
	sync                  bool
	schedule              Schedule
	op                    comm.Op
	next                  int // the bucket whose collective is next
	times                 Times
}

// state is what is known of a bucket while a step is being enqueued.
type state struct {
	pending  int  // gradients that are not final yet
	readers  int  // parameters that a later kernel of this step reads
	launched bool // the collective is enqueued
	updated  bool // the update is enqueued
	// dirty is the event of an update that compute has not waited for yet.
	dirty device.Event
}

// New creates the streams and events of a Reducer. They live as long as the device.
func New(cfg Config) (*Reducer, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	r := &Reducer{cfg: cfg, comm: cfg.CommStream, compute: cfg.ComputeStream, update: cfg.UpdateStream, buckets: make([]state, len(cfg.Layout.Buckets))}
	for _, s := range []struct {
		stream   *device.Stream
		priority device.Priority
	}{{&r.compute, device.Normal}, {&r.comm, device.High}, {&r.update, device.Low}} {
		if *s.stream != nil {
			continue
		}
		var err error
		if *s.stream, err = cfg.Device.NewStream(s.priority); err != nil {
			return nil, fmt.Errorf("overlap: cannot create a stream: %w", err)
		}
	}
	for i := range r.sets {
		if err := r.sets[i].create(cfg.Device, len(r.buckets)); err != nil {
			return nil, fmt.Errorf("overlap: cannot create an event: %w", err)
		}
	}
	r.cur = &r.sets[0]
	r.times.Buckets = make([]BucketTime, len(r.buckets))
	return r, nil
}

// Compute is the stream that the forward and backward passes run on.
func (r *Reducer) Compute() device.Stream { return r.compute }

// Comm is the stream that collectives run on.
func (r *Reducer) Comm() device.Stream { return r.comm }

// UpdateStream is the stream that updates run on.
func (r *Reducer) UpdateStream() device.Stream { return r.update }

// Begin starts a step. In a synchronised one every bucket is reduced; otherwise
// gradients stay local and nothing is launched. It waits until the synchronised
// step before the last one has wholly ended, which is the case long since
// unless the caller never waits for anything.
func (r *Reducer) Begin(ctx context.Context, sync bool, schedule Schedule) error {
	for k, b := range r.cfg.Layout.Buckets {
		r.buckets[k].pending = len(b.Params)
		r.buckets[k].readers = len(b.Params)
		r.buckets[k].launched, r.buckets[k].updated = false, false
	}
	r.sync, r.schedule, r.next = sync, schedule, 0
	if !sync {
		return nil
	}
	r.flip ^= 1
	r.cur = &r.sets[r.flip]
	if err := r.settle(ctx, r.cur); err != nil {
		return err
	}
	r.cur.reset()
	r.cur.began = time.Now()
	return r.compute.Record(r.cur.begin)
}

// Read is to be called before the first kernel of a step that reads the
// parameter is enqueued on compute.
func (r *Reducer) Read(param int) error { return r.awaitUpdate(param) }

// Write is to be called before the first kernel of a step that writes the
// gradient is enqueued on compute.
func (r *Reducer) Write(param int) error { return r.awaitUpdate(param) }

// awaitUpdate makes compute wait, once, for an update that is in flight.
func (r *Reducer) awaitUpdate(param int) error {
	b := &r.buckets[r.cfg.Layout.Slots[param].Bucket]
	if b.dirty == nil {
		return nil
	}
	e := b.dirty
	b.dirty = nil
	return r.compute.Wait(e)
}

// LastRead is to be called after the last kernel of a step that reads the
// parameter was enqueued on compute.
func (r *Reducer) LastRead(param int) error {
	k := r.cfg.Layout.Slots[param].Bucket
	b := &r.buckets[k]
	b.readers--
	if b.readers < 0 {
		return fmt.Errorf("overlap: parameters of bucket %d were last read more often than there are: at %q", k, r.name(param))
	}
	if !r.sync || b.readers > 0 {
		return nil
	}
	if err := r.compute.Record(r.cur.buckets[k].lastRead); err != nil {
		return err
	}
	return r.tryUpdate(k)
}

// Ready is to be called after the last kernel that writes the parameter's
// gradient was enqueued on compute.
func (r *Reducer) Ready(param int) error {
	k := r.cfg.Layout.Slots[param].Bucket
	r.buckets[k].pending--
	if r.buckets[k].pending < 0 {
		return fmt.Errorf("overlap: bucket %d is full, yet the gradient of %q becomes ready", k, r.name(param))
	}
	if !r.sync || r.schedule == NoOverlap {
		return nil
	}
	return r.launchFull()
}

// launchFull starts the collectives of full buckets, in bucket order only.
func (r *Reducer) launchFull() error {
	for r.next < len(r.buckets) && r.buckets[r.next].pending == 0 {
		if err := r.launch(r.next); err != nil {
			return err
		}
		r.next++
	}
	return nil
}

// launch enqueues the collective of bucket k and what follows it.
func (r *Reducer) launch(k int) error {
	if err := r.agree(k); err != nil {
		return err
	}
	e := &r.cur.buckets[k]
	if err := r.compute.Record(e.ready); err != nil {
		return err
	}
	if err := r.comm.Wait(e.ready); err != nil {
		return err
	}
	if err := call(r.cfg.Prepare, r.comm, k); err != nil {
		return err
	}
	if err := r.reduce(k); err != nil {
		return err
	}
	if r.late(k) {
		return r.comm.Record(e.sent)
	}
	return r.complete(k)
}

// complete enqueues what follows once bucket k holds averages.
func (r *Reducer) complete(k int) error {
	e := &r.cur.buckets[k]
	if err := call(r.cfg.After, r.comm, k); err != nil {
		return err
	}
	if err := r.comm.Record(e.done); err != nil {
		return err
	}
	r.buckets[k].launched = true
	if r.cfg.Reduced != nil {
		if err := r.awaitDone(k); err != nil {
			return err
		}
		if err := r.cfg.Reduced(r.update, k); err != nil {
			return err
		}
	}
	return r.tryUpdate(k)
}

// awaitDone makes what follows on the update stream wait for bucket k's averages.
func (r *Reducer) awaitDone(k int) error { return r.update.Wait(r.cur.buckets[k].done) }

// agree asks, before the first collective, which reduction all ranks use.
func (r *Reducer) agree(k int) error {
	if k > 0 || r.cfg.Agree == nil {
		return nil
	}
	op, err := r.cfg.Agree()
	r.op = op
	return err
}

func (r *Reducer) reduce(k int) error {
	if r.schedule == NoComm {
		return nil
	}
	if r.cfg.Reduce != nil {
		return r.cfg.Reduce(r.comm, k, r.op)
	}
	g, t := r.cfg.Grads[k], r.cfg.Layout.Buckets[k].Type
	return r.cfg.Comm.AllReduce(r.comm, g, g, t, r.op, comm.Tag{Name: "bucket", Bucket: k})
}

// tryUpdate enqueues the update of bucket k once its collective is enqueued and
// its last reader known.
func (r *Reducer) tryUpdate(k int) error {
	b := &r.buckets[k]
	if r.cfg.Update == nil || r.cfg.Whole || b.updated || !b.launched || b.readers > 0 {
		return nil
	}
	return r.enqueueUpdate(k)
}

func (r *Reducer) enqueueUpdate(k int) error {
	e := &r.cur.buckets[k]
	if err := r.awaitDone(k); err != nil {
		return err
	}
	if err := r.update.Wait(e.lastRead); err != nil {
		return err
	}
	if err := r.cfg.Update(r.update, k); err != nil {
		return err
	}
	if err := r.update.Record(e.updated); err != nil {
		return err
	}
	r.cur.updates++
	r.buckets[k].updated, r.buckets[k].dirty = true, e.updated
	return nil
}

// End is to be called when the whole step is enqueued on compute. It enqueues
// what is left and fails when a gradient never became ready.
func (r *Reducer) End() error {
	for k, b := range r.buckets {
		if b.pending > 0 {
			return fmt.Errorf("overlap: %d of the gradients of bucket %d never became ready; its first is that of %q",
				b.pending, k, r.name(r.cfg.Layout.Buckets[k].Params[0]))
		}
	}
	if !r.sync {
		return nil
	}
	if err := r.compute.Record(r.cur.end); err != nil {
		return err
	}
	r.cur.used = true
	if err := r.launchFull(); err != nil {
		return err
	}
	if err := r.tail(); err != nil {
		return err
	}
	for k := range r.buckets {
		if r.buckets[k].readers == 0 {
			continue
		}
		// A parameter that nothing reads: everything that could is enqueued.
		r.buckets[k].readers = 0
		if err := r.compute.Record(r.cur.buckets[k].lastRead); err != nil {
			return err
		}
		if err := r.tryUpdate(k); err != nil {
			return err
		}
	}
	return nil
}

// Updates enqueues the update of every bucket, after End, where Config.Whole is set.
func (r *Reducer) Updates() error {
	if err := r.update.Record(r.cur.whole); err != nil {
		return err
	}
	for k := range r.buckets {
		if err := r.enqueueUpdate(k); err != nil {
			return err
		}
	}
	return nil
}

// WaitReduced blocks until every bucket of the last synchronised step holds
// averages, which is when done of the last one has completed.
func (r *Reducer) WaitReduced(ctx context.Context) error {
	if len(r.buckets) == 0 || !r.cur.used {
		return nil
	}
	if r.cur.tailed {
		return r.cur.tail.Sync(ctx)
	}
	return r.cur.buckets[len(r.buckets)-1].done.Sync(ctx)
}

// Sync blocks until nothing is in flight, and returns the first failure.
func (r *Reducer) Sync(ctx context.Context) error {
	for _, s := range [...]device.Stream{r.compute, r.comm, r.update} {
		if err := s.Sync(ctx); err != nil {
			return err
		}
	}
	if err := r.FinishPrevious(ctx); err != nil {
		return err
	}
	return r.Finish(ctx)
}

// Drain blocks until the streams have run or skipped what was enqueued, or ctx
// ends. After an error, when nothing is awaited any more, it says that memory
// may go.
func (r *Reducer) Drain(ctx context.Context) {
	for _, s := range [...]device.Stream{r.compute, r.comm, r.update} {
		_ = s.Sync(ctx) // the failure is known
	}
}

func (r *Reducer) name(param int) string { return r.cfg.Layout.Params[param].Name }

func call(f func(device.Stream, int) error, s device.Stream, k int) error {
	if f == nil {
		return nil
	}
	return f(s, k)
}
