package engine

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"
)

// Without it a profile could leave steps without a time, or print shares that
// don't add up to the whole.
func TestProfileTimesEveryStep(t *testing.T) {
	d := newDevice(t)
	p := newProblem(tensor.Float32)
	graphs["shared gradient"](p)
	require.ErrorContains(t, compile(t, d, p, nil).TakeTimes(), "Options.Profile")

	q := newProblem(tensor.Float32)
	graphs["shared gradient"](q)
	r := compile(t, d, q, &Options{Profile: true})
	require.ErrorContains(t, r.TakeTimes(), "time of step 0")
	for range 3 {
		r.run()
		require.NoError(t, r.TakeTimes())
	}
	peak, err := MeasurePeak(t.Context(), d)
	require.NoError(t, err)
	require.Positive(t, peak.GFLOPS)
	require.Positive(t, peak.GBs)
	r.SetPeak(peak)
	text := r.Explain()
	lines := strings.Split(strings.TrimSpace(text), "\n")
	for _, l := range lines[1 : 1+r.Steps()] {
		require.Regexp(t, `µs \d+\.\d%, \S+ GFLOP/s \S+ GB/s roof \d+%`, l)
	}
	require.Regexp(t, `^shortest times of 3 runs; peaks`, lines[1+r.Steps()])
	require.Regexp(t, `× all .* 100\.0%`, lines[len(lines)-1])
}

// Without it the roof of a kernel could be that of the other resource.
func TestPeakTakesTheSlowerResource(t *testing.T) {
	k := Peak{GFLOPS: 100, GBs: 10}
	require.EqualValues(t, 10, k.time(1000, 50))
	require.EqualValues(t, 20, k.time(1000, 200))
}
