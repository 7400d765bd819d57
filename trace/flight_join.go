package trace

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// ErrNoFlight is in the chain when a directory holds no flight record.
var ErrNoFlight = errors.New("no flight-rank<k>.json there: ranks write them on an error and on SIGUSR1")

// flightIdle is how long ranks of a healthy job may seem to wait for one
// another, since their records aren't written at the same moment. After a
// failure every wait counts.
const flightIdle = time.Second

// Flight is the records of one job.
type Flight struct {
	Size    int
	Records []*FlightRecord // by rank, nil where there is none
	// Ignored are files of other runs in the same directory, or unreadable
	// ones, each with the reason.
	Ignored []string
}

// ReadFlights reads all records in dir. Where they are of several runs the
// newest counts.
func ReadFlights(dir string) (*Flight, error) {
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	var all []*FlightRecord
	var ignored []string
	for _, e := range files {
		if rank, ok := flightRank(e); ok {
			r, err := ReadFlight(filepath.Join(dir, e.Name()))
			if err == nil && r.Rank != rank {
				err = fmt.Errorf("it is rank %d's", r.Rank)
			}
			if err != nil {
				ignored = append(ignored, fmt.Sprintf("%s: %v", e.Name(), err))
				continue
			}
			all = append(all, r)
		}
	}
	if len(all) == 0 {
		if len(ignored) > 0 {
			return nil, fmt.Errorf("trace: no readable record in %s: %s", dir, strings.Join(ignored, "; "))
		}
		return nil, fmt.Errorf("trace: %s: %w", dir, ErrNoFlight)
	}
	f := JoinFlights(all)
	f.Ignored = append(ignored, f.Ignored...)
	return f, nil
}

// flightRank is the rank of a file's name.
func flightRank(e fs.DirEntry) (int, bool) {
	s, ok := strings.CutPrefix(e.Name(), "flight-rank")
	s, end := strings.CutSuffix(s, ".json")
	rank, err := strconv.Atoi(s)
	return rank, ok && end && err == nil && rank >= 0 && rank < maxRanks && FlightName(rank) == e.Name()
}

// JoinFlights keeps the records of the run that was written last.
func JoinFlights(all []*FlightRecord) *Flight {
	newest := slices.MaxFunc(all, func(a, b *FlightRecord) int { return a.Start.Add(a.At).Compare(b.Start.Add(b.At)) })
	f := &Flight{Size: newest.Size, Records: make([]*FlightRecord, newest.Size)}
	for _, r := range all {
		if r.Reason == "signal" && newest.Reason == "error" { // what came after it isn't in it
			f.Ignored = append(f.Ignored, FlightName(r.Rank)+": written on a signal, before the failure")
			continue
		}
		if r.JobID != newest.JobID || r.Generation != newest.Generation || r.Size != newest.Size {
			f.Ignored = append(f.Ignored, FlightName(r.Rank)+": of another run")
			continue
		}
		f.Records[r.Rank] = r
	}
	return f
}

// FlightFinding is where the ranks part.
type FlightFinding struct {
	// Sentence says it.
	Sentence string
	// Comm, Seq and Bucket are of the collective, Ranks those at fault, as ranks
	// of the world; Ranks is empty where nobody is.
	Comm   string
	Seq    uint64
	Bucket int
	Ranks  []int
	// Wait is the longest that others have waited, 0 where nobody does.
	Wait time.Duration

	weight int // how much the finding explains, among those of other communicators
}

// Disagreement is the first collective on which the ranks part: the earliest of
// a communicator, and of several communicators the one that explains most and
// has been waited for the longest.
func (f *Flight) Disagreement() FlightFinding {
	var best *FlightFinding
	for _, c := range f.flightComms() {
		d := c.part()
		if d != nil && (best == nil || d.weight > best.weight || d.weight == best.weight && d.Wait > best.Wait) {
			best = d
		}
	}
	missing := f.missing()
	switch {
	case best != nil && (len(missing) == 0 || best.weight >= weightMissing && !f.blamed(missing)):
		return *best
	case len(missing) > 0:
		return f.absent(missing, best)
	}
	return FlightFinding{Bucket: -1, Sentence: fmt.Sprintf("the %s agree on every collective that they recorded", plural(f.Size, "rank"))}
}

func (f *Flight) missing() (ranks []int) {
	for r, rec := range f.Records {
		if rec == nil {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// blamed says whether the survivors' error names one of the ranks.
func (f *Flight) blamed(ranks []int) bool {
	v := f.verdict()
	return v != nil && slices.Contains(ranks, v.Culprit)
}

// absent blames ranks that left no record; waiting is what the others are in.
func (f *Flight) absent(missing []int, waiting *FlightFinding) FlightFinding {
	d := FlightFinding{Bucket: -1}
	if waiting != nil {
		d = *waiting
	}
	d.Ranks = missing
	d.Sentence = fmt.Sprintf("%s left no record (killed, frozen, or unable to write)", ranksText(missing))
	if waiting != nil {
		d.Sentence += "; " + waiting.Sentence
	} else {
		d.Sentence += "; the others agree on every collective that they recorded"
	}
	return d
}

// flightComm is one communicator's collectives on all its ranks.
type flightComm struct {
	name  string
	ranks []int // that have a record
	by    []map[uint64]*FlightEntry
	last  []uint64 // one past the newest, per rank
	first uint64   // where all records have begun
	recs  []*FlightRecord
	idle  time.Duration // waits below it are nothing
}

// flightComms gathers what records call by the same name.
func (f *Flight) flightComms() []*flightComm {
	var all []*flightComm
	at := map[string]*flightComm{}
	for _, rec := range f.Records {
		if rec == nil {
			continue
		}
		own := make([]*flightComm, len(rec.Comms))
		for i, c := range rec.Comms {
			k := at[c.Name]
			if k == nil {
				k = &flightComm{name: c.Name}
				at[c.Name], all = k, append(all, k)
			}
			k.ranks, k.recs = append(k.ranks, rec.Rank), append(k.recs, rec)
			k.by, k.last = append(k.by, map[uint64]*FlightEntry{}), append(k.last, 0)
			own[i] = k
		}
		for i := range rec.Entries {
			if e := &rec.Entries[i]; e.Peer < 0 {
				k := own[e.Comm]
				me := len(k.by) - 1
				k.by[me][e.Seq], k.last[me] = e, max(k.last[me], e.Seq+1)
			}
		}
	}
	for _, k := range all {
		k.begin()
		if f.verdict() == nil {
			k.idle = flightIdle
		}
	}
	return all
}

// begin finds the first collective that no record has dropped.
func (k *flightComm) begin() {
	for i, m := range k.by {
		if k.recs[i].Dropped == 0 {
			continue
		}
		first := k.last[i]
		for s := range m {
			first = min(first, s)
		}
		k.first = max(k.first, first)
	}
}

// Weights of findings.
const (
	weightWaiting  = iota // all are in it
	weightQueued          // some have it behind others
	weightMissing         // some never launched it
	weightMismatch        // ranks called different things
)

// part finds the first collective on which ranks part; nil if there is none.
func (k *flightComm) part() *FlightFinding {
	seqs := map[uint64]bool{}
	for _, m := range k.by {
		for s := range m {
			seqs[s] = s >= k.first
		}
	}
	order := make([]uint64, 0, len(seqs))
	for s, in := range seqs {
		if in {
			order = append(order, s)
		}
	}
	slices.Sort(order)
	for _, s := range order {
		if d := k.at(s); d != nil {
			return d
		}
	}
	return nil
}

// at looks at one collective on all ranks.
func (k *flightComm) at(seq uint64) *FlightFinding {
	var never, queued, waiting []int
	var any *FlightEntry // of a rank that has come farthest
	anyRank, finished := 0, false
	d := &FlightFinding{Comm: k.name, Seq: seq}
	for i, r := range k.ranks {
		e := k.by[i][seq]
		switch {
		case e == nil:
			never = append(never, r)
			continue
		case e.State == FlightQueued || e.State == FlightFailed && e.Started == 0:
			queued = append(queued, r)
		case e.State == FlightDone:
			finished = true
		default: // running, or failed after a wait
			waiting = append(waiting, r)
			end := k.recs[i].At
			if e.State == FlightFailed {
				end = e.Ended
			}
			d.Wait = max(d.Wait, end-e.Started)
		}
		if any == nil {
			any, anyRank = e, r
		} else if !any.same(e) {
			d.weight, d.Ranks, d.Bucket = weightMismatch, []int{r}, e.Bucket
			d.Sentence = fmt.Sprintf("ranks disagree on collective %d of %s: rank %d called %s, rank %d called %s",
				seq, k.name, anyRank, any.what(), r, e.what())
			return d
		}
	}
	d.Bucket = any.Bucket
	what := fmt.Sprintf("%s (seq %d%s)", any.title(), seq, k.in())
	if len(waiting) == 0 || d.Wait < k.idle {
		return nil
	}
	d.judge(never, queued, waiting, what, finished)
	return d
}

// judge says who keeps the others waiting.
func (d *FlightFinding) judge(never, queued, waiting []int, what string, finished bool) {
	have := hasHave(waiting)
	others := fmt.Sprintf("; %s %s waited %s", numbers(waiting), have, short(d.Wait))
	switch {
	case len(never) > 0:
		d.weight, d.Ranks = weightMissing, never
		d.Sentence = ranksText(never) + " never launched " + what + others
	case len(queued) > 0:
		d.weight, d.Ranks = weightQueued, queued
		d.Sentence = ranksText(queued) + " launched " + what + " but never came to it" + others
	case finished:
		d.Sentence = fmt.Sprintf("%s %s waited %s in %s, which the others have finished", ranksText(waiting), have, short(d.Wait), what)
	default:
		d.Sentence = fmt.Sprintf("%s %s been in %s for %s", ranksText(waiting), have, what, short(d.Wait))
	}
}

// same compares what ranks must agree on.
func (e *FlightEntry) same(o *FlightEntry) bool {
	return e.Kind == o.Kind && e.Op == o.Op && e.Type == o.Type && e.Count == o.Count && e.Bucket == o.Bucket
}

// title is the collective in a word or two: "bucket 5", "allreduce".
func (e *FlightEntry) title() string {
	if e.Bucket < 0 {
		if e.Name != "" {
			return e.Kind + " of the " + e.Name
		}
		return e.Kind
	}
	return fmt.Sprintf("bucket %d", e.Bucket)
}

// what is everything that ranks must agree on.
func (e *FlightEntry) what() string {
	s := e.Kind
	if e.Op != "" {
		s += " " + e.Op
	}
	if e.Type != "" {
		s += fmt.Sprintf(" of %d %s", e.Count, e.Type)
	}
	if e.Bucket >= 0 {
		s += fmt.Sprintf(" (bucket %d)", e.Bucket)
	}
	return s
}

// in names a communicator that isn't the world's.
func (k *flightComm) in() string {
	if k.name == "world" {
		return ""
	}
	return " of " + k.name
}

func ranksText(r []int) string {
	if len(r) == 1 {
		return "rank " + numbers(r)
	}
	return "ranks " + numbers(r)
}

func hasHave(r []int) string {
	if len(r) == 1 {
		return "has"
	}
	return "have"
}

// numbers lists ranks, of many only the first.
func numbers(r []int) string {
	const most = 16
	var s []string
	for _, x := range r[:min(len(r), most)] {
		s = append(s, strconv.Itoa(x))
	}
	if len(r) > most {
		s = append(s, fmt.Sprintf("… (%d in all)", len(r)))
	}
	return strings.Join(s, ", ")
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// short is a duration as people say it.
func short(d time.Duration) string {
	if d >= time.Second {
		return strconv.FormatFloat(d.Round(100*time.Millisecond).Seconds(), 'f', -1, 64) + " s"
	}
	return fmt.Sprintf("%d ms", d.Milliseconds())
}
