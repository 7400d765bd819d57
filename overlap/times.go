package overlap

import (
	"context"
	"time"

	"github.com/tandem-go/tandem/device"
)

// events are those of one bucket in one synchronised step.
type events struct{ ready, sent, done, lastRead, updated device.Event }

// set is the events of one synchronised step.
type set struct {
	begin, end device.Event // of the step's work on compute
	whole      device.Event // before the first update, where updates wait for all buckets
	rows, tail device.Event // what the tail needs is final; the tail has run
	tailed     bool         // there was a tail
	buckets    []events
	used       bool // a step was enqueued whose times were not collected yet
	began      time.Time
	updates    int // updates that were enqueued
}

func (s *set) create(d device.Device, buckets int) error {
	s.buckets = make([]events, buckets)
	all := []*device.Event{&s.begin, &s.end, &s.whole, &s.rows, &s.tail}
	for k := range s.buckets {
		e := &s.buckets[k]
		all = append(all, &e.ready, &e.sent, &e.done, &e.lastRead, &e.updated)
	}
	for _, e := range all {
		var err error
		if *e, err = d.NewEvent(); err != nil {
			return err
		}
	}
	return nil
}

// reset forgets earlier records, so that a wait for what this step never
// recorded is an error. updated is left alone: it may still be waited for.
func (s *set) reset() {
	for k := range s.buckets {
		e := &s.buckets[k]
		e.ready.Reset()
		e.sent.Reset()
		e.done.Reset()
		e.lastRead.Reset()
	}
	s.rows.Reset()
	s.tail.Reset()
	s.updates, s.tailed = 0, false
}

// BucketTime says when things happened to a bucket, as time since the step's
// first kernel could run.
type BucketTime struct {
	// Ready is when its gradients were final.
	Ready time.Duration
	// Start is when its collective was at the head of the queue: Ready, or the
	// end of the collective before it.
	Start time.Duration
	// Done is when its averages were there.
	Done time.Duration
	// UpdateStart is when its update was at the head of its queue and nothing
	// it needs was missing; Updated when its parameters were updated. Both are 0
	// without an update.
	UpdateStart, Updated time.Duration
}

// Times is the timing of one synchronised step, from the events on its streams.
type Times struct {
	// Began is when the step began, on the host's clock.
	Began time.Time
	// Compute is the length of the forward and backward passes.
	Compute time.Duration
	// Comm is the time with a bucket's collective at the head of the queue.
	Comm time.Duration
	// Exposed is the part of it after Compute, when nothing hides it.
	Exposed time.Duration
	// Update is the time that updates took, waits for compute threads included;
	// the passes and Comm may hide a part of it.
	Update time.Duration
	// Early is how many collectives started before the last gradient was final.
	Early   int
	Buckets []BucketTime
}

// Times is the timing of the synchronised step that Finish, FinishPrevious or
// Sync saw end last. The slice is reused.
func (r *Reducer) Times() Times { return r.times }

// Finish waits for the last synchronised step to end and makes Times its times.
func (r *Reducer) Finish(ctx context.Context) error { return r.settle(ctx, r.cur) }

// FinishPrevious does the same for the synchronised step before that. To be
// called from Agree, when all earlier collectives are known to have ended and
// updates are about to.
func (r *Reducer) FinishPrevious(ctx context.Context) error {
	return r.settle(ctx, &r.sets[r.flip^1])
}

// settle waits for the step of s to end and collects its times.
func (r *Reducer) settle(ctx context.Context, s *set) error {
	if !s.used {
		return nil
	}
	if err := s.end.Sync(ctx); err != nil {
		return err
	}
	for k := range s.buckets {
		if err := s.buckets[k].done.Sync(ctx); err != nil {
			return err
		}
		if s.updates == 0 {
			continue
		}
		if err := s.buckets[k].updated.Sync(ctx); err != nil {
			return err
		}
	}
	s.used = false
	return r.collect(s)
}

func (r *Reducer) collect(s *set) error {
	t := &r.times
	var err error
	since := func(e device.Event) time.Duration {
		d, e1 := e.Since(s.begin)
		if err == nil {
			err = e1
		}
		return d
	}
	*t = Times{Began: s.began, Buckets: t.Buckets, Compute: since(s.end)}
	var free, idle time.Duration // when the comm and the update stream became free
	if r.cfg.Whole && s.updates > 0 {
		idle = since(s.whole)
	}
	for k := range s.buckets {
		e, b := &s.buckets[k], &t.Buckets[k]
		*b = BucketTime{Ready: since(e.ready), Done: since(e.done)}
		b.Start = max(b.Ready, free)
		free = b.Done
		if s.tailed && r.isLate(k) {
			free = since(e.sent)
		}
		t.add(b.Start, free)
		if s.updates > 0 {
			b.Updated = since(e.updated)
			b.UpdateStart = min(b.Updated, max(idle, b.Done, since(e.lastRead)))
			t.Update += b.Updated - b.UpdateStart
			idle = max(idle, b.Updated)
		}
	}
	if s.tailed {
		t.add(max(since(s.rows), free), since(s.tail))
	}
	for k := range t.Buckets {
		if t.Buckets[k].Start < min(t.Compute, t.Buckets[len(t.Buckets)-1].Ready) {
			t.Early++
		}
	}
	return err
}

// add counts a collective at the head of the queue from start to end.
func (t *Times) add(start, end time.Duration) {
	t.Comm += end - start
	t.Exposed += max(0, end-max(start, t.Compute))
}
