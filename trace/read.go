package trace

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"time"
)

// Bounds on what is believed of a file.
const (
	maxFileBytes = 4 << 30
	maxMicros    = 1e14 // three years
)

// ErrFormat is in the chain when a file is no timeline of ours.
var ErrFormat = errors.New("not a timeline that tandem wrote")

// Read reads what WriteFile wrote.
func Read(path string) (*Timeline, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	defer f.Close()
	t, err := Parse(bufio.NewReaderSize(f, 1<<20))
	if err != nil {
		return nil, fmt.Errorf("trace: %s: %w", path, err)
	}
	return t, nil
}

// Parse reads what Write wrote. Events of others in the same file are passed over.
func Parse(r io.Reader) (*Timeline, error) {
	p := &parser{d: json.NewDecoder(io.LimitReader(r, maxFileBytes)), ranks: map[int]*Rank{}}
	if err := p.file(); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, fmt.Errorf("%w: %w", ErrFormat, err)
	}
	return p.timeline()
}

type parser struct {
	d     *json.Decoder
	meta  *meta
	ranks map[int]*Rank
}

// file reads the outer object, whose fields may come in any order.
func (p *parser) file() error {
	if err := p.delim('{'); err != nil {
		return err
	}
	for p.d.More() {
		key, err := p.d.Token()
		if err != nil {
			return err
		}
		switch key {
		case "traceEvents":
			err = p.events()
		case "otherData":
			p.meta = &meta{}
			err = p.d.Decode(p.meta)
		default:
			var skip json.RawMessage
			err = p.d.Decode(&skip)
		}
		if err != nil {
			return fmt.Errorf("%v: %w", key, err)
		}
	}
	return p.delim('}')
}

func (p *parser) delim(want json.Delim) error {
	t, err := p.d.Token()
	if err == nil && t != want {
		err = fmt.Errorf("%v where %v was expected", t, want)
	}
	return err
}

func (p *parser) events() error {
	if err := p.delim('['); err != nil {
		return err
	}
	var raw json.RawMessage
	for n := 0; p.d.More(); n++ {
		if err := p.d.Decode(&raw); err != nil {
			return err
		}
		if err := p.event(raw); err != nil {
			return fmt.Errorf("event %d: %w", n, err)
		}
	}
	return p.delim(']')
}

// event keeps slices of our tracks.
func (p *parser) event(raw json.RawMessage) error {
	var kind struct {
		Ph  string `json:"ph"`
		Cat string `json:"cat"`
	}
	if json.Unmarshal(raw, &kind) != nil || kind.Ph != "X" {
		return nil
	}
	track := Compute
	for ; track < tracks && track.String() != kind.Cat; track++ {
	}
	if track == tracks {
		return nil
	}
	e := event{Args: &sliceArgs{}}
	if err := json.Unmarshal(raw, &e); err != nil {
		return err
	}
	s, err := e.slice(track)
	if err != nil {
		return err
	}
	r := p.ranks[e.Pid]
	if r == nil {
		if e.Pid < 0 || e.Pid >= maxRanks {
			return fmt.Errorf("pid %d is no rank", e.Pid)
		}
		r = &Rank{Rank: e.Pid}
		p.ranks[e.Pid] = r
	}
	r.Slices = append(r.Slices, s)
	return nil
}

func (e *event) slice(track Track) (Slice, error) {
	a, ok := e.Args.(*sliceArgs)
	if !ok || a == nil || e.Ts == nil || e.Dur == nil {
		return Slice{}, errors.New("a slice without ts, dur or args")
	}
	s := Slice{Track: track, Name: e.Name, Step: a.Step, Bucket: -1}
	ready := e.Ts
	if a.Bucket != nil {
		s.Bucket, s.Name = *a.Bucket, a.Operation
		if s.Bucket < 0 {
			return s, fmt.Errorf("bucket %d", s.Bucket)
		}
		if a.Ready != nil {
			ready = a.Ready
		}
	}
	if s.Step < 0 {
		return s, fmt.Errorf("step %d", s.Step)
	}
	for _, v := range []float64{*e.Ts, *e.Dur, *ready} {
		if !(math.Abs(v) <= maxMicros) {
			return s, fmt.Errorf("a time of %g µs", v)
		}
	}
	if *e.Dur < 0 {
		return s, fmt.Errorf("a duration of %g µs", *e.Dur)
	}
	s.Start = nanos(*e.Ts)
	s.End = s.Start + nanos(*e.Dur)
	s.Ready = min(nanos(*ready), s.Start)
	return s, nil
}

func nanos(micros float64) time.Duration { return time.Duration(math.Round(micros * 1000)) }

// timeline joins what otherData says with the slices.
func (p *parser) timeline() (*Timeline, error) {
	m := p.meta
	if m == nil || m.Version == 0 {
		return nil, fmt.Errorf("%w: no tandem_timeline in otherData", ErrFormat)
	}
	if m.Version != formatVersion {
		return nil, fmt.Errorf("%w: version %d, want %d", ErrFormat, m.Version, formatVersion)
	}
	t := &Timeline{Start: time.Unix(0, m.Start), Buckets: m.Buckets}
	for _, rm := range m.Ranks {
		r := p.ranks[rm.Rank]
		if r == nil {
			r = &Rank{Rank: rm.Rank}
		}
		delete(p.ranks, rm.Rank)
		for _, v := range []float64{rm.ClockOffset, rm.ClockError} {
			if !(math.Abs(v) <= math.MaxInt64/2000) {
				return nil, fmt.Errorf("%w: rank %d: a clock wrong by %g µs", ErrFormat, rm.Rank, v)
			}
		}
		r.Dropped = rm.Dropped
		r.Clock = Clock{Offset: nanos(rm.ClockOffset), Error: nanos(rm.ClockError), Drift: rm.ClockDrift}
		r.sort()
		t.Ranks = append(t.Ranks, *r)
	}
	for k, b := range t.Buckets {
		if b.Bytes < 0 {
			return nil, fmt.Errorf("%w: bucket %d has %d bytes", ErrFormat, k, b.Bytes)
		}
	}
	return t, p.check(t)
}

// check holds slices against the ranks and buckets that the file declares.
func (p *parser) check(t *Timeline) error {
	for rank := range p.ranks {
		return fmt.Errorf("%w: slices of rank %d, which otherData doesn't list", ErrFormat, rank)
	}
	seen := map[int]bool{}
	for _, r := range t.Ranks {
		if r.Rank < 0 || seen[r.Rank] {
			return fmt.Errorf("%w: rank %d is negative or listed twice", ErrFormat, r.Rank)
		}
		seen[r.Rank] = true
		for _, s := range r.Slices {
			if s.Bucket >= len(t.Buckets) {
				return fmt.Errorf("%w: bucket %d of %d", ErrFormat, s.Bucket, len(t.Buckets))
			}
		}
	}
	return nil
}
