package trace

import (
	"fmt"
	"math"
	"strings"
	"time"
)

// Explain says in words where the steps' time went, which bucket was exposed
// and what to change.
func Explain(t *Timeline) (string, error) {
	s, err := Analyze(t)
	if err != nil {
		return "", err
	}
	return s.String(), nil
}

// String is the whole explanation, some lines.
func (s *Summary) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s of %s, %s of %s", count(s.Steps, "step"), count(s.Ranks, "rank"), count(len(s.Buckets), "bucket"), size(float64(s.bytes())))
	if s.Warm {
		b.WriteString("; the first step is left out")
	}
	b.WriteString(".\n\n")
	fmt.Fprintf(&b, "A step takes %s:\n", ms(s.Step))
	line := func(what string, d time.Duration, note string) {
		if d == 0 && note == "" {
			return
		}
		fmt.Fprintf(&b, "  %-22s %10s  %3.0f %%%s\n", what, ms(d), 100*share(d, s.Step), note)
	}
	line("forward", s.Forward, "")
	line("backward", s.Backward, "")
	if s.Comm > 0 {
		note := fmt.Sprintf("  of %s; %.0f %% of it is hidden", ms(s.Comm), 100*(1-share(s.ExposedComm, s.Comm)))
		if s.ExposedWait > s.ExposedComm/10 {
			note += fmt.Sprintf("; in %s other ranks still compute", ms(s.ExposedWait))
		}
		line("exposed communication", s.ExposedComm, note)
	}
	if s.Update > 0 {
		line("exposed update", s.ExposedUpdate, fmt.Sprintf("  of %s", ms(s.Update)))
	}
	line("rest of the step", s.Rest, "")
	line("between steps", s.Between, "")
	s.explainLink(&b)
	s.explainExposed(&b)
	b.WriteString("\nWhat to change:\n")
	for _, a := range s.Advice() {
		fmt.Fprintf(&b, "  - %s\n", a)
	}
	return b.String()
}

// explainLink says how fast communication was.
func (s *Summary) explainLink(b *strings.Builder) {
	if s.Comm == 0 {
		return
	}
	fmt.Fprintf(b, "\nCommunication: %s a step take %s", size(float64(s.bytes())), ms(s.Transfer))
	if wait := s.Comm - s.Transfer; wait > s.Comm/10 {
		fmt.Fprintf(b, " (and %s of waiting for other ranks)", ms(wait))
	}
	switch {
	case math.IsInf(s.Rate, 1):
		fmt.Fprintf(b, "; each bucket takes %s whatever its size", ms(s.Latency))
	case s.Rate > 0 && s.Latency == 0:
		fmt.Fprintf(b, "; a bucket takes its size at %s/s", size(s.Rate))
	case s.Rate > 0:
		fmt.Fprintf(b, "; a bucket takes %s and its size at %s/s", ms(s.Latency), size(s.Rate))
	}
	b.WriteString(".\n")
}

// explainExposed names the buckets that nothing hides, the worst first.
func (s *Summary) explainExposed(b *strings.Builder) {
	k := s.worst()
	if k < 0 {
		return
	}
	w := s.Buckets[k]
	fmt.Fprintf(b, "Most exposed: bucket %d%s, %s", k, s.place(k), size(float64(w.Bytes)))
	if len(w.Params) > 0 {
		fmt.Fprintf(b, " (%s)", paramList(w.Params, 4))
	}
	fmt.Fprintf(b, ": %s of its %s", ms(w.Exposed), ms(w.Comm))
	if w.Queued > w.Comm/4 {
		fmt.Fprintf(b, ", after %s in the queue", ms(w.Queued))
	}
	b.WriteString(".\n")
}

func (s *Summary) place(k int) string {
	switch {
	case len(s.Buckets) > 1 && k == len(s.Buckets)-1:
		return " (the last)"
	case len(s.Buckets) > 1 && k == 0:
		return " (the first)"
	}
	return ""
}

// worst is the bucket with the longest exposure, -1 where all are hidden.
func (s *Summary) worst() int {
	k := -1
	for i, b := range s.Buckets {
		if b.Exposed > 0 && (k < 0 || b.Exposed > s.Buckets[k].Exposed) {
			k = i
		}
	}
	return k
}

func (s *Summary) bytes() (n int) {
	for _, b := range s.Buckets {
		n += b.Bytes
	}
	return n
}

// Shares from which something is worth a word.
const (
	little   = 0.03 // of a step
	much     = 0.10
	mostly   = 0.5
	nearly   = 0.9
	oftenLag = 0.75 // of the steps
	enough   = 4    // buckets
)

// transferExposed is what the exchange itself adds to a step: no rank is still
// computing then.
func (s *Summary) transferExposed() time.Duration { return s.ExposedComm - s.ExposedWait }

// Advice is what to change, the most promising first.
func (s *Summary) Advice() []string {
	var out []string
	add := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	if s.Ranks == 1 {
		add("nothing about communication: this is one rank.")
	} else if s.Comm == 0 {
		add("nothing about communication: none was recorded.")
	} else if share(s.transferExposed(), s.Step) < little {
		add("nothing about buckets: their transfer adds %.1f %% to a step.", 100*share(s.transferExposed(), s.Step))
	} else {
		out = append(out, s.adviseBuckets())
	}
	if lag := s.Lag; s.Straggler >= 0 && s.Late >= oftenLag && share(lag, s.Step) > little && lag > 2*s.ClockError {
		add("rank %d: it ends its backward pass %s after the first rank, in %.0f %% of steps, and all wait for it. Look for what shares its cores, or give it fewer windows.",
			s.Straggler, ms(lag), 100*s.Late)
	} else if share(s.ExposedWait, s.Step) > little {
		add("ranks that run alike: %s of a step are spent waiting for another rank, now this one, now that; look for what disturbs them.", ms(s.ExposedWait))
	}
	if share(s.ExposedUpdate, s.Step) >= much/2 && s.Held {
		add("updates wait for the norm of the whole gradient, exposed %s: without clipping (--clip 0) each bucket is updated while others travel.", ms(s.ExposedUpdate))
	}
	if share(s.Between, s.Step) >= much {
		add("%s pass between steps: evaluations, checkpoints, logging and loading of data are there. Do them less often.", ms(s.Between))
	}
	if len(out) == 0 {
		add("nothing: the step is compute.")
	}
	return out
}

// adviseBuckets is for a step that waits for communication.
func (s *Summary) adviseBuckets() string {
	n := len(s.Buckets)
	if n == 0 {
		return fmt.Sprintf("%s of communication is exposed, none of it about buckets.", ms(s.ExposedComm))
	}
	last := s.Buckets[n-1]
	latency := time.Duration(n) * s.Latency
	// The last one is what is exposed, and not because others were before it.
	alone := share(last.Exposed, s.ExposedComm) > mostly && share(last.Queued, last.Comm) < mostly
	switch {
	case n == 1:
		return fmt.Sprintf("more buckets: with one, communication starts when backward ends. Try a cap of %s (--bucket-cap-mb %s).",
			size(float64(s.bytes())/8), mib(float64(s.bytes())/8))
	case alone && s.floor(last):
		return fmt.Sprintf("nothing about buckets: what is left exposed is the last one, %s, which mostly costs what any operation does.", size(float64(last.Bytes)))
	case alone:
		target := s.lastTarget(last)
		return fmt.Sprintf("a smaller last bucket: its gradients are final only when backward ends, so its %s can't be hidden. Try %s instead of %s (--last-bucket-mb %s).",
			ms(last.Exposed), size(target), size(float64(last.Bytes)), mib(target))
	case s.Rate > 0 && share(latency, s.Transfer) > mostly:
		c := 2 * float64(s.bytes()) / float64(n)
		return fmt.Sprintf("larger buckets: what an operation costs before its first byte, %s for each of %d, is %.0f %% of the transfer. Try a cap of %s (--bucket-cap-mb %s).",
			ms(s.Latency), n, 100*share(latency, s.Transfer), size(c), mib(c))
	case float64(s.Transfer) > nearly*float64(s.Window):
		return fmt.Sprintf("less to send or more to compute: the link is the bound. A step's %s take %s, but only %s of backward are left once the first bucket is ready, so %s can't be hidden whatever the buckets. A larger --batch or --grad-accum, or a faster link, helps.",
			size(float64(s.bytes())), ms(s.Transfer), ms(s.Window), ms(max(0, s.Transfer-s.Window)))
	}
	if n >= 2*enough {
		return fmt.Sprintf("the caps: several of %d buckets queue at the end of backward. \"train bench buckets\" measures which cap is best here.", n)
	}
	half := float64(s.bytes()) / float64(2*n)
	return fmt.Sprintf("smaller buckets: several queue at the end of backward. Try a cap of %s (--bucket-cap-mb %s), so that the link starts earlier.", size(half), mib(half))
}

// floor reports whether a bucket's size hardly matters to its time.
func (s *Summary) floor(b BucketSummary) bool {
	return s.Rate > 0 && float64(b.Bytes)/s.Rate < s.Latency.Seconds()
}

// lastTarget is a size at which bytes cost no more than the operation itself,
// where that is known, but from an eighth to half of what it is: what is cut
// off travels just before and has to be hidden too.
func (s *Summary) lastTarget(b BucketSummary) float64 {
	size := float64(b.Bytes)
	if s.Rate > 0 && s.Latency > 0 {
		return max(size/8, min(size/2, s.Rate*s.Latency.Seconds()))
	}
	return size / 2
}

func share(part, whole time.Duration) float64 {
	if whole <= 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

// ms prints a time with about three digits.
func ms(d time.Duration) string {
	x := float64(d) / float64(time.Millisecond)
	switch {
	case x >= 1000:
		return fmt.Sprintf("%.2f s", x/1000)
	case x >= 100:
		return fmt.Sprintf("%.0f ms", x)
	case x < 0.1 && d > 0:
		return fmt.Sprintf("%.0f µs", 1000*x)
	case x >= 10:
		return fmt.Sprintf("%.1f ms", x)
	}
	return fmt.Sprintf("%.2f ms", x)
}

// size prints a number of bytes with about three digits.
func size(x float64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	i := 0
	for x >= 1000 && i < len(units)-1 {
		x /= 1024
		i++
	}
	if i == 0 || x >= 100 {
		return fmt.Sprintf("%.0f %s", x, units[i])
	}
	return fmt.Sprintf("%.3g %s", x, units[i])
}

// mib prints bytes as a flag's value in MiB.
func mib(x float64) string { return fmt.Sprintf("%.2g", max(0.01, x/(1<<20))) }

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
