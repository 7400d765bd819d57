package trace

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// flightJob is records of size ranks that have finished done collectives.
func flightJob(size, done int) []*FlightRecord {
	var all []*FlightRecord
	world := make([]int, size)
	for r := range world {
		world[r] = r
	}
	for r := range size {
		f := &FlightRecord{Rank: r, Size: size, JobID: "job", Culprit: -1, Start: time.Unix(1000, 0), At: 100 * time.Second,
			Comms: []FlightComm{{"world", world}}}
		for s := range done {
			f.Entries = append(f.Entries, flightCall(s, FlightDone))
		}
		all = append(all, f)
	}
	return all
}

func flightCall(seq int, s FlightState) FlightEntry {
	e := FlightEntry{FlightCall: FlightCall{Seq: uint64(seq), Kind: "allreduce", Op: "sum", Type: "float32", Count: 100,
		Name: "bucket", Bucket: seq % 7, Peer: -1}, State: s, Queued: time.Second}
	if s != FlightQueued {
		e.Started = 40 * time.Second
	}
	if s == FlightDone {
		e.Ended = 41 * time.Second
	}
	return e
}

// Without it the one sentence could name the wrong rank, collective or wait.
func TestFlightSentences(t *testing.T) {
	add := func(r *FlightRecord, e FlightEntry) { r.Entries = append(r.Entries, e) }
	waiting := func(all []*FlightRecord, but ...int) {
		for _, r := range all {
			if !slices.Contains(but, r.Rank) {
				add(r, flightCall(5, FlightRunning))
			}
		}
	}
	for _, c := range []struct {
		name, want string
		change     func(all []*FlightRecord) []*FlightRecord
	}{
		{"all well", "the 4 ranks agree on every collective that they recorded",
			func(all []*FlightRecord) []*FlightRecord { return all }},
		{"never launched", "rank 2 never launched bucket 5 (seq 5); 0, 1, 3 have waited 60 s",
			func(all []*FlightRecord) []*FlightRecord { waiting(all, 2); return all }},
		{"two never launched", "ranks 0, 2 never launched bucket 5 (seq 5); 1, 3 have waited 60 s",
			func(all []*FlightRecord) []*FlightRecord { waiting(all, 0, 2); return all }},
		{"queued", "rank 3 launched bucket 5 (seq 5) but never came to it; 0, 1, 2 have waited 60 s",
			func(all []*FlightRecord) []*FlightRecord {
				waiting(all, 3)
				add(all[3], flightCall(5, FlightQueued))
				return all
			}},
		{"all in it", "ranks 0, 1, 2, 3 have been in bucket 5 (seq 5) for 60 s",
			func(all []*FlightRecord) []*FlightRecord { waiting(all); return all }},
		{"finished elsewhere", "rank 1 has waited 60 s in bucket 5 (seq 5), which the others have finished",
			func(all []*FlightRecord) []*FlightRecord {
				waiting(all, 0, 2, 3)
				for _, r := range []int{0, 2, 3} {
					add(all[r], flightCall(5, FlightDone))
				}
				return all
			}},
		{"mismatch", "ranks disagree on collective 5 of world: rank 0 called allreduce sum of 100 float32 (bucket 5), rank 1 called allreduce sum of 101 float32 (bucket 5)",
			func(all []*FlightRecord) []*FlightRecord {
				waiting(all, 1)
				e := flightCall(5, FlightRunning)
				e.Count++
				add(all[1], e)
				return all
			}},
		{"killed", "rank 2 left no record (killed, frozen, or unable to write); ranks 0, 1, 3 have been in bucket 5 (seq 5) for 60 s",
			func(all []*FlightRecord) []*FlightRecord { waiting(all); return slices.Delete(all, 2, 3) }},
		{"killed after a signal", "rank 2 left no record (killed, frozen, or unable to write); ranks 0, 1, 3 have been in bucket 5 (seq 5) for 60 s",
			func(all []*FlightRecord) []*FlightRecord {
				waiting(all, 2)
				for _, r := range all {
					r.Reason = "error"
				}
				all[2].Reason, all[2].At = "signal", 30*time.Second
				return all
			}},
		{"another communicator", "rank 1 never launched barrier (seq 0 of world/0.1); 0 has waited 60 s",
			func(all []*FlightRecord) []*FlightRecord {
				for _, r := range all[:2] {
					r.Comms = append(r.Comms, FlightComm{"world/0.1", []int{0, 1}})
				}
				add(all[0], FlightEntry{FlightCall: FlightCall{Comm: 1, Kind: "barrier", Bucket: -1, Peer: -1},
					State: FlightRunning, Started: 40 * time.Second})
				return all
			}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := JoinFlights(c.change(flightJob(4, 5)))
			require.Equal(t, c.want, f.Disagreement().Sentence)
			require.Contains(t, f.Text(), c.want)
		})
	}
}

// Without it a job that is merely looked at (SIGUSR1) would be told that ranks
// hang, because their records were not written at the same moment.
func TestFlightOfARunningJob(t *testing.T) {
	all := flightJob(2, 5)
	e := flightCall(5, FlightRunning)
	e.Started = all[0].At - 3*time.Millisecond
	all[0].Entries = append(all[0].Entries, e)
	require.Empty(t, JoinFlights(all).Disagreement().Ranks)
	all[0].Reason, all[0].Error = "error", "aborted"
	require.Equal(t, []int{1}, JoinFlights(all).Disagreement().Ranks)
}

// Without it a wrapped ring would make the oldest collectives look as if a rank
// had never launched them.
func TestFlightDropped(t *testing.T) {
	all := flightJob(2, 20)
	all[1].Entries, all[1].Dropped = all[1].Entries[15:], 15
	require.Empty(t, JoinFlights(all).Disagreement().Ranks)
}

// Without it any rank, sequence number or number of ranks other than the
// table's could be blamed wrongly.
func TestFlightNamesTheLateRank(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size, done := rapid.IntRange(2, 9).Draw(t, "size"), rapid.IntRange(0, 30).Draw(t, "done")
		late := rapid.IntRange(0, size-1).Draw(t, "late")
		ahead := rapid.IntRange(0, 5).Draw(t, "ahead")
		all := flightJob(size, done)
		for _, r := range all {
			if r.Rank != late {
				r.Entries = append(r.Entries, flightCall(done, FlightRunning))
				for i := range ahead {
					r.Entries = append(r.Entries, flightCall(done+1+i, FlightQueued))
				}
			}
		}
		d := JoinFlights(all).Disagreement()
		require.Equal(t, []int{late}, d.Ranks)
		require.EqualValues(t, done, d.Seq)
		require.Equal(t, done%7, d.Bucket)
		require.Equal(t, 60*time.Second, d.Wait)
	})
}

// Without it recording could slow every collective down or fill the heap.
func TestFlightAllocatesNothing(t *testing.T) {
	r, err := NewFlightRecorder(FlightOptions{Entries: 16})
	require.NoError(t, err)
	call := FlightCall{Kind: "allreduce", Op: "sum", Type: "float32", Count: 10, Name: "bucket", Peer: -1}
	require.Zero(t, testing.AllocsPerRun(100, func() {
		id := r.Queue(&call)
		r.Start(id)
		r.End(id, false)
	}))
}

// Without it the ring could mix up collectives once it has wrapped.
func TestFlightRing(t *testing.T) {
	r, err := NewFlightRecorder(FlightOptions{Entries: 4, Rank: 1, Size: 3})
	require.NoError(t, err)
	r.Communicator("world", []int{0, 1, 2})
	var ids []FlightID
	for s := range 7 {
		ids = append(ids, r.Queue(&FlightCall{Seq: uint64(s), Peer: -1}))
	}
	for i, id := range ids {
		r.Start(id)
		if i < 6 {
			r.End(id, i == 5)
		}
	}
	f := r.Record()
	require.EqualValues(t, 3, f.Dropped)
	var states []FlightState
	for i, e := range f.Entries {
		require.EqualValues(t, 3+i, e.Seq)
		states = append(states, e.State)
	}
	require.Equal(t, []FlightState{FlightDone, FlightDone, FlightFailed, FlightRunning}, states)
	var none *FlightRecorder
	none.Start(none.Queue(&FlightCall{}))
	require.NoError(t, none.DumpError("x", 0))
}

// Without it a record could not be read back, or the wrong files be joined.
func TestFlightFiles(t *testing.T) {
	dir := t.TempDir()
	_, err := ReadFlights(dir)
	require.ErrorIs(t, err, ErrNoFlight)
	for rank := range 2 {
		r, err := NewFlightRecorder(FlightOptions{Rank: rank, Size: 2, Dir: dir, JobID: "now", Entries: 10})
		require.NoError(t, err)
		c := r.Communicator("world", []int{0, 1})
		r.End(r.Queue(&FlightCall{Comm: c, Kind: "barrier", Bucket: -1, Peer: -1}), false)
		require.NoError(t, r.DumpSignal())
		require.NoError(t, r.DumpError("rank 1 died", 1))
		got, err := ReadFlight(filepath.Join(dir, FlightName(rank)))
		require.NoError(t, err)
		require.Equal(t, "rank 1 died", got.Error)
		require.Equal(t, 1, got.Culprit)
		require.Len(t, got.Entries, 1)
	}
	old := flightJob(3, 1)[2]
	var b bytes.Buffer
	require.NoError(t, WriteFlight(&b, old))
	require.NoError(t, os.WriteFile(filepath.Join(dir, FlightName(2)), b.Bytes(), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(dir, FlightName(7)), []byte("{}"), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "flight-rank01.json"), []byte("{}"), 0o644))
	f, err := ReadFlights(dir)
	require.NoError(t, err)
	require.Equal(t, 2, f.Size)
	require.Len(t, f.Ignored, 2)
	b.Reset()
	require.NoError(t, WriteFlight(&b, flightJob(2, 1)[1])) // as many ranks, but long ago
	require.NoError(t, os.WriteFile(filepath.Join(dir, FlightName(1)), b.Bytes(), 0o644))
	f, err = ReadFlights(dir)
	require.NoError(t, err)
	require.Nil(t, f.Records[1])
	require.Equal(t, []int{1}, f.Disagreement().Ranks)
}

// Without it a directory that can't be written could crash a rank, or a failure
// to write go unnoticed.
func TestFlightUnwritable(t *testing.T) {
	r, err := NewFlightRecorder(FlightOptions{Dir: filepath.Join(t.TempDir(), "absent")})
	require.NoError(t, err)
	require.ErrorIs(t, r.DumpError("cause", -1), os.ErrNotExist)
}

// Without it a damaged or hostile file could crash the reader or be believed.
func FuzzParseFlight(f *testing.F) {
	for _, r := range flightJob(2, 3) {
		var b bytes.Buffer
		if err := WriteFlight(&b, r); err != nil {
			f.Fatal(err)
		}
		f.Add(b.Bytes())
	}
	f.Add([]byte(`{"tandem_flight":1,"size":1,"communicators":[{"name":"w","ranks":[0]}],"collectives":[{"comm":1}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := ParseFlight(bytes.NewReader(b))
		if err != nil {
			return
		}
		_ = JoinFlights([]*FlightRecord{r}).Text()
		var again bytes.Buffer
		if err := WriteFlight(&again, r); err != nil {
			if strings.Contains(err.Error(), "year outside") {
				return // a time that RFC 3339 can't say
			}
			t.Fatal(err)
		}
		s, err := ParseFlight(&again)
		if err != nil {
			t.Fatal(err)
		}
		if len(s.Entries) != len(r.Entries) || s.At != r.At || !reflect.DeepEqual(s.Entries, r.Entries) {
			t.Fatalf("%+v read back as %+v", r, s)
		}
	})
}
