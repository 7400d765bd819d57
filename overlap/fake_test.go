package overlap

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// recorder is a device, and a communicator, that only write down what they are
// asked to do, and refuse a wait for an event that was not recorded.
type recorder struct {
	comm.Communicator // the methods that a Reducer never calls
	log               strings.Builder
	streams           int
	names             map[device.Event]string
}

func (r *recorder) printf(format string, args ...any) { fmt.Fprintf(&r.log, format+"\n", args...) }

func (r *recorder) NewStream(device.Priority) (device.Stream, error) {
	s := &fakeStream{recorder: r, name: [...]string{"compute", "comm", "update"}[r.streams]}
	r.streams++
	return s, nil
}
func (r *recorder) NewEvent() (device.Event, error)          { return &fakeEvent{recorder: r}, nil }
func (r *recorder) Name() string                             { return "fake" }
func (r *recorder) Alloc(n int) (device.Buffer, error)       { return fakeBuffer(n), nil }
func (r *recorder) Compile(device.Op) (device.Kernel, error) { return nil, device.ErrUnsupported }
func (r *recorder) Close() error                             { return nil }
func (r *recorder) Rank() int                                { return 0 }
func (r *recorder) AllReduce(s device.Stream, dst, src device.Buffer, t dtype.Type, op comm.Op, tag comm.Tag) error {
	r.printf("  %v: allreduce %s %d, %v %v of %d bytes", s, tag.Name, tag.Bucket, op, t, dst.Len())
	return nil
}

type fakeBuffer int

func (b fakeBuffer) Len() int                       { return int(b) }
func (b fakeBuffer) Slice(off, n int) device.Buffer { return fakeBuffer(n) }
func (b fakeBuffer) HostBytes() ([]byte, bool)      { return nil, false }

type fakeStream struct {
	*recorder
	name string
}

func (s *fakeStream) String() string                                  { return s.name }
func (s *fakeStream) Launch(k device.Kernel, _ []device.Buffer) error { return nil }
func (s *fakeStream) HostFunc(f func() error) error                   { return nil }
func (s *fakeStream) Copy(dst, src device.Buffer) error               { return nil }
func (s *fakeStream) Record(e device.Event) error {
	e.(*fakeEvent).recorded = true
	s.printf("  %s: record %s", s.name, s.names[e])
	return nil
}
func (s *fakeStream) Wait(e device.Event) error {
	s.printf("  %s: wait %s", s.name, s.names[e])
	if !e.(*fakeEvent).recorded {
		return fmt.Errorf("%s: %w", s.names[e], device.ErrNotRecorded)
	}
	return nil
}
func (s *fakeStream) Sync(context.Context) error {
	s.printf("  host: sync %s", s.name)
	return nil
}

type fakeEvent struct {
	*recorder
	recorded bool
}

func (e *fakeEvent) Reset() { e.recorded = false }
func (e *fakeEvent) Sync(context.Context) error {
	e.printf("  host: sync %s", e.names[e])
	if !e.recorded {
		return device.ErrNotRecorded
	}
	return nil
}
func (e *fakeEvent) Since(device.Event) (time.Duration, error) { return 0, nil }

// nameEvents calls the events of the two alternating sets a and b.
func nameEvents(r *Reducer, rec *recorder) {
	rec.names = map[device.Event]string{}
	for i := range r.sets {
		s, set := &r.sets[i], string(rune('a'+i))
		rec.names[s.begin], rec.names[s.end], rec.names[s.whole] = "begin/"+set, "end/"+set, "whole/"+set
		rec.names[s.rows], rec.names[s.tail] = "rows/"+set, "tail/"+set
		for k, e := range s.buckets {
			rec.names[e.ready] = fmt.Sprintf("ready[%d]/%s", k, set)
			rec.names[e.sent] = fmt.Sprintf("sent[%d]/%s", k, set)
			rec.names[e.done] = fmt.Sprintf("done[%d]/%s", k, set)
			rec.names[e.lastRead] = fmt.Sprintf("lastRead[%d]/%s", k, set)
			rec.names[e.updated] = fmt.Sprintf("updated[%d]/%s", k, set)
		}
	}
}
