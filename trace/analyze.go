package trace

import (
	"cmp"
	"errors"
	"math"
	"slices"
	"time"
)

// Summary says where the time of a timeline's steps went. Durations are means
// over ranks and steps, the first step left out where there are more than three.
type Summary struct {
	Ranks, Steps int
	// Warm says that the first step was left out.
	Warm bool
	// Buckets are what the steps reduced, with their means.
	Buckets []BucketSummary
	// Step is from the begin of a step's passes to the begin of the next one's.
	// It is the sum of the six below.
	Step time.Duration
	// Forward and Backward are compute; ExposedComm is time with a bucket in
	// flight and no compute; ExposedUpdate with an update and neither; Rest what
	// is left of the step and Between the time from its last slice to the next step.
	Forward, Backward, ExposedComm, ExposedUpdate, Rest, Between time.Duration
	// ExposedWait is the part of ExposedComm in which other ranks still compute.
	ExposedWait time.Duration
	// Comm and Update are the whole of communication and updates, hidden or not.
	Comm, Update time.Duration
	// Transfer is the part of Comm in which no rank was waited for: each
	// bucket's shortest time over the ranks.
	Transfer time.Duration
	// Latency and Rate are the straight line through the buckets' transfers:
	// what an operation costs before its first byte, and bytes per second. Rate
	// is 0 where buckets are too alike to tell.
	Latency time.Duration
	Rate    float64
	// Window is the time from the first bucket's readiness to the end of the
	// backward pass: as much communication can be hidden.
	Window time.Duration
	// Held says that updates wait for all communication, as they do where the
	// gradient's norm is needed first.
	Held bool
	// Straggler is the rank that ends its passes last in most steps, in the
	// share Late of them, Lag after the first; -1 where there is none.
	Straggler int
	Late      float64
	Lag       time.Duration
	// ClockError is the largest of the ranks'.
	ClockError time.Duration
}

// BucketSummary is a bucket in the mean step.
type BucketSummary struct {
	Bucket
	// Comm is its time at the head of the queue, Exposed the part of it without
	// compute, Queued how long it was ready before, Transfer the shortest over ranks.
	Comm, Exposed, Queued, Transfer time.Duration
	// Ready is when its gradients were final, since the step's begin.
	Ready time.Duration
}

// ErrEmpty says that a timeline has no whole step to speak of.
var ErrEmpty = errors.New("trace: the timeline holds no whole step; record at least one")

// stepKey is one rank's step.
type stepKey struct{ rank, step int }

// stepView is one rank's step, cut out of the timeline.
type stepView struct {
	stepKey
	slices                 [tracks][]Slice
	begin, passes, end     time.Duration // of the passes, and of everything
	forward, backward      time.Duration
	comm, update           time.Duration
	exposed, exposedUpdate time.Duration
	rest, between          time.Duration
}

// views cuts a timeline into steps, ordered by rank and step. Steps whose passes
// are not there are left out.
func views(t *Timeline) []*stepView {
	var all []*stepView
	for i := range t.Ranks {
		byStep := map[int]*stepView{}
		for _, s := range t.Ranks[i].Slices {
			v := byStep[s.Step]
			if v == nil {
				v = &stepView{stepKey: stepKey{t.Ranks[i].Rank, s.Step}}
				byStep[s.Step] = v
			}
			v.slices[s.Track] = append(v.slices[s.Track], s)
		}
		for _, v := range byStep {
			if v.measure() {
				all = append(all, v)
			}
		}
	}
	slices.SortFunc(all, func(a, b *stepView) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.step, b.step))
	})
	for i, v := range all[:max(0, len(all)-1)] {
		if next := all[i+1]; next.rank == v.rank && next.step == v.step+1 {
			v.between = max(0, next.begin-v.end)
		}
	}
	return all
}

// measure fills in the view's sums; false where there are no passes.
func (v *stepView) measure() bool {
	if len(v.slices[Compute]) == 0 {
		return false
	}
	v.begin = v.slices[Compute][0].Start
	for _, s := range v.slices[Compute] {
		v.passes = max(v.passes, s.End)
		if s.Name == Forward {
			v.forward += s.End - s.Start
		} else {
			v.backward += s.End - s.Start
		}
	}
	v.end = v.passes
	for _, s := range v.slices[Comm] {
		v.comm += s.End - s.Start
		v.end = max(v.end, s.End)
	}
	for _, s := range v.slices[Update] {
		v.update += s.End - s.Start
		v.end = max(v.end, s.End)
	}
	v.sweep()
	return true
}

// sweep walks over the step and gives each moment to the first track that is
// busy then: compute, communication, update.
func (v *stepView) sweep() {
	type edge struct {
		at    time.Duration
		track Track
		d     int
	}
	var edges []edge
	for k := Track(0); k < tracks; k++ {
		for _, s := range v.slices[k] {
			edges = append(edges, edge{s.Start, k, 1}, edge{s.End, k, -1})
		}
	}
	slices.SortFunc(edges, func(a, b edge) int { return cmp.Compare(a.at, b.at) })
	var busy [tracks]int
	at := v.begin
	for _, e := range edges {
		d := max(0, e.at-at)
		switch {
		case busy[Compute] > 0:
		case busy[Comm] > 0:
			v.exposed += d
		case busy[Update] > 0:
			v.exposedUpdate += d
		default:
			v.rest += d
		}
		at = max(at, e.at)
		busy[e.track] += e.d
	}
}

// Analyze sums a timeline up.
func Analyze(t *Timeline) (*Summary, error) {
	all := views(t)
	first, last := math.MaxInt, 0
	for _, v := range all {
		first, last = min(first, v.step), max(last, v.step)
	}
	warm := last-first >= 3
	if warm {
		all = slices.DeleteFunc(all, func(v *stepView) bool { return v.step == first })
	}
	if len(all) == 0 {
		return nil, ErrEmpty
	}
	s := &Summary{Warm: warm, Ranks: len(t.Ranks), Straggler: -1, Held: len(t.Buckets) > 1}
	for _, r := range t.Ranks {
		s.ClockError = max(s.ClockError, r.Clock.Error)
	}
	s.addSteps(all)
	s.addBuckets(t, all)
	s.fit()
	s.findStraggler(all)
	return s, nil
}

func (s *Summary) addSteps(all []*stepView) {
	steps, n := map[int]bool{}, time.Duration(len(all))
	for _, v := range all {
		steps[v.step] = true
		s.Forward += v.forward / n
		s.Backward += v.backward / n
		s.ExposedComm += v.exposed / n
		s.ExposedUpdate += v.exposedUpdate / n
		s.Rest += v.rest / n
		s.Between += v.between / n
		s.Comm += v.comm / n
		s.Update += v.update / n
		if len(v.slices[Comm]) > 0 {
			s.Window += max(0, v.passes-v.slices[Comm][0].Ready) / n
		}
		if len(v.slices[Update]) == 0 || len(v.slices[Comm]) == 0 ||
			v.slices[Update][0].Start < v.slices[Comm][len(v.slices[Comm])-1].End {
			s.Held = false
		}
	}
	s.Steps = len(steps)
	s.Step = s.Forward + s.Backward + s.ExposedComm + s.ExposedUpdate + s.Rest + s.Between
}

// addBuckets takes means per bucket, over the steps in which it was reduced.
func (s *Summary) addBuckets(t *Timeline, all []*stepView) {
	s.Buckets = make([]BucketSummary, len(t.Buckets))
	counts := make([]time.Duration, len(t.Buckets))
	type key struct{ step, bucket int }
	shortest := map[key]time.Duration{}
	for k := range s.Buckets {
		s.Buckets[k].Bucket = t.Buckets[k]
	}
	for _, v := range all {
		for _, c := range v.slices[Comm] {
			if c.Bucket < 0 {
				continue
			}
			b := &s.Buckets[c.Bucket]
			counts[c.Bucket]++
			d := c.End - c.Start
			b.Comm += d
			b.Exposed += max(0, c.End-max(c.Start, v.passes))
			b.Queued += c.Start - c.Ready
			b.Ready += c.Ready - v.begin
			k := key{v.step, c.Bucket}
			if old, ok := shortest[k]; !ok || d < old {
				shortest[k] = d
			}
		}
	}
	steps := make([]time.Duration, len(t.Buckets))
	for k, d := range shortest {
		s.Buckets[k.bucket].Transfer += d
		steps[k.bucket]++
	}
	for k := range s.Buckets {
		b := &s.Buckets[k]
		n := max(1, counts[k])
		b.Comm, b.Exposed, b.Queued, b.Ready = b.Comm/n, b.Exposed/n, b.Queued/n, b.Ready/n
		b.Transfer /= max(1, steps[k])
		s.Transfer += b.Transfer
	}
}

// fit puts a line through the buckets' sizes and transfers, by least squares.
func (s *Summary) fit() {
	var n, sx, sy, sxx, sxy float64
	least, most := math.MaxInt, 0
	for _, b := range s.Buckets {
		if b.Transfer <= 0 || b.Bytes <= 0 {
			continue
		}
		x, y := float64(b.Bytes), float64(b.Transfer)
		n, sx, sy, sxx, sxy = n+1, sx+x, sy+y, sxx+x*x, sxy+x*y
		least, most = min(least, b.Bytes), max(most, b.Bytes)
	}
	if n < 3 || float64(most) < 1.5*float64(least) {
		return
	}
	slope := (n*sxy - sx*sy) / (n*sxx - sx*sx) // ns a byte
	if !(slope > 0) {
		// Size doesn't matter at all: every operation costs the same.
		s.Latency, s.Rate = time.Duration(sy/n), math.Inf(1)
		return
	}
	s.Latency = time.Duration(max(0, (sy-slope*sx)/n))
	s.Rate = 1e9 / slope
}

// findStraggler looks for a rank that the others wait for. The last to come
// waits for nobody, so what it has exposed is exposed on all.
func (s *Summary) findStraggler(all []*stepView) {
	if s.Ranks < 2 {
		return
	}
	type ends struct {
		first, last     time.Duration
		least, exposure time.Duration // of exposed communication, and its sum
		rank, n         int
	}
	steps := map[int]*ends{}
	for _, v := range all {
		e := steps[v.step]
		if e == nil {
			e = &ends{first: v.passes, last: v.passes, least: v.exposed, rank: v.rank}
			steps[v.step] = e
		}
		e.n++
		e.first = min(e.first, v.passes)
		e.least = min(e.least, v.exposed)
		e.exposure += v.exposed
		if v.passes > e.last {
			e.last, e.rank = v.passes, v.rank
		}
	}
	counts, lags, whole := map[int]int{}, map[int]time.Duration{}, 0
	for _, e := range steps {
		if e.n != s.Ranks {
			continue
		}
		whole++
		counts[e.rank]++
		lags[e.rank] += e.last - e.first
		s.ExposedWait += e.exposure/time.Duration(s.Ranks) - e.least
	}
	s.ExposedWait /= time.Duration(max(1, whole))
	for rank, n := range counts {
		if 2*n > whole {
			s.Straggler, s.Late = rank, float64(n)/float64(whole)
			s.Lag = lags[rank] / time.Duration(n)
		}
	}
}
