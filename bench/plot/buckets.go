// Package plot draws what package bench has measured.
package plot

import (
	"errors"
	"fmt"
	"image/color"
	"io"
	"math"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/tandem-go/tandem/bench"
)

// Formats are the picture formats that Buckets writes.
func Formats() []string { return []string{"png", "svg"} }

// Okabe and Ito's colours, which colour-blind readers can tell apart.
var colours = []color.NRGBA{
	{0, 114, 178, 255}, {213, 94, 0, 255}, {0, 158, 115, 255}, {204, 121, 167, 255}, {86, 180, 233, 255}, {230, 159, 0, 255},
}

var grey = color.NRGBA{110, 110, 110, 255}

// Buckets draws tokens/s over the bucket cap: for each link a line with its
// p10–p90 range, a dashed one without overlap, and a ring around the fastest
// cap; the default cap is marked. Of several treatments of the first and last
// bucket it shows the one with the most caps, the library's own where there is
// a choice. Format is one of Formats.
func Buckets(w io.Writer, format string, r *bench.BucketsReport) error {
	if !slices.Contains(Formats(), format) {
		return fmt.Errorf("plot: format %q: want one of %v", format, Formats())
	}
	if len(r.Links) == 0 {
		return errors.New("plot: a report without a link")
	}
	p := frame(r)
	top := 0.0
	for i, l := range r.Links {
		t, err := addLink(p, l, colours[i%len(colours)])
		if err != nil {
			return fmt.Errorf("plot: %s: %w", l.Link, err)
		}
		top = max(top, t)
	}
	// The legend has its place above all lines.
	p.Y.Min, p.Y.Max = 0, top*(1.1+0.1*float64(len(r.Links)))
	if err := addDefault(p, r.Links[0]); err != nil {
		return fmt.Errorf("plot: %w", err)
	}
	img, err := p.WriterTo(8*vg.Inch, 5*vg.Inch, format)
	if err != nil {
		return fmt.Errorf("plot: %w", err)
	}
	_, err = img.WriteTo(w)
	return err
}

// frame is title, axes and legend.
func frame(r *bench.BucketsReport) *plot.Plot {
	p, l := plot.New(), r.Links[0]
	p.Title.Text = fmt.Sprintf("%s, %d ranks × %d threads: throughput over bucket cap", l.Preset, l.WorldSize, l.Threads)
	p.Title.Padding = 3 * vg.Millimeter
	p.X.Label.Text = fmt.Sprintf("bucket cap (MiB, logarithmic; the gradient is %.3g MiB)", l.GradientMB)
	p.Y.Label.Text = "throughput, all ranks (tokens/s)"
	p.X.Padding, p.Y.Padding = vg.Millimeter, vg.Millimeter
	p.X.Scale = plot.LogScale{}
	p.X.Tick.Marker = capTicks(caps(l))
	p.Y.Tick.Marker = plot.TickerFunc(roundTicks)
	p.BackgroundColor = color.White
	p.Legend.Top, p.Legend.Padding = true, vg.Millimeter
	p.Legend.XOffs, p.Legend.YOffs = -2*vg.Millimeter, -vg.Millimeter
	for _, f := range []*font.Font{&p.Title.TextStyle.Font, &p.X.Label.TextStyle.Font, &p.Y.Label.TextStyle.Font,
		&p.X.Tick.Label.Font, &p.Y.Tick.Label.Font, &p.Legend.TextStyle.Font} {
		f.Variant = "Sans"
	}
	p.Title.TextStyle.Font.Size = vg.Points(13)
	grid := plotter.NewGrid()
	grid.Vertical.Color = nil
	grid.Horizontal.Color = color.NRGBA{225, 225, 225, 255}
	p.Add(grid)
	return p
}

// roundTicks labels multiples of a round step, at most seven of them, with
// digits grouped.
func roundTicks(low, high float64) (ticks []plot.Tick) {
	if !(high > low) {
		return nil
	}
	step := math.Pow(10, math.Floor(math.Log10(high-low))-1)
	for i := 0; (high-low)/step > 7; i++ {
		step *= [...]float64{2, 2.5, 2}[i%3]
	}
	for k := math.Ceil(low / step); k*step <= high; k++ {
		ticks = append(ticks, plot.Tick{Value: k * step, Label: grouped(k * step)})
	}
	return ticks
}

func grouped(x float64) string {
	s := strconv.FormatFloat(x, 'f', 0, 64)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + " " + s[i:]
	}
	return s
}

// caps are those that were asked for: the settings of the ends that are drawn.
func caps(l *bench.BucketsResult) (mb []float64) {
	ends := drawn(l)
	for _, row := range l.Rows {
		for _, s := range row.Settings {
			if s.Ends == ends {
				mb = append(mb, s.CapMB)
			}
		}
	}
	slices.Sort(mb)
	return slices.Compact(mb)
}

// drawn are the ends with the most settings, the library's own where there is
// a choice: with them the default is on the line.
func drawn(l *bench.BucketsResult) bench.Ends {
	count := map[bench.Ends]int{}
	for _, row := range l.Rows {
		for _, s := range row.Settings {
			count[s.Ends]++
		}
	}
	best := bench.SmallBoth
	for _, e := range bench.AllEnds() {
		if count[e] > count[best] {
			best = e
		}
	}
	return best
}

// capTicks labels the caps themselves, except where they are too close to the
// next: the default may be, and the legend has its value.
type capTicks []float64

func (c capTicks) Ticks(low, high float64) (ticks []plot.Tick) {
	for i, mb := range c {
		if i+1 < len(c) && c[i+1] < 1.35*mb {
			continue
		}
		if mb >= low && mb <= high {
			ticks = append(ticks, plot.Tick{Value: mb, Label: strconv.FormatFloat(mb, 'g', 3, 64)})
		}
	}
	return ticks
}

// addLink draws one link and returns the highest value.
func addLink(p *plot.Plot, l *bench.BucketsResult, c color.NRGBA) (top float64, err error) {
	ends := drawn(l)
	var line, late, low, high plotter.XYs
	for _, mb := range caps(l) {
		row := l.At(bench.Setting{CapMB: mb, Ends: ends})
		line = append(line, plotter.XY{X: mb, Y: row.TokensPerS})
		late = append(late, plotter.XY{X: mb, Y: row.NoOverlapTokensPerS})
		low = append(low, plotter.XY{X: mb, Y: row.TokensP10PerS})
		high = append(high, plotter.XY{X: mb, Y: row.TokensP90PerS})
		top = max(top, row.TokensP90PerS, row.NoOverlapTokensPerS)
	}
	slices.Reverse(low)
	band, err := plotter.NewPolygon(append(high, low...))
	if err != nil {
		return 0, err
	}
	band.Color, band.LineStyle.Width = color.NRGBA{c.R, c.G, c.B, 45}, 0
	with, dots, err := plotter.NewLinePoints(line)
	if err != nil {
		return 0, err
	}
	with.Color, with.Width = c, vg.Points(1.8)
	dots.Color, dots.Shape, dots.Radius = c, draw.CircleGlyph{}, vg.Points(2.5)
	without, err := plotter.NewLine(late)
	if err != nil {
		return 0, err
	}
	without.Color, without.Width, without.Dashes = c, vg.Points(1.2), []vg.Length{vg.Points(5), vg.Points(3)}
	p.Add(band, without, with, dots)
	p.Legend.Add(l.Link+" (band: p10 to p90)", with, dots)
	p.Legend.Add(l.Link+", without overlap", without)
	return top, addBest(p, line, c)
}

// addBest rings the highest point of a line.
func addBest(p *plot.Plot, line plotter.XYs, c color.NRGBA) error {
	best := slices.MaxFunc(line, func(a, b plotter.XY) int { return int(a.Y - b.Y) })
	ring, err := plotter.NewScatter(plotter.XYs{best})
	if err != nil {
		return err
	}
	ring.Color, ring.Shape, ring.Radius = c, draw.RingGlyph{}, vg.Points(6)
	p.Add(ring)
	return nil
}

// addDefault marks the library's default cap.
func addDefault(p *plot.Plot, l *bench.BucketsResult) error {
	for _, row := range l.Rows {
		if !row.Default {
			continue
		}
		x := row.Settings[0].CapMB
		mark, err := plotter.NewLine(plotter.XYs{{X: x, Y: p.Y.Min}, {X: x, Y: p.Y.Max}})
		if err != nil {
			return err
		}
		mark.Color, mark.Dashes = grey, []vg.Length{vg.Points(2), vg.Points(2)}
		p.Add(mark)
		p.Legend.Add(fmt.Sprintf("default cap, %.3g MiB", x), mark)
	}
	return nil
}
