package trace

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func even(n, kib int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = kib
	}
	return out
}

// cases are machines of which each calls for another change.
func cases() map[string]struct {
	link
	want string // in the advice
} {
	base := link{ranks: 2, steps: 6, sizes: append(even(7, 1000), 600), latency: msec / 10, rate: 500, backward: 40 * msec}
	with := func(f func(*link)) link {
		l := base
		f(&l)
		return l
	}
	type c = struct {
		link
		want string
	}
	return map[string]c{
		"hidden": {with(func(l *link) { l.rate, l.latency = 10000, msec/100 }), "nothing about buckets"},
		"last":   {with(func(l *link) { l.sizes = append(even(7, 1000), 3000) }), "a smaller last bucket"},
		"floor": {with(func(l *link) {
			l.sizes, l.latency, l.backward = append(even(7, 1000), 20), 3*msec, 45*msec
		}), "mostly costs what any operation does"},
		"latency": {with(func(l *link) {
			l.sizes, l.latency, l.rate = append(even(20, 100), 200), 3*msec, 500
		}), "larger buckets"},
		"link":      {with(func(l *link) { l.rate = 100 }), "the link is the bound"},
		"straggler": {with(func(l *link) { l.late = 8 * msec }), "rank 1: it ends its backward pass 8.00 ms after"},
		"held": {with(func(l *link) { l.held, l.sizes, l.rate = true, append(even(15, 1000), 100), 2000 }),
			"--clip 0"},
		"between":    {with(func(l *link) { l.between = 20 * msec }), "pass between steps"},
		"one bucket": {with(func(l *link) { l.sizes = []int{8000} }), "more buckets"},
		"one rank":   {with(func(l *link) { l.ranks = 1 }), "this is one rank"},
		"backlog":    {with(func(l *link) { l.sizes, l.backward, l.rate = []int{1000, 2500, 2500, 9000, 3000, 2000}, 46*msec, 600 }), "smaller buckets"},
	}
}

// Without it the words could stop saying what is the matter.
func TestAdvice(t *testing.T) {
	for name, c := range cases() {
		t.Run(name, func(t *testing.T) {
			s, err := Analyze(c.timeline(t))
			require.NoError(t, err)
			require.Contains(t, strings.Join(s.Advice(), "\n"), c.want, s.String())
		})
	}
}

// Without it the whole text could change unnoticed.
func TestGoldenExplanations(t *testing.T) {
	for _, name := range []string{"last", "straggler", "held"} {
		text, err := Explain(cases()[name].timeline(t))
		require.NoError(t, err)
		golden(t, name+".txt", []byte(text))
	}
}

// Without it the line through the buckets would not be the machine's.
func TestFitFindsTheMachine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := link{ranks: 1, steps: 2, backward: 50 * msec, sizes: rapid.SliceOfN(rapid.IntRange(10, 2000), 3, 10).Draw(t, "sizes")}
		l.sizes = append(l.sizes, 10, 2000)
		l.latency = time.Duration(rapid.IntRange(10, 5000).Draw(t, "latency")) * time.Microsecond
		l.rate = float64(rapid.IntRange(50, 5000).Draw(t, "rate"))
		s, err := Analyze(l.timeline(t))
		require.NoError(t, err)
		require.InEpsilon(t, float64(l.latency), float64(s.Latency), 0.02)
		require.InEpsilon(t, l.rate*1024*1000, s.Rate, 0.02)
	})
}

// Without it the parts would not add up to the step, or time be counted twice:
// the sweep is held against looking at every nanosecond.
func TestSweepEqualsLookingAtEveryMoment(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tl := anyTimeline().Draw(t, "timeline")
		for _, v := range views(tl) {
			var want [tracks]time.Duration
			var rest time.Duration
			for at := v.begin; at < v.end; at++ {
				k := Track(0)
				for ; k < tracks && !covers(v.slices[k], at); k++ {
				}
				if k == tracks {
					rest++
				} else {
					want[k]++
				}
			}
			require.Equal(t, want[Comm], v.exposed)
			require.Equal(t, want[Update], v.exposedUpdate)
			require.Equal(t, rest, v.rest)
		}
	})
}

func covers(s []Slice, at time.Duration) bool {
	for _, x := range s {
		if x.Start <= at && at < x.End {
			return true
		}
	}
	return false
}

// Without it the numbers could be those of another quantity: here they are
// worked out by hand. Backward is 30 ms on rank 0 and 32 ms on rank 1; buckets
// take 2.1, 2.1 and 1.1 ms, the last one after everything.
func TestSummaryByHand(t *testing.T) {
	l := small()
	l.steps = 5
	s, err := Analyze(l.timeline(t))
	require.NoError(t, err)
	require.Equal(t, 4, s.Steps)
	require.True(t, s.Warm)
	require.Equal(t, 10*msec, s.Forward)
	require.Equal(t, 31*msec, s.Backward)
	require.InDelta(t, float64(1100*time.Microsecond+msec), float64(s.ExposedComm), 1e3, "1.1 ms, and 2 ms more on rank 0")
	require.InDelta(t, float64(msec), float64(s.ExposedWait), 1e3)
	require.InDelta(t, float64(5300*time.Microsecond), float64(s.Transfer), 1e4)
	require.Equal(t, 1, s.Straggler)
	require.Equal(t, 2*msec, s.Lag)
	require.False(t, s.Held)
	require.Equal(t, msec/2, s.ExposedUpdate)
	require.InDelta(t, float64(s.Step), float64(10*msec+32*msec+1100*time.Microsecond+msec/2+l.between*3/4), 1e3)
	_, err = Analyze(&Timeline{Ranks: make([]Rank, 2)})
	require.ErrorIs(t, err, ErrEmpty)
}

// Without it the picture could change unnoticed, or not open.
func TestGoldenPicture(t *testing.T) {
	tl := small().timeline(t)
	var b bytes.Buffer
	require.NoError(t, SVG(&b, tl, 2))
	wellFormed(t, b.Bytes())
	golden(t, "small.svg", b.Bytes())
	require.ErrorContains(t, SVG(&b, tl, 9), "steps 1 to 2")
	many := small()
	many.ranks = 7
	b.Reset()
	require.NoError(t, SVG(&b, many.timeline(t), 0))
	require.Contains(t, b.String(), "4 of the ranks are shown")
	require.ErrorIs(t, SVG(&b, &Timeline{}, 0), ErrEmpty)
}
