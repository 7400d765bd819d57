package trace

import (
	"bufio"
	"fmt"
	"html"
	"io"
	"math"
	"slices"
	"time"
)

// Measures of the picture, in pixels.
const (
	svgWidth  = 1200
	svgLeft   = 150 // names of tracks
	svgRight  = 96  // what is exposed
	svgTop    = 64  // title and subtitle
	svgBar    = 30
	svgGap    = 6
	svgGroup  = 22 // between ranks
	svgBottom = 52 // axis and legend, below the last gap
	svgRanks  = 4  // more don't fit
)

const (
	inkColour      = "#1f2933"
	mutedColour    = "#6b7785"
	gridColour     = "#e4e8ed"
	forwardColour  = "#c9d2dc"
	backwardColour = "#97a6b6"
	exposedColour  = "#d64545"
)

// SVG draws one step of up to four ranks: a row a track, a colour a bucket, and
// in red what is exposed. A step of 0 is the one whose length is the median.
func SVG(w io.Writer, t *Timeline, step int) error {
	all := views(t)
	if len(all) == 0 {
		return ErrEmpty
	}
	if step == 0 {
		step = medianStep(all)
	}
	first, last := all[0].step, all[len(all)-1].step
	all = slices.DeleteFunc(all, func(v *stepView) bool { return v.step != step })
	if len(all) == 0 {
		return fmt.Errorf("trace: step %d is not in the timeline, which holds steps %d to %d", step, first, last)
	}
	d := &drawing{b: bufio.NewWriter(w), t: t, step: step, ranks: len(all), views: all[:min(len(all), svgRanks)]}
	d.draw()
	return d.b.Flush()
}

// medianStep is the step of median length on the first rank, the first step
// aside, which warms up.
func medianStep(all []*stepView) int {
	mine := slices.Clone(all)
	mine = slices.DeleteFunc(mine, func(v *stepView) bool { return v.rank != all[0].rank })
	if len(mine) > 1 {
		mine = mine[1:]
	}
	slices.SortStableFunc(mine, func(a, b *stepView) int { return int((a.end - a.begin) - (b.end - b.begin)) })
	return mine[len(mine)/2].step
}

type drawing struct {
	b        *bufio.Writer
	t        *Timeline
	step     int
	ranks    int // with this step, drawn or not
	views    []*stepView
	from, to time.Duration
}

func (d *drawing) draw() {
	d.from, d.to = d.views[0].begin, d.views[0].end
	var comm, exposed time.Duration
	for _, v := range d.views {
		d.from, d.to = min(d.from, v.begin), max(d.to, v.end)
		comm += v.comm
		exposed += v.exposed
	}
	if d.to <= d.from {
		d.to = d.from + 1
	}
	height := svgTop + len(d.views)*d.groupHeight() + svgBottom
	d.printf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" font-family="Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif">`,
		svgWidth, height, svgWidth, height)
	d.printf(`<rect width="100%%" height="100%%" rx="8" fill="#ffffff"/>`)
	title := fmt.Sprintf("Step %d on %s", d.step, count(d.ranks, "rank"))
	sub := fmt.Sprintf("%s; no communication", ms(d.to-d.from))
	if comm > 0 {
		sub = fmt.Sprintf("%s from the first kernel to the last update; %.0f %% of the communication runs under the backward pass", ms(d.to-d.from), 100*(1-share(exposed, comm)))
	}
	if d.ranks > len(d.views) {
		sub += fmt.Sprintf("; %d of the ranks are shown", len(d.views))
	}
	d.text(svgLeft, 28, 17, inkColour, "start", "600", title)
	d.text(svgLeft, 48, 13, mutedColour, "start", "400", sub)
	bottom := svgTop + len(d.views)*d.groupHeight() - svgGroup
	d.axis(svgTop, bottom)
	for i, v := range d.views {
		d.rank(v, svgTop+i*d.groupHeight())
	}
	d.legend(bottom + 50)
	d.printf("</svg>")
}

func (d *drawing) groupHeight() int { return int(tracks)*(svgBar+svgGap) - svgGap + svgGroup }

// x is where a time lies.
func (d *drawing) x(at time.Duration) float64 {
	return svgLeft + float64(at-d.from)/float64(d.to-d.from)*(svgWidth-svgLeft-svgRight)
}

// axis draws a grid with round numbers of milliseconds below.
func (d *drawing) axis(top, bottom int) {
	tick := niceTick(float64(d.to-d.from) / 1e6 / 8)
	for i := 0; ; i++ {
		at := d.from + time.Duration(float64(i)*tick*1e6)
		if at > d.to || i > 100 {
			return
		}
		x := d.x(at)
		d.printf(`<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="%s"/>`, x, top-4, x, bottom+6, gridColour)
		label := fmt.Sprintf("%g", math.Round(float64(i)*tick*1e6)/1e6)
		if i == 0 {
			label = "0 ms"
		}
		d.text(x, float64(bottom+22), 12, mutedColour, "middle", "400", label)
	}
}

// niceTick is the next of 1, 2 and 5 times a power of ten.
func niceTick(least float64) float64 {
	p := math.Pow(10, math.Floor(math.Log10(least)))
	for _, m := range []float64{1, 2, 5} {
		if m*p >= least {
			return m * p
		}
	}
	return 10 * p
}

// rank draws one rank's tracks from y down.
func (d *drawing) rank(v *stepView, y int) {
	mid := float64(y) + float64(d.groupHeight()-svgGroup)/2
	d.text(16, mid+4, 13, inkColour, "start", "600", fmt.Sprintf("rank %d", v.rank))
	for k := Track(0); k < tracks; k++ {
		top := y + int(k)*(svgBar+svgGap)
		d.text(svgLeft-10, float64(top)+svgBar/2+4, 12, mutedColour, "end", "400", trackLabel(k))
		d.printf(`<rect x="%d" y="%d" width="%d" height="%d" fill="#f6f8fa"/>`, svgLeft, top, svgWidth-svgLeft-svgRight, svgBar)
		for i := range v.slices[k] {
			d.slice(&v.slices[k][i], top)
		}
	}
	d.readiness(v, y)
	d.exposure(v, y)
}

func trackLabel(k Track) string {
	if k == Comm {
		return "comm"
	}
	return k.String()
}

func (d *drawing) slice(s *Slice, top int) {
	x, end := d.x(s.Start), d.x(s.End)
	width := max(end-x, 0.8)
	fill, ink, label := d.bucketColour(s.Bucket), "#ffffff", fmt.Sprint(s.Bucket)
	switch {
	case s.Bucket >= 0:
	case s.Name == Forward:
		fill, ink, label = forwardColour, inkColour, s.Name
	case s.Track == Compute:
		fill, ink, label = backwardColour, inkColour, s.Name
	default:
		fill, ink, label = mutedColour, "#ffffff", s.Name
	}
	about := s.Name
	if s.Bucket >= 0 {
		about = fmt.Sprintf("%s of bucket %d", s.Name, s.Bucket)
		if s.Bucket < len(d.t.Buckets) {
			about += ", " + size(float64(d.t.Buckets[s.Bucket].Bytes))
		}
	}
	border := 0.6
	if width < 3 {
		border = 0 // it would be nothing but border
	}
	d.printf(`<rect x="%.2f" y="%d" width="%.2f" height="%d" fill="%s" stroke="#ffffff" stroke-width="%g"><title>%s, %s</title></rect>`,
		x, top, width, svgBar, fill, border, html.EscapeString(about), ms(s.End-s.Start))
	if width > 8*float64(len([]rune(label)))+4 {
		d.text(x+width/2, float64(top)+svgBar/2+4, 12, ink, "middle", "500", label)
	}
}

// readiness marks on the compute track when each bucket's gradients were final.
func (d *drawing) readiness(v *stepView, y int) {
	for _, s := range v.slices[Comm] {
		if s.Bucket < 0 {
			continue
		}
		x := d.x(s.Ready)
		d.printf(`<path d="M%.1f %d l-4 8 h8 z" fill="%s" stroke="#ffffff" stroke-width="0.6"/>`, x, y+svgBar-8, d.bucketColour(s.Bucket))
	}
}

// exposure frames the time after the passes in which communication runs.
func (d *drawing) exposure(v *stepView, y int) {
	end := v.passes
	for _, s := range v.slices[Comm] {
		end = max(end, s.End)
	}
	x := d.x(v.passes)
	d.printf(`<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="%s" stroke-dasharray="3 3"/>`,
		x, y-2, x, y+d.groupHeight()-svgGroup+2, inkColour)
	if v.exposed <= 0 || end <= v.passes {
		return
	}
	top := y + svgBar + svgGap
	d.printf(`<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="none" stroke="%s" stroke-width="2"/>`,
		x, top-1, max(2, d.x(end)-x), svgBar+2, exposedColour)
	at := float64(svgWidth - svgRight + 10)
	d.text(at, float64(top)+svgBar/2-3, 12, exposedColour, "start", "600", ms(v.exposed))
	d.text(at, float64(top)+svgBar/2+11, 12, exposedColour, "start", "400", "exposed")
}

// legend explains the colours.
func (d *drawing) legend(y int) {
	x := float64(svgLeft)
	box := func(fill, stroke, label string) {
		d.printf(`<rect x="%.1f" y="%d" width="14" height="14" fill="%s" stroke="%s" stroke-width="1.5"/>`, x, y-11, fill, stroke)
		d.text(x+20, float64(y), 12, inkColour, "start", "400", label)
		x += 38 + 6.6*float64(len([]rune(label)))
	}
	box(forwardColour, forwardColour, Forward)
	box(backwardColour, backwardColour, Backward)
	if len(d.t.Buckets) == 0 {
		return
	}
	d.printf(`<path d="M%.1f %d l-5 10 h10 z" fill="%s"/>`, x+7, y-10, mutedColour)
	d.text(x+20, float64(y), 12, inkColour, "start", "400", "bucket ready")
	x += 118
	box("none", exposedColour, "exposed communication")
	n := len(d.t.Buckets)
	const cell = 14
	d.text(x, float64(y), 12, inkColour, "start", "400", "bucket 0")
	x += 60
	wide := min(cell, 320/float64(n))
	for k := range n {
		d.printf(`<rect x="%.1f" y="%d" width="%.1f" height="14" fill="%s"><title>bucket %d, %s</title></rect>`,
			x, y-11, wide, d.bucketColour(k), k, size(float64(d.t.Buckets[k].Bytes)))
		x += wide
	}
	d.text(x+6, float64(y), 12, inkColour, "start", "400", fmt.Sprintf("%d, %s in all", n-1, size(float64(total(d.t.Buckets)))))
}

func total(buckets []Bucket) (n int) {
	for _, b := range buckets {
		n += b.Bytes
	}
	return n
}

// ramp are colours from the first bucket's to the last's, dark enough for white
// digits and told apart by colour-blind eyes by their lightness.
var ramp = [][3]float64{{58, 82, 163}, {33, 125, 172}, {22, 148, 143}, {76, 157, 82}, {190, 138, 22}, {205, 94, 45}, {163, 57, 104}}

func (d *drawing) bucketColour(k int) string {
	n := len(d.t.Buckets)
	if k < 0 || n < 2 {
		return "#217dac"
	}
	at := float64(min(k, n-1)) / float64(n-1) * float64(len(ramp)-1)
	i := min(int(at), len(ramp)-2)
	f := at - float64(i)
	var c [3]int
	for j := range c {
		c[j] = int(math.Round(ramp[i][j]*(1-f) + ramp[i+1][j]*f))
	}
	return fmt.Sprintf("#%02x%02x%02x", c[0], c[1], c[2])
}

func (d *drawing) text(x, y float64, px int, fill, anchor, weight, s string) {
	d.printf(`<text x="%.1f" y="%.1f" font-size="%d" fill="%s" text-anchor="%s" font-weight="%s">%s</text>`,
		x, y, px, fill, anchor, weight, html.EscapeString(s))
}

// printf adds a line; errors stay in the writer until Flush.
func (d *drawing) printf(format string, args ...any) {
	fmt.Fprintf(d.b, format+"\n", args...)
}
