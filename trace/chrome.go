package trace

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/tandem-go/tandem/internal/durable"
)

// formatVersion is that of what is ours in the file.
const formatVersion = 1

// The file is a JSON object in the Trace Event Format, which Perfetto and
// chrome://tracing open: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
// Times there are microseconds.

// meta is the file's otherData.
type meta struct {
	Version int `json:"tandem_timeline"`
	// Start is the origin of ts in Unix nanoseconds, on rank 0's clock.
	Start   int64      `json:"start_unix_ns"`
	Buckets []Bucket   `json:"buckets"`
	Ranks   []rankMeta `json:"ranks"`
}

type rankMeta struct {
	Rank int `json:"rank"`
	// ClockOffset is rank 0's clock minus this rank's, which was added to its
	// times; ClockError bounds what is wrong with it, either way.
	ClockOffset float64 `json:"clock_offset_us"`
	ClockError  float64 `json:"clock_error_us"`
	ClockDrift  float64 `json:"clock_drift_ppm"`
	Dropped     int     `json:"dropped_slices"`
}

// event is an entry of traceEvents.
type event struct {
	Ph   string   `json:"ph"`
	Name string   `json:"name"`
	Cat  string   `json:"cat,omitempty"`
	Ts   *float64 `json:"ts,omitempty"`
	Dur  *float64 `json:"dur,omitempty"`
	Pid  int      `json:"pid"`
	Tid  int      `json:"tid"`
	Args any      `json:"args,omitempty"`
}

// sliceArgs are what Perfetto shows beside a slice.
type sliceArgs struct {
	Step       int      `json:"step"`
	Bucket     *int     `json:"bucket,omitempty"`
	Bytes      int      `json:"bytes,omitempty"`
	Parameters string   `json:"parameters,omitempty"`
	Ready      *float64 `json:"ready_us,omitempty"`
	Start      *float64 `json:"start_us,omitempty"`
	End        *float64 `json:"end_us,omitempty"`
	Operation  string   `json:"operation,omitempty"`
}

func micros(d time.Duration) float64 { return float64(d) / 1000 }

func ptr[T any](v T) *T { return &v }

// WriteFile writes the timeline to path, whole or not at all.
func (t *Timeline) WriteFile(path string) error {
	if err := durable.Write(path, t.Write); err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	return nil
}

// Write writes the timeline as a Chrome trace: a process a rank, a thread a track.
func (t *Timeline) Write(w io.Writer) error {
	m := meta{Version: formatVersion, Start: t.Start.UnixNano(), Buckets: t.Buckets}
	for _, r := range t.Ranks {
		m.Ranks = append(m.Ranks, rankMeta{r.Rank, micros(r.Clock.Offset), micros(r.Clock.Error), r.Clock.Drift, r.Dropped})
	}
	head, err := json.Marshal(m)
	if err != nil {
		return err
	}
	b := bufio.NewWriter(w)
	fmt.Fprintf(b, "{\"displayTimeUnit\":\"ms\",\n\"otherData\":%s,\n\"traceEvents\":[", head)
	sep := "\n"
	emit := func(e *event) error {
		raw, err := json.Marshal(e)
		if err != nil {
			return err
		}
		b.WriteString(sep)
		sep = ",\n"
		_, err = b.Write(raw)
		return err
	}
	for i := range t.Ranks {
		if err := t.writeRank(&t.Ranks[i], emit); err != nil {
			return err
		}
	}
	b.WriteString("\n]}\n")
	return b.Flush()
}

func (t *Timeline) writeRank(r *Rank, emit func(*event) error) error {
	name := fmt.Sprintf("rank %d", r.Rank)
	if r.Clock.Error > 0 {
		name += fmt.Sprintf(" (clock ± %.0f µs)", micros(r.Clock.Error))
	}
	about := func(what string, tid int, args any) error {
		return emit(&event{Ph: "M", Name: what, Pid: r.Rank, Tid: tid, Args: args})
	}
	type label struct {
		Name string `json:"name"`
	}
	type index struct {
		SortIndex int `json:"sort_index"`
	}
	if err := about("process_name", 0, label{name}); err != nil {
		return err
	}
	if err := about("process_sort_index", 0, index{r.Rank}); err != nil {
		return err
	}
	for k := Track(0); k < tracks; k++ {
		if err := about("thread_name", tid(k), label{k.String()}); err != nil {
			return err
		}
		if err := about("thread_sort_index", tid(k), index{int(k)}); err != nil {
			return err
		}
	}
	for i := range r.Slices {
		if err := emit(t.event(r.Rank, &r.Slices[i])); err != nil {
			return err
		}
	}
	return nil
}

// tid is a track's thread; 0 would be the process's main thread.
func tid(t Track) int { return int(t) + 1 }

func (t *Timeline) event(rank int, s *Slice) *event {
	a := &sliceArgs{Step: s.Step}
	name := s.Name
	if s.Bucket >= 0 {
		name = fmt.Sprintf("bucket %d", s.Bucket)
		a.Bucket, a.Operation = ptr(s.Bucket), s.Name
		a.Ready, a.Start, a.End = ptr(micros(s.Ready)), ptr(micros(s.Start)), ptr(micros(s.End))
		if s.Bucket < len(t.Buckets) {
			b := t.Buckets[s.Bucket]
			a.Bytes, a.Parameters = b.Bytes, paramList(b.Params, 4)
		}
	}
	return &event{
		Ph: "X", Name: name, Cat: s.Track.String(), Ts: ptr(micros(s.Start)), Dur: ptr(micros(s.End - s.Start)),
		Pid: rank, Tid: tid(s.Track), Args: a,
	}
}

// paramList names at most n parameters.
func paramList(names []string, n int) string {
	if len(names) <= n {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s, … %s (%d)", strings.Join(names[:n-1], ", "), names[len(names)-1], len(names))
}
