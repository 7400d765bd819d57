package trace

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/tandem-go/tandem/internal/durable"
)

// ErrFlightFormat is in the chain when a file is no flight record of ours.
var ErrFlightFormat = errors.New("not a flight record that tandem wrote")

const (
	flightVersion  = 1
	maxFlightBytes = 64 << 20
	maxFlightText  = 64 << 10 // of the error
	maxFlightTime  = 100 * 365 * 24 * time.Hour
)

// FlightRecord is what one rank's file holds.
type FlightRecord struct {
	Rank, Size int
	JobID      string
	Generation int
	// Reason is why the record was written: "error" or "signal". Error is the
	// failure as this rank tells it, Culprit who is at fault, -1 when unknown.
	Reason, Error string
	Culprit       int
	// Start is the origin of all times, on this rank's clock; At is when the
	// record was taken.
	Start time.Time
	At    time.Duration
	// Dropped is how many earlier collectives were recorded but not kept.
	Dropped uint64
	Comms   []FlightComm
	// Entries are ordered as they were queued.
	Entries []FlightEntry
}

// FlightName is the name of a rank's file.
func FlightName(rank int) string { return fmt.Sprintf("flight-rank%d.json", rank) }

// DumpError writes the record after a failure; culprit is a rank of the world
// or -1.
func (r *FlightRecorder) DumpError(cause string, culprit int) error {
	if r == nil || r.opts.Dir == "" {
		return nil
	}
	f := r.Record()
	f.Reason, f.Error, f.Culprit = "error", cause[:min(len(cause), maxFlightText)], culprit
	return r.write(f)
}

// DumpSignal writes the record of a job that goes on.
func (r *FlightRecorder) DumpSignal() error {
	if r == nil || r.opts.Dir == "" {
		return nil
	}
	f := r.Record()
	f.Reason = "signal"
	return r.write(f)
}

func (r *FlightRecorder) write(f *FlightRecord) error {
	r.file.Lock()
	defer r.file.Unlock()
	path := filepath.Join(r.opts.Dir, FlightName(r.opts.Rank))
	if err := durable.Write(path, func(w io.Writer) error { return WriteFlight(w, f) }); err != nil {
		return fmt.Errorf("trace: rank %d's flight record: %w", r.opts.Rank, err)
	}
	return nil
}

// The file, whose times are microseconds since "start".
type flightFile struct {
	Version     int           `json:"tandem_flight"`
	Rank        int           `json:"rank"`
	Size        int           `json:"size"`
	Job         string        `json:"job,omitempty"`
	Generation  int           `json:"generation,omitempty"`
	Reason      string        `json:"reason"`
	Error       string        `json:"error,omitempty"`
	Culprit     int           `json:"culprit"`
	Start       time.Time     `json:"start"`
	At          int64         `json:"written_us"`
	Dropped     uint64        `json:"dropped"`
	Comms       []FlightComm  `json:"communicators"`
	Collectives []flightEntry `json:"collectives"`
}

type flightEntry struct {
	Comm    int    `json:"comm"`
	Seq     uint64 `json:"seq"`
	Kind    string `json:"collective"`
	Op      string `json:"op,omitempty"`
	Type    string `json:"type,omitempty"`
	Count   int    `json:"count"`
	Name    string `json:"name,omitempty"`
	Bucket  int    `json:"bucket"`
	Peer    int    `json:"peer"`
	State   string `json:"state"`
	Queued  int64  `json:"queued_us"`
	Started int64  `json:"started_us,omitempty"`
	Ended   int64  `json:"ended_us,omitempty"`
}

// WriteFlight writes f, one collective a line so that people can read it.
func WriteFlight(w io.Writer, f *FlightRecord) error {
	head := flightFile{Version: flightVersion, Rank: f.Rank, Size: f.Size, Job: f.JobID, Generation: f.Generation,
		Reason: f.Reason, Error: f.Error, Culprit: f.Culprit, Start: f.Start, At: f.At.Microseconds(),
		Dropped: f.Dropped, Comms: f.Comms}
	if head.Comms == nil {
		head.Comms = []FlightComm{}
	}
	b, err := json.Marshal(head)
	if err != nil {
		return err
	}
	const empty = "null}" // of Collectives, the last field
	if _, err := fmt.Fprintf(w, "%s[", b[:len(b)-len(empty)]); err != nil {
		return err
	}
	for i, e := range f.Entries {
		b, err := json.Marshal(flightEntry{Comm: e.Comm, Seq: e.Seq, Kind: e.Kind, Op: e.Op, Type: e.Type,
			Count: e.Count, Name: e.Name, Bucket: e.Bucket, Peer: e.Peer, State: e.State.String(),
			Queued: e.Queued.Microseconds(), Started: e.Started.Microseconds(), Ended: e.Ended.Microseconds()})
		if err != nil {
			return err
		}
		sep := ",\n"
		if i == 0 {
			sep = "\n"
		}
		if _, err := fmt.Fprintf(w, "%s%s", sep, b); err != nil {
			return err
		}
	}
	_, err = io.WriteString(w, "]}\n")
	return err
}

// ReadFlight reads one rank's file.
func ReadFlight(path string) (*FlightRecord, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	defer f.Close()
	r, err := ParseFlight(f)
	if err != nil {
		return nil, fmt.Errorf("trace: %s: %w", path, err)
	}
	return r, nil
}

// ParseFlight reads what WriteFlight wrote; of more than 64 MiB, nothing.
func ParseFlight(r io.Reader) (*FlightRecord, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxFlightBytes+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxFlightBytes {
		return nil, fmt.Errorf("%w: more than %d bytes", ErrFlightFormat, maxFlightBytes)
	}
	var f flightFile
	if err := json.Unmarshal(b, &f); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFlightFormat, err)
	}
	if f.Version != flightVersion {
		return nil, fmt.Errorf("%w: version %d, want %d", ErrFlightFormat, f.Version, flightVersion)
	}
	if err := f.check(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFlightFormat, err)
	}
	return f.record()
}

// check bounds the head.
func (f *flightFile) check() error {
	switch {
	case f.Size < 1 || f.Size > maxRanks || f.Rank < 0 || f.Rank >= f.Size:
		return fmt.Errorf("rank %d of %d", f.Rank, f.Size)
	case f.Culprit < -1 || f.Culprit >= f.Size:
		return fmt.Errorf("culprit %d of %d ranks", f.Culprit, f.Size)
	case f.Generation < 0:
		return fmt.Errorf("generation %d", f.Generation)
	case f.At < 0 || f.At > maxFlightTime.Microseconds():
		return fmt.Errorf("written after %d µs", f.At)
	case len(f.Comms) > maxFlightComms:
		return fmt.Errorf("%d communicators, at most %d", len(f.Comms), maxFlightComms)
	case len(f.Collectives) > maxFlightEntries:
		return fmt.Errorf("%d collectives, at most %d", len(f.Collectives), maxFlightEntries)
	}
	for _, c := range f.Comms {
		if len(c.Ranks) > f.Size {
			return fmt.Errorf("communicator %q of %d ranks in a world of %d", c.Name, len(c.Ranks), f.Size)
		}
		for _, r := range c.Ranks {
			if r < 0 || r >= f.Size {
				return fmt.Errorf("communicator %q holds rank %d of %d", c.Name, r, f.Size)
			}
		}
	}
	return nil
}

func (f *flightFile) record() (*FlightRecord, error) {
	us := func(t int64) time.Duration { return time.Duration(t) * time.Microsecond }
	r := &FlightRecord{Rank: f.Rank, Size: f.Size, JobID: f.Job, Generation: f.Generation, Reason: f.Reason,
		Error: f.Error, Culprit: f.Culprit, Start: f.Start, At: us(f.At), Dropped: f.Dropped, Comms: f.Comms,
		Entries: make([]FlightEntry, len(f.Collectives))}
	for i, e := range f.Collectives {
		state := FlightQueued
		for ; state < flightStates && state.String() != e.State; state++ {
		}
		bad := ""
		switch {
		case state == flightStates:
			bad = fmt.Sprintf("state %q", e.State)
		case e.Comm < 0 || e.Comm >= len(f.Comms):
			bad = fmt.Sprintf("communicator %d of %d", e.Comm, len(f.Comms))
		case e.Count < 0 || e.Bucket < -1 || e.Peer < -1:
			bad = fmt.Sprintf("count %d, bucket %d, peer %d", e.Count, e.Bucket, e.Peer)
		}
		for _, t := range []int64{e.Queued, e.Started, e.Ended} {
			if t < 0 || t > maxFlightTime.Microseconds() {
				bad = fmt.Sprintf("a time of %d µs", t)
			}
		}
		if bad != "" {
			return nil, fmt.Errorf("%w: collective %d: %s", ErrFlightFormat, i, bad)
		}
		r.Entries[i] = FlightEntry{FlightCall: FlightCall{Comm: e.Comm, Seq: e.Seq, Kind: e.Kind, Op: e.Op, Type: e.Type,
			Count: e.Count, Name: e.Name, Bucket: e.Bucket, Peer: e.Peer},
			State: state, Queued: us(e.Queued), Started: us(e.Started), Ended: us(e.Ended)}
	}
	return r, nil
}
