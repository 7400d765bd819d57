package bench

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"pgregory.net/rapid"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/comm/inmem"
	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/dtype"
)

// sweep runs Buckets on n ranks of this process and returns rank 0's result.
func sweep(tb testing.TB, n int, c BucketsConfig) *BucketsResult {
	tb.Helper()
	dev, err := cpu.New(&cpu.Options{Threads: 1})
	require.NoError(tb, err)
	defer dev.Close()
	world, err := inmem.New(dev, n, nil)
	require.NoError(tb, err)
	results := make([]*BucketsResult, n)
	g, ctx := errgroup.WithContext(context.Background())
	for rank := range n {
		g.Go(func() (err error) {
			group := &tandem.Group{Rank: rank, WorldSize: n, Threads: 1, Device: dev, Comm: world[rank]}
			results[rank], err = Buckets(ctx, group, c)
			return err
		})
	}
	require.NoError(tb, g.Wait())
	for _, w := range world {
		require.NoError(tb, w.Close())
	}
	return results[0]
}

// BenchmarkBuckets is the sweep of train bench buckets over a few caps, with
// ranks that are goroutines and exchange gradients by copying: tokens/s of each.
// The time per operation is that of a whole sweep.
func BenchmarkBuckets(b *testing.B) {
	caps := []float64{0.25, 1, 4}
	rates := map[Setting][]float64{}
	c := BucketsConfig{Preset: "mini", CapMB: caps, Ends: []Ends{SmallBoth}, Rounds: 1, Steps: 8, Warmup: 1}
	for b.Loop() {
		r := sweep(b, 2, c)
		for _, mb := range caps {
			s := Setting{CapMB: mb, Ends: SmallBoth}
			rates[s] = append(rates[s], r.At(s).TokensPerS)
		}
	}
	for s, all := range rates {
		b.ReportMetric(quantile(all, 0.5), fmt.Sprintf("tokens/s:%gMiB", s.CapMB))
	}
}

// Without it a sweep could skip a setting, count its steps wrong, or report
// rates that don't belong to its times.
func TestBuckets(t *testing.T) {
	var progress []BucketsProgress
	r := sweep(t, 2, BucketsConfig{
		Preset: "mini", CapMB: []float64{100, 1, 50}, Ends: AllEnds(), Rounds: 2, Steps: 3, Warmup: 1,
		Progress: func(p BucketsProgress) { progress = append(progress, p) },
	})
	require.Equal(t, 4, r.Steps, "3 steps are rounded up to 2 a round")
	require.Equal(t, 2*8*64, r.TokensPerStep)
	require.True(t, r.Rows[0].Default)
	for _, mb := range []float64{1, 50, 100} {
		for _, e := range AllEnds() {
			require.NotNil(t, r.At(Setting{CapMB: mb, Ends: e}), "%v %v", mb, e)
		}
	}
	require.Nil(t, r.At(Setting{CapMB: 2, Ends: SmallBoth}))
	none := Setting{CapMB: 100, Ends: SmallNone}
	require.Equal(t, 1, r.At(none).Buckets, "a cap above the model's size and no small ends are one bucket")
	require.Same(t, r.At(none), r.At(Setting{CapMB: 50, Ends: SmallNone}), "the same buckets are measured once")
	for _, row := range r.Rows {
		require.InEpsilon(t, float64(r.TokensPerStep), row.TokensPerS*row.StepMS/1000, 1e-9)
		require.LessOrEqual(t, row.TokensP10PerS, row.TokensPerS)
		require.GreaterOrEqual(t, row.TokensP90PerS, row.TokensPerS)
		require.Positive(t, row.CommMS)
		require.LessOrEqual(t, row.TokensPerS, r.Rows[r.Best].TokensPerS)
	}
	last := progress[len(progress)-1]
	require.Equal(t, last.Total, last.Done)
	require.Equal(t, len(r.Rows)*3*2*(1+2), last.Total)
	require.Zero(t, last.Left)
}

// Without it a typing mistake would surface on every rank after they have met.
func TestBucketsRefuses(t *testing.T) {
	for name, c := range map[string]BucketsConfig{
		"preset": {Preset: "huge"},
		"cap":    {Preset: "mini", CapMB: []float64{0}},
		"ends":   {Preset: "mini", Ends: []Ends{"middle"}},
		"steps":  {Preset: "mini", Steps: -1},
	} {
		require.ErrorContains(t, c.Validate(), name)
	}
	c := BucketsConfig{Preset: "mini", CapMB: []float64{4, 1}}
	require.NoError(t, c.Validate())
	require.Equal(t, []float64{1, 4}, c.CapMB)
}

// Without it "small ends" could mean another thing than the layouts that are
// measured, and the options that the table recommends yet another: the ends must be small where they are said to be, and only there.
func TestSettingCaps(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(4, 40).Draw(t, "parameters")
		var params []bucket.Param
		var order []int
		for i := range n {
			params = append(params, bucket.Param{Name: strconv.Itoa(i), Shape: []int{1024 * rapid.IntRange(1, 128).Draw(t, "KiB/4")}, Type: dtype.Float32})
			order = append(order, i)
		}
		const tensor = 4 * 1024 * 128 // no tensor is cut, so buckets exceed caps by less than the largest
		mb := float64(rapid.IntRange(1, 20).Draw(t, "cap"))
		layout := func(e Ends) *bucket.Layout {
			caps, err := Setting{CapMB: mb, Ends: e}.caps(params, order)
			require.NoError(t, err)
			l, err := bucket.Assign(params, order, caps)
			require.NoError(t, err)
			flags := Setting{CapMB: mb, Ends: e}.flags(caps)
			again, err := bucket.Assign(params, order, capsOf(t, flags))
			require.NoError(t, err)
			require.Equal(t, l.Hash(), again.Hash(), flags)
			return l
		}
		def, err := bucket.Assign(params, order, bucket.Caps{Cap: []int{int(mb) << 20}})
		require.NoError(t, err)
		require.Equal(t, def.Hash(), layout(SmallBoth).Hash(), "both is what the library does by itself")
		for _, e := range []Ends{SmallFirst, SmallBoth} {
			require.Less(t, layout(e).Buckets[0].Bytes, 1<<20+tensor, e)
		}
		last := func(l *bucket.Layout) int { return l.Buckets[len(l.Buckets)-1].Bytes }
		for _, e := range []Ends{SmallLast, SmallBoth} {
			require.Less(t, last(layout(e)), 1<<20+tensor, e)
		}
		even := layout(SmallNone).Buckets
		for _, b := range even[:len(even)-1] {
			require.GreaterOrEqual(t, b.Bytes, int(mb)<<20, "without small ends only the last is below the cap")
		}
		if len(even) > 1 {
			require.Equal(t, even[0].Bytes, layout(SmallLast).Buckets[0].Bytes, "last leaves the first alone")
		}
	})
}

// capsOf reads options as the program does.
func capsOf(t require.TestingT, flags string) (c bucket.Caps) {
	words := strings.Fields(flags)
	for i := 0; i < len(words); i += 2 {
		x, err := strconv.ParseFloat(words[i+1], 64)
		require.NoError(t, err)
		bytes, err := bucket.MiB([]float64{x})
		require.NoError(t, err)
		switch words[i] {
		case "--bucket-cap-mb":
			c.Cap = bytes
		case "--first-bucket-mb":
			c.First = bytes[0]
		case "--last-bucket-mb":
			c.Last = bytes[0]
		default:
			require.Fail(t, "unknown option", words[i])
		}
	}
	return c
}

// result is a sweep with known numbers: the second row is a tenth faster.
func result() *BucketsResult {
	row := func(ms, spread float64, s ...Setting) BucketsRow {
		return BucketsRow{Settings: s, Buckets: 3, StepMS: ms, TokensPerS: 1e6 / ms, TokensP10PerS: 1e6 / (ms + spread), TokensP90PerS: 1e6 / (ms - spread),
			NoOverlapTokensPerS: 1e6 / 125}
	}
	r := &BucketsResult{Link: "1gbit", Preset: "mini", Rows: []BucketsRow{
		row(110, 2, Setting{0.2, SmallBoth}), row(100, 2, Setting{2, SmallBoth}, Setting{5, SmallBoth}, Setting{2, SmallNone}),
	}}
	r.Rows[0].Default, r.Rows[1].Flags = true, "--bucket-cap-mb 2"
	return r
}

// Without it the sweep could recommend what it can't tell from chance, or quote
// a gain over the wrong row.
func TestJudge(t *testing.T) {
	r := result()
	r.judge()
	require.Equal(t, 1, r.Best)
	require.InDelta(t, 0.1, r.GainOverDefault, 1e-9)
	require.InDelta(t, 0.25, r.GainOverNoOverlap, 1e-9)
	require.True(t, r.Clear)
	require.Equal(t, "best: cap 2 MiB, small ends both, +10.0 % over the default, +25.0 % over the fastest without overlap\nuse it: train --bucket-cap-mb 2", r.verdict())

	r = result()
	r.Rows[1].TokensP10PerS = 1e6 / 120
	r.judge()
	require.False(t, r.Clear)
	require.Contains(t, r.verdict(), "within the spread: keep the default")

	r = result()
	r.Rows = r.Rows[:1]
	r.judge()
	require.Zero(t, r.GainOverDefault)
	require.Contains(t, r.verdict(), "best: the default caps")
}

// Without it the table could lose a mark, and the CSV a setting or a column.
func TestBucketsOutput(t *testing.T) {
	r := result()
	r.judge()
	var b bytes.Buffer
	require.NoError(t, r.WriteTable(&b))
	require.Regexp(t, `(?m)^ +\* +0\.2 +both `, b.String())
	require.Regexp(t, `(?m)^ +> +2 … 5 +both/none .*\+10\.0 % *$`, b.String())

	require.NotContains(t, b.String(), "unsteady")
	r.Rows[0].NoCommMS, r.Rows[1].NoCommMS = 80, 110
	require.Contains(t, r.unsteady(), "80.00 … 110.00 ms")

	report := &BucketsReport{Bench: "buckets", Links: []*BucketsResult{r}}
	b.Reset()
	require.NoError(t, report.WriteCSV(&b))
	lines, err := csv.NewReader(&b).ReadAll() // it refuses lines of other lengths
	require.NoError(t, err)
	require.Len(t, lines, 1+4)
	require.Equal(t, []string{"1gbit", "mini", "0", "0", "5", "both", "false", "true"}, lines[3][:8])

	j, err := json.Marshal(report)
	require.NoError(t, err)
	back := &BucketsReport{}
	require.NoError(t, json.Unmarshal(j, back))
	require.Equal(t, report, back)
}
