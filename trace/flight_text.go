package trace

import (
	"fmt"
	"strings"
	"time"
)

// Text is the finding, then what each rank did last.
func (f *Flight) Text() string {
	var b strings.Builder
	d := f.Disagreement()
	fmt.Fprintf(&b, "%s.\n", d.Sentence)
	if rec := f.verdict(); rec != nil {
		fmt.Fprintf(&b, "The error on rank %d: %s\n", rec.Rank, rec.Error)
	}
	b.WriteByte('\n')
	for r, rec := range f.Records {
		if rec == nil {
			continue
		}
		fmt.Fprintf(&b, "rank %d  %s  %s\n", r, rec.Start.Add(rec.At).UTC().Format(time.RFC3339), rec.latest())
	}
	if m := f.missing(); len(m) > 0 {
		fmt.Fprintf(&b, "no record of %s\n", ranksText(m))
	}
	for _, s := range f.Ignored {
		fmt.Fprintf(&b, "ignored %s\n", s)
	}
	return b.String()
}

// verdict is a record that holds an error, of a rank that isn't to blame if
// there is one.
func (f *Flight) verdict() *FlightRecord {
	var any *FlightRecord
	for _, r := range f.Records {
		if r == nil || r.Error == "" {
			continue
		}
		if r.Culprit != r.Rank {
			return r
		}
		if any == nil {
			any = r
		}
	}
	return any
}

// latest is the rank's newest collective that isn't behind another.
func (r *FlightRecord) latest() string {
	queued := 0
	for i := len(r.Entries) - 1; i >= 0; i-- {
		e := &r.Entries[i]
		if e.State == FlightQueued {
			queued++
			continue
		}
		s := fmt.Sprintf("%s seq %d of %s, %s", e.what(), e.Seq, r.Comms[e.Comm].Name, e.State)
		switch e.State {
		case FlightRunning:
			s += " for " + short(r.At-e.Started)
		case FlightDone:
			s += fmt.Sprintf(" %s before", short(r.At-e.Ended))
		}
		if queued > 0 {
			s += fmt.Sprintf(", %d more queued", queued)
		}
		return s
	}
	if queued > 0 {
		return plural(queued, "collective") + " queued, none started"
	}
	return "no collectives"
}
