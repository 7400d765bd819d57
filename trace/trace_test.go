package trace

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares got with testdata/name.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, got, 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err, "run the test with -update")
	require.Equal(t, string(want), string(got), "if it is right, run the test with -update")
}

// link is a made-up machine: what steps of some ranks look like on it.
type link struct {
	ranks, steps int
	sizes        []int         // of buckets, KiB
	latency      time.Duration // of a collective
	rate         float64       // KiB a millisecond
	backward     time.Duration
	late         time.Duration // by which the last rank's backward pass is longer
	held         bool          // updates wait for all communication
	between      time.Duration
}

const msec = time.Millisecond

// timeline simulates: gradients become final evenly over the backward pass, a
// collective starts when all ranks are ready and the one before has ended.
func (l link) timeline(t require.TestingT) *Timeline {
	const forward = 10 * msec
	n := len(l.sizes)
	parts := make([]*part, l.ranks)
	buckets := make([]Bucket, n)
	for k := range buckets {
		buckets[k] = Bucket{Bytes: l.sizes[k] << 10, Params: []string{fmt.Sprintf("h.%d.weight", n-k-1), fmt.Sprintf("h.%d.bias", n-k-1)}}
	}
	epoch := time.Unix(1700000000, 0)
	recs := make([]*Recorder, l.ranks)
	for r := range recs {
		rec, err := NewRecorder(Options{Rank: r, Size: l.ranks, Buckets: buckets})
		require.NoError(t, err)
		rec.epoch, rec.wall = epoch, epoch.UnixNano()
		if r > 0 {
			rec.clocks = []reading{{offset: 0, error: 20 * time.Microsecond}}
		}
		recs[r] = rec
	}
	at := epoch
	for step := 1; step <= l.steps; step++ {
		end := l.step(recs, step, at, forward)
		at = at.Add(end + l.between)
	}
	for r, rec := range recs {
		parts[r] = rec.part()
	}
	return merge(parts)
}

func (l link) step(recs []*Recorder, step int, at time.Time, forward time.Duration) (end time.Duration) {
	n := len(l.sizes)
	ready := make([][]time.Duration, l.ranks)
	for r := range ready {
		b := l.backward
		if r == l.ranks-1 {
			b += l.late
		}
		for k := range n {
			ready[r] = append(ready[r], forward+b*time.Duration(k+1)/time.Duration(n))
		}
	}
	times := make([][]BucketTimes, l.ranks)
	var free time.Duration
	for k := range n {
		start := free
		for r := range ready {
			start = max(start, ready[r][k])
		}
		done := start + l.latency + time.Duration(float64(l.sizes[k])/l.rate*float64(msec))
		for r := range ready {
			times[r] = append(times[r], BucketTimes{Ready: ready[r][k], Start: max(free, ready[r][k]), Done: done})
		}
		free = done
	}
	for r := range times {
		idle := time.Duration(0)
		if l.held {
			idle = free
		}
		for k := range times[r] {
			b := &times[r][k]
			b.UpdateStart = max(idle, b.Done)
			b.Updated = b.UpdateStart + msec/2
			idle = b.Updated
			end = max(end, idle)
		}
		b := ready[r][n-1] - forward
		recs[r].Step(&Step{Step: step, Begin: at, Forward: forward, Backward: b, Buckets: times[r]})
	}
	return end
}

func small() link {
	return link{ranks: 2, steps: 2, sizes: []int{1000, 1000, 500}, latency: msec / 10, rate: 500, backward: 30 * msec, late: 2 * msec, between: msec}
}

func encoded(t testing.TB, tl *Timeline) []byte {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, tl.Write(&b))
	return b.Bytes()
}

// Without it the file could change unnoticed, for those who read it elsewhere.
func TestGoldenFile(t *testing.T) {
	golden(t, "small.json", encoded(t, small().timeline(t)))
}

// Without it Perfetto might show nothing, or everything in one row: these are
// the fields that it needs, looked at without our own reader.
func TestPerfettoFields(t *testing.T) {
	var f struct {
		TraceEvents []map[string]any
		OtherData   struct {
			Ranks []map[string]float64
		}
	}
	require.NoError(t, json.Unmarshal(encoded(t, small().timeline(t)), &f))
	rows, threads, buckets := map[float64]string{}, map[[2]float64]string{}, 0
	for _, e := range f.TraceEvents {
		pid, tid := e["pid"].(float64), e["tid"].(float64)
		args := e["args"].(map[string]any)
		switch e["ph"] {
		case "M":
			if e["name"] == "process_name" {
				rows[pid] = args["name"].(string)
			}
			if e["name"] == "thread_name" {
				threads[[2]float64{pid, tid}] = args["name"].(string)
			}
		case "X":
			require.NotEmpty(t, e["name"])
			require.GreaterOrEqual(t, e["ts"].(float64), 0.0)
			require.GreaterOrEqual(t, e["dur"].(float64), 0.0)
			track := threads[[2]float64{pid, tid}]
			require.Equal(t, e["cat"], track)
			if track == Comm.String() {
				buckets++
				require.Contains(t, args["parameters"], "weight")
				require.GreaterOrEqual(t, args["bytes"].(float64), 500.0*1024)
				require.LessOrEqual(t, args["ready_us"].(float64), args["start_us"].(float64))
				require.InDelta(t, e["ts"].(float64)+e["dur"].(float64), args["end_us"].(float64), 1e-3)
			}
		default:
			t.Fatalf("an event of kind %v", e["ph"])
		}
	}
	require.Equal(t, map[float64]string{0: "rank 0", 1: "rank 1 (clock ± 20 µs)"}, rows)
	require.Len(t, threads, 6)
	require.Equal(t, 2*2*3, buckets)
	require.Equal(t, 20.0, f.OtherData.Ranks[1]["clock_error_us"])
}

// anyTimeline draws a timeline that a recorder could have made.
func anyTimeline() *rapid.Generator[*Timeline] {
	return rapid.Custom(func(t *rapid.T) *Timeline {
		n := rapid.IntRange(0, 4).Draw(t, "buckets")
		tl := &Timeline{Start: time.Unix(0, rapid.Int64Range(0, 1<<60).Draw(t, "start"))}
		for range n {
			tl.Buckets = append(tl.Buckets, Bucket{Bytes: rapid.IntRange(0, 1<<30).Draw(t, "bytes"), Params: rapid.SliceOfN(rapid.String(), 1, 6).Draw(t, "params")})
		}
		for r := range rapid.IntRange(1, 3).Draw(t, "ranks") {
			rank := Rank{Rank: r, Dropped: rapid.IntRange(0, 9).Draw(t, "dropped")}
			rank.Clock = Clock{Offset: time.Duration(rapid.Int64Range(-1e12, 1e12).Draw(t, "offset")), Error: time.Duration(rapid.Int64Range(0, 1e9).Draw(t, "error"))}
			for range rapid.IntRange(0, 12).Draw(t, "slices") {
				s := Slice{Track: Track(rapid.IntRange(0, int(tracks)-1).Draw(t, "track")), Step: rapid.IntRange(1, 3).Draw(t, "step"), Bucket: -1}
				s.Start = time.Duration(rapid.Int64Range(0, 1e3).Draw(t, "at"))
				s.End = s.Start + time.Duration(rapid.Int64Range(0, 50).Draw(t, "length"))
				s.Ready = s.Start
				switch {
				case s.Track == Compute:
					s.Name = rapid.SampledFrom([]string{Forward, Backward}).Draw(t, "pass")
				case n > 0:
					s.Bucket, s.Name = rapid.IntRange(0, n-1).Draw(t, "bucket"), rapid.String().Draw(t, "operation")
					s.Ready -= min(s.Ready, time.Duration(rapid.Int64Range(0, 30).Draw(t, "queued")))
				default:
					s.Name = "loss"
				}
				rank.Slices = append(rank.Slices, s)
			}
			rank.sort()
			tl.Ranks = append(tl.Ranks, rank)
		}
		return tl
	})
}

// Without it a timeline that is read would not be the one that was written.
func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := anyTimeline().Draw(t, "timeline")
		var b bytes.Buffer
		require.NoError(t, want.Write(&b))
		got, err := Parse(&b)
		require.NoError(t, err)
		require.True(t, want.Start.Equal(got.Start))
		got.Start = want.Start
		require.Equal(t, want, got)
	})
}

// Without it a file of something else, or a damaged one, would be explained.
func TestBadFiles(t *testing.T) {
	good := string(encoded(t, small().timeline(t)))
	slice := func(args string) string {
		return `{"otherData":{"tandem_timeline":1,"ranks":[{"rank":0}],"buckets":[{"bytes":1}]},"traceEvents":[{"ph":"X","cat":"communication",` + args + `}]}`
	}
	for name, raw := range map[string]string{
		"empty":          "",
		"cut":            good[:len(good)/2],
		"array":          "[]",
		"another's":      `{"traceEvents":[]}`,
		"version":        `{"otherData":{"tandem_timeline":2}}`,
		"no time":        slice(`"pid":0,"args":{"step":1}`),
		"no args":        slice(`"pid":0,"ts":1,"dur":1,"args":null`),
		"negative":       slice(`"pid":0,"ts":1,"dur":-1,"args":{"step":1}`),
		"huge":           slice(`"pid":0,"ts":1e300,"dur":1,"args":{"step":1}`),
		"bucket":         slice(`"pid":0,"ts":1,"dur":1,"args":{"step":1,"bucket":1}`),
		"minus":          slice(`"pid":0,"ts":1,"dur":1,"args":{"step":1,"bucket":-1}`),
		"step":           slice(`"pid":0,"ts":1,"dur":1,"args":{"step":-1}`),
		"rank":           slice(`"pid":7,"ts":1,"dur":1,"args":{"step":1}`),
		"no rank":        slice(`"pid":-7,"ts":1,"dur":1,"args":{"step":1}`),
		"twice":          `{"otherData":{"tandem_timeline":1,"ranks":[{"rank":0},{"rank":0}]}}`,
		"negative bytes": `{"otherData":{"tandem_timeline":1,"buckets":[{"bytes":-1}]}}`,
	} {
		_, err := Parse(bytes.NewReader([]byte(raw)))
		require.ErrorIs(t, err, ErrFormat, name)
	}
	tl, err := Parse(bytes.NewReader([]byte(slice(`"pid":0,"ts":1,"dur":1,"args":{"step":1}`))))
	require.NoError(t, err, "the frame of the cases above is right")
	require.Len(t, tl.Ranks[0].Slices, 1)
	_, err = Read(filepath.Join(t.TempDir(), "missing"))
	require.ErrorIs(t, err, os.ErrNotExist)
}

// Without it bytes from outside could panic the reader or what follows it.
func FuzzParse(f *testing.F) {
	one := link{ranks: 1, steps: 1, sizes: []int{10}, rate: 500, backward: msec}
	f.Add(encoded(f, one.timeline(f)))
	f.Add([]byte(`{"traceEvents":[{"ph":"B"},3],"x":[{}],"otherData":{"tandem_timeline":1,"ranks":[{"rank":0}]}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		tl, err := Parse(bytes.NewReader(raw))
		if err != nil {
			return
		}
		again, err := Parse(bytes.NewReader(encoded(t, tl)))
		if err != nil || len(again.Ranks) != len(tl.Ranks) {
			t.Fatalf("written again it is no timeline: %v", err)
		}
		if _, err := Explain(tl); err != nil && !errors.Is(err, ErrEmpty) {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if err := SVG(&b, tl, 0); err == nil {
			wellFormed(t, b.Bytes())
		} else if !errors.Is(err, ErrEmpty) {
			t.Fatal(err)
		}
	})
}

func wellFormed(t testing.TB, svg []byte) {
	t.Helper()
	for d := xml.NewDecoder(bytes.NewReader(svg)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatalf("the picture is not XML: %v", err)
		}
	}
}

// Without it a long run would lose its newest steps, or a step make garbage.
func TestRecorderKeepsTheNewest(t *testing.T) {
	r, err := NewRecorder(Options{Slices: 6, Buckets: make([]Bucket, 2)})
	require.NoError(t, err)
	s := &Step{Begin: time.Now(), Forward: 1, Backward: 1, Buckets: make([]BucketTimes, 2)}
	s.Buckets[1].Updated = 1
	for s.Step = 1; s.Step <= 7; s.Step++ {
		r.Step(s) // five slices
	}
	tl := r.Timeline()
	require.Equal(t, 29, tl.Ranks[0].Dropped)
	require.Len(t, tl.Ranks[0].Slices, 6)
	for _, x := range tl.Ranks[0].Slices {
		require.GreaterOrEqual(t, x.Step, 6)
	}
	require.Zero(t, testing.AllocsPerRun(100, func() { r.Step(s) }))
	var none *Recorder
	none.Step(s)
	require.NoError(t, none.Align(t.Context(), nil))
	for _, o := range []Options{{Rank: 1}, {Rank: -1}, {Slices: -1}, {Slices: maxSlices + 1}, {Size: maxRanks + 1}} {
		_, err := NewRecorder(o)
		require.Error(t, err)
	}
}

// Without it a reader could find half of a timeline.
func TestWriteFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.json")
	want := small().timeline(t)
	require.NoError(t, want.WriteFile(path))
	got, err := Read(path)
	require.NoError(t, err)
	require.Equal(t, want.Ranks, got.Ranks)
	require.Error(t, want.WriteFile(filepath.Join(path, "x")))
}
