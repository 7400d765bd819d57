package plot

import (
	"bytes"
	"encoding/xml"
	"image/png"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/bench"
)

// report is a sweep over two links, in which the default cap is no round number
// and one layout stands for several caps.
func report() *bench.BucketsReport {
	link := func(name string, tokens float64) *bench.BucketsResult {
		row := func(rate float64, settings ...bench.Setting) bench.BucketsRow {
			return bench.BucketsRow{Settings: settings, TokensPerS: rate, TokensP10PerS: 0.9 * rate, TokensP90PerS: 1.05 * rate, NoOverlapTokensPerS: 0.8 * rate}
		}
		def := row(tokens, bench.Setting{CapMB: 0.199, Ends: bench.SmallBoth})
		def.Default = true
		return &bench.BucketsResult{
			Link: name, Preset: "mini", WorldSize: 2, Threads: 1, GradientMB: 3.18,
			Rows: []bench.BucketsRow{
				def,
				row(1.1*tokens, bench.Setting{CapMB: 0.25, Ends: bench.SmallBoth}),
				row(1.2*tokens, bench.Setting{CapMB: 1, Ends: bench.SmallBoth}, bench.Setting{CapMB: 1, Ends: bench.SmallNone}),
				row(0.7*tokens, bench.Setting{CapMB: 5, Ends: bench.SmallBoth}, bench.Setting{CapMB: 100, Ends: bench.SmallBoth}),
			},
		}
	}
	return &bench.BucketsReport{Bench: "buckets", Links: []*bench.BucketsResult{link("1gbit", 20000), link("200mbit", 6000)}}
}

// Without it the PNG could be empty, or a link's line missing.
func TestBucketsPNG(t *testing.T) {
	var b bytes.Buffer
	require.NoError(t, Buckets(&b, "png", report()))
	img, err := png.Decode(&b)
	require.NoError(t, err)
	seen := map[[3]uint32]bool{}
	for y := range img.Bounds().Dy() {
		for x := range img.Bounds().Dx() {
			r, g, b, _ := img.At(x, y).RGBA()
			seen[[3]uint32{r >> 8, g >> 8, b >> 8}] = true
		}
	}
	for _, c := range colours[:2] {
		require.True(t, seen[[3]uint32{uint32(c.R), uint32(c.G), uint32(c.B)}], "no line of colour %v", c)
	}
	require.False(t, seen[[3]uint32{uint32(colours[2].R), uint32(colours[2].G), uint32(colours[2].B)}], "a third line")
}

// Without it axes could lose their units, the legend a link, and the default
// cap its mark.
func TestBucketsSVG(t *testing.T) {
	var b bytes.Buffer
	require.NoError(t, Buckets(&b, "svg", report()))
	words := svgText(t, b.String())
	for _, want := range []string{"bucket cap (MiB", "tokens/s", "1gbit", "200mbit, without overlap", "default cap, 0.199 MiB", "mini, 2 ranks", "100", "10 000"} {
		require.Contains(t, words, want)
	}
}

// svgText checks that s is well-formed and returns its text.
func svgText(t *testing.T, s string) string {
	t.Helper()
	var words strings.Builder
	for d := xml.NewDecoder(strings.NewReader(s)); ; {
		tok, err := d.Token()
		if err == io.EOF {
			return words.String()
		}
		require.NoError(t, err)
		if c, ok := tok.(xml.CharData); ok {
			words.Write(c)
			words.WriteByte('\n')
		}
	}
}

// Without it a cap that was measured under another's name would be missing from
// the line, and neighbouring labels would overprint each other.
func TestTicksAndCaps(t *testing.T) {
	l := report().Links[0]
	require.Equal(t, bench.SmallBoth, drawn(l))
	require.Equal(t, []float64{0.199, 0.25, 1, 5, 100}, caps(l))
	var labels []string
	for _, tick := range capTicks(caps(l)).Ticks(0.1, 200) {
		labels = append(labels, tick.Label)
	}
	require.Equal(t, []string{"0.25", "1", "5", "100"}, labels)
	labels = nil
	for _, tick := range roundTicks(0, 26400) {
		labels = append(labels, tick.Label)
	}
	require.Equal(t, []string{"0", "5 000", "10 000", "15 000", "20 000", "25 000"}, labels)
	require.Equal(t, "1 234 567", grouped(1234567))
	require.Equal(t, "999", grouped(999))
}

// Without it a typing mistake or an empty file would give an empty picture.
func TestBucketsRefuses(t *testing.T) {
	require.ErrorContains(t, Buckets(io.Discard, "gif", report()), `"gif"`)
	require.ErrorContains(t, Buckets(io.Discard, "png", &bench.BucketsReport{}), "without a link")
}
