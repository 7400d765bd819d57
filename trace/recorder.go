// Package trace keeps timelines: what each rank computed, sent and updated, and
// when. A Recorder holds the last slices of one rank; Collect aligns the clocks
// of all ranks and merges their slices into a Timeline, which is written as a
// Chrome trace for Perfetto (Write), read back (Read), explained in words
// (Explain) and drawn (SVG).
package trace

import (
	"fmt"
	"slices"
	"sync"
	"time"
)

// Track is a row of a rank's timeline.
type Track uint8

// The tracks, in the order in which they are shown.
const (
	Compute Track = iota
	Comm
	Update
	tracks
)

// String is the track's name in files.
func (t Track) String() string {
	switch t {
	case Compute:
		return "compute"
	case Comm:
		return "communication"
	case Update:
		return "update"
	}
	return fmt.Sprintf("track %d", uint8(t))
}

// Names of slices of the compute track.
const (
	Forward  = "forward"
	Backward = "backward"
)

// Slice is something that took time.
type Slice struct {
	Track Track
	// Name is Forward or Backward, or says what was done to a bucket.
	Name string
	// Step counts optimizer steps from 1; Bucket is -1 where none is meant.
	Step, Bucket int
	// Ready is when the slice could have started but for those before it on its
	// track; Start ≥ Ready and End ≥ Start. They count from the recorder's
	// making, in a Timeline from its first slice.
	Ready, Start, End time.Duration
}

// Bucket describes gradients that travel together.
type Bucket struct {
	Bytes  int      `json:"bytes"`
	Params []string `json:"parameters"`
}

// Options configure a Recorder.
type Options struct {
	// Rank and Size say who records. A Size of 0 means 1.
	Rank, Size int
	// Slices is how many are kept, the newest; 0 means 32768, about 80 bytes
	// each. A step has two and, for each bucket, two more.
	Slices int
	// Buckets are those of the layout, in completion order.
	Buckets []Bucket
}

const (
	defaultSlices = 1 << 15
	maxSlices     = 1 << 18
	maxRanks      = 1 << 16
)

func (o *Options) validate() error {
	if o.Size == 0 {
		o.Size = 1
	}
	if o.Slices == 0 {
		o.Slices = defaultSlices
	}
	if o.Rank < 0 || o.Rank >= o.Size || o.Size > maxRanks {
		return fmt.Errorf("trace: rank %d of %d, at most %d ranks", o.Rank, o.Size, maxRanks)
	}
	if o.Slices < 1 || o.Slices > maxSlices {
		return fmt.Errorf("trace: %d slices, want 1 to %d", o.Slices, maxSlices)
	}
	return nil
}

// Recorder keeps the last slices of one rank. Its methods may be called from
// several goroutines; on a nil Recorder they do nothing, so that code which
// records needs no conditions.
type Recorder struct {
	opts  Options
	epoch time.Time // origin of all times here
	wall  int64     // the same in Unix nanoseconds

	mu     sync.Mutex
	ring   []Slice
	count  int // slices ever recorded; the next goes to count % len(ring)
	clocks []reading
	rounds int // of Align, for its keys
}

// NewRecorder makes a Recorder. All its memory is taken now.
func NewRecorder(o Options) (*Recorder, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	now := time.Now()
	return &Recorder{opts: o, epoch: now, wall: now.UnixNano(), ring: make([]Slice, o.Slices)}, nil
}

// Since is t on the recorder's clock, for Slice.
func (r *Recorder) Since(t time.Time) time.Duration {
	if r == nil {
		return 0
	}
	return t.Sub(r.epoch)
}

// Record adds a slice in place of the oldest. It allocates nothing.
func (r *Recorder) Record(s Slice) {
	if r == nil {
		return
	}
	r.mu.Lock()
	r.ring[r.count%len(r.ring)] = s
	r.count++
	r.mu.Unlock()
}

// BucketTimes says when things happened to a bucket, as time since the step's
// begin.
type BucketTimes struct {
	Ready       time.Duration // its gradients were final
	Start       time.Duration // its collective was at the head of the queue
	Done        time.Duration // its averages were there
	UpdateStart time.Duration // its update could run
	Updated     time.Duration // its parameters were updated; 0 without an update
}

// Step is one synchronised step of a rank.
type Step struct {
	// Step counts from 1.
	Step int
	// Begin is when the passes began, a time with a monotonic reading.
	Begin time.Time
	// Forward and Backward are how long they took, one after the other. Of
	// several micro-steps they are the last one's; Passes adds those before.
	Forward, Backward time.Duration
	// Buckets are in completion order. The slice is not kept.
	Buckets []BucketTimes
}

// Step records the slices of a step. It allocates nothing.
func (r *Recorder) Step(s *Step) {
	if r == nil {
		return
	}
	r.Passes(s.Step, s.Begin, s.Forward, s.Backward)
	at := r.Since(s.Begin)
	for k, b := range s.Buckets {
		r.Record(Slice{
			Track: Comm, Name: "allreduce", Step: s.Step, Bucket: k,
			Ready: at + b.Ready, Start: at + b.Start, End: at + b.Done,
		})
	}
	for k, b := range s.Buckets {
		if b.Updated == 0 {
			continue
		}
		r.Record(Slice{
			Track: Update, Name: "update", Step: s.Step, Bucket: k,
			Ready: at + b.Done, Start: at + b.UpdateStart, End: at + b.Updated,
		})
	}
}

// Passes records a forward and a backward pass that began at begin.
func (r *Recorder) Passes(step int, begin time.Time, forward, backward time.Duration) {
	if r == nil {
		return
	}
	at := r.Since(begin)
	mid := at + forward
	r.Record(Slice{Track: Compute, Name: Forward, Step: step, Bucket: -1, Ready: at, Start: at, End: mid})
	r.Record(Slice{Track: Compute, Name: Backward, Step: step, Bucket: -1, Ready: mid, Start: mid, End: mid + backward})
}

// part is what one rank contributes to a timeline.
type part struct {
	Rank    int
	Clock   Clock
	Dropped int
	Buckets []Bucket
	// Epoch is the recorder's origin on rank 0's clock, in Unix nanoseconds.
	Epoch  int64
	Slices []Slice
}

// part copies what was recorded, oldest first, on rank 0's clock.
func (r *Recorder) part() *part {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := min(r.count, len(r.ring))
	p := &part{Rank: r.opts.Rank, Dropped: r.count - n, Buckets: r.opts.Buckets, Clock: r.clock()}
	first := r.count - n
	p.Slices = make([]Slice, n)
	for i := range p.Slices {
		p.Slices[i] = r.ring[(first+i)%len(r.ring)]
	}
	p.Epoch = r.wall + int64(r.offset(0))
	zero := r.offset(0)
	for i := range p.Slices {
		s := &p.Slices[i]
		for _, t := range []*time.Duration{&s.Ready, &s.Start, &s.End} {
			*t += r.offset(*t) - zero
		}
	}
	return p
}

// Timeline is what this rank has recorded, without the others.
func (r *Recorder) Timeline() *Timeline { return merge([]*part{r.part()}) }

// Rank is one rank's share of a Timeline.
type Rank struct {
	Rank  int
	Clock Clock
	// Dropped is how many earlier slices were recorded but not kept.
	Dropped int
	// Slices are ordered by track and start.
	Slices []Slice
}

// Timeline is what ranks did when, on rank 0's clock.
type Timeline struct {
	// Start is the origin of all times.
	Start   time.Time
	Buckets []Bucket
	Ranks   []Rank
}

// merge brings parts to one origin: the first thing that any of them did.
func merge(parts []*part) *Timeline {
	t := &Timeline{}
	var start int64
	found, buckets := false, 0
	for _, p := range parts {
		for _, s := range p.Slices {
			if at := p.Epoch + int64(s.Start); !found || at < start {
				start, found = at, true
			}
			buckets = max(buckets, s.Bucket+1)
		}
		if len(p.Buckets) > len(t.Buckets) {
			t.Buckets = slices.Clip(p.Buckets)
		}
	}
	for len(t.Buckets) < buckets { // what is nowhere described
		t.Buckets = append(t.Buckets, Bucket{})
	}
	t.Start = time.Unix(0, start)
	for _, p := range parts {
		r := Rank{Rank: p.Rank, Clock: p.Clock, Dropped: p.Dropped, Slices: p.Slices}
		shift := time.Duration(p.Epoch - start)
		for i := range r.Slices {
			s := &r.Slices[i]
			s.Ready, s.Start, s.End = s.Ready+shift, s.Start+shift, s.End+shift
		}
		r.sort()
		t.Ranks = append(t.Ranks, r)
	}
	return t
}

// sort orders slices as files have them.
func (r *Rank) sort() {
	slices.SortStableFunc(r.Slices, func(a, b Slice) int {
		if a.Track != b.Track {
			return int(a.Track) - int(b.Track)
		}
		switch {
		case a.Start < b.Start:
			return -1
		case a.Start > b.Start:
			return 1
		}
		return 0
	})
}
