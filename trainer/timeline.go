package trainer

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/tandem-go/tandem/trace"
)

// timelineTimeout bounds the exchange of timelines; the ranks are all there.
const timelineTimeout = time.Minute

// timeline records this rank's steps. A nil timeline does nothing.
type timeline struct {
	rec    *trace.Recorder
	path   string
	step   trace.Step // reused
	passes struct{ forward, backward time.Duration }
}

// openTimeline starts recording where Config.Timeline asks for it, and compares
// clocks for the first time.
func (r *run) openTimeline(ctx context.Context) (*timeline, error) {
	if r.c.Timeline == "" {
		return nil, nil
	}
	if r.g.WorldSize > 1 && r.g.Store == nil {
		return nil, errors.New("a timeline of several ranks needs the group's store to compare clocks")
	}
	layout := r.ddp.Layout()
	buckets := make([]trace.Bucket, len(layout.Buckets))
	for k, b := range layout.Buckets {
		buckets[k].Bytes = b.Bytes
		for _, p := range b.Params {
			buckets[k].Params = append(buckets[k].Params, layout.Params[p].Name)
		}
	}
	rec, err := trace.NewRecorder(trace.Options{Rank: r.g.Rank, Size: r.g.WorldSize, Buckets: buckets})
	if err != nil {
		return nil, err
	}
	t := &timeline{rec: rec, path: r.c.Timeline}
	t.step.Buckets = make([]trace.BucketTimes, len(buckets))
	ctx, cancel := context.WithTimeout(ctx, timelineTimeout)
	defer cancel()
	return t, rec.Align(ctx, r.g.Store)
}

// micro notes a micro-step that began at began; the last one of a step, which
// communicates, is left to record. The passes' times are sums over micro-steps.
func (t *timeline) micro(r *run, step int, began time.Time) {
	if t == nil {
		return
	}
	s := r.ddp.Stats()
	t.rec.Passes(step, began, s.Forward-t.passes.forward, s.Backward-t.passes.backward)
	t.passes.forward, t.passes.backward = s.Forward, s.Backward
}

// record notes a step that has ended, updates and all.
func (t *timeline) record(r *run, step int) {
	if t == nil {
		return
	}
	s := r.ddp.Stats()
	t.step.Step, t.step.Begin = step, s.Times.Began
	t.step.Forward, t.step.Backward = s.Forward-t.passes.forward, s.Backward-t.passes.backward
	t.passes.forward, t.passes.backward = 0, 0
	for k, b := range s.Times.Buckets {
		t.step.Buckets[k] = trace.BucketTimes{Ready: b.Ready, Start: b.Start, Done: b.Done, UpdateStart: b.UpdateStart, Updated: b.Updated}
	}
	t.rec.Step(&t.step)
}

// write merges all ranks' timelines into the file. After an error, when ranks
// can't be counted on, each writes its own beside it.
func (t *timeline) write(ctx context.Context, r *run, failed error) error {
	if t == nil {
		return nil
	}
	if failed != nil {
		ext := filepath.Ext(t.path)
		path := fmt.Sprintf("%s-rank%d%s", strings.TrimSuffix(t.path, ext), r.g.Rank, ext)
		return t.rec.Timeline().WriteFile(path)
	}
	ctx, cancel := context.WithTimeout(ctx, timelineTimeout)
	defer cancel()
	all, err := trace.Collect(ctx, r.g.Store, t.rec)
	if all == nil {
		return err
	}
	return errors.Join(err, all.WriteFile(t.path))
}
