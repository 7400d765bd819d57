package bench

import (
	"encoding/csv"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
)

// BucketsReport is what a sweep over one or more links has found.
type BucketsReport struct {
	Bench string           `json:"bench"` // "buckets"
	Links []*BucketsResult `json:"links"`
}

// BucketsResult is a sweep over one link. Times are medians of rank 0's timed
// steps in milliseconds, sizes are in MiB.
type BucketsResult struct {
	Link          string  `json:"link"`
	Preset        string  `json:"preset"`
	Device        string  `json:"device"`
	WorldSize     int     `json:"world_size"`
	Threads       int     `json:"threads"`
	Params        int     `json:"params"`
	GradientMB    float64 `json:"gradient_mb"`
	TokensPerStep int     `json:"tokens_per_step"` // all ranks
	Rounds        int     `json:"rounds"`
	Steps         int     `json:"steps"` // timed, of each mode and row

	// Rows are the layouts, the default's first; Best is the index of the
	// fastest.
	Rows []BucketsRow `json:"rows"`
	Best int          `json:"best"`
	// GainOverDefault and GainOverNoOverlap are by how much the best row's
	// tokens/s exceed those of the default caps, and those of the fastest row
	// without overlap: 0.1 is a tenth more.
	GainOverDefault   float64 `json:"gain_over_default"`
	GainOverNoOverlap float64 `json:"gain_over_no_overlap"`
	// Clear says that the default's median is outside the p10–p90 range of the
	// best row, and the best's outside the default's; otherwise the two can't be
	// told apart.
	Clear bool `json:"clear"`
}

// BucketsRow is one layout. Its settings are the choices of caps that give
// exactly these buckets.
type BucketsRow struct {
	Settings []Setting `json:"settings"`
	Default  bool      `json:"default"`
	// Flags are the options of cmd/train that choose the first setting; "" for
	// the default's.
	Flags   string  `json:"flags"`
	Buckets int     `json:"buckets"`
	FirstMB float64 `json:"first_mb"` // sizes of the first, the largest and the last bucket
	LargeMB float64 `json:"largest_mb"`
	LastMB  float64 `json:"last_mb"`

	StepMS      float64 `json:"step_ms"`
	StepP10MS   float64 `json:"step_p10_ms"`
	StepP90MS   float64 `json:"step_p90_ms"`
	NoCommMS    float64 `json:"no_comm_step_ms"`
	NoOverlapMS float64 `json:"no_overlap_step_ms"`
	// NoOverlapP10MS and NoOverlapP90MS are the spread of NoOverlapMS.
	NoOverlapP10MS float64 `json:"no_overlap_step_p10_ms"`
	NoOverlapP90MS float64 `json:"no_overlap_step_p90_ms"`
	CommMS         float64 `json:"comm_ms"`
	ExposedCommMS  float64 `json:"exposed_comm_ms"`
	HiddenShare    Share   `json:"hidden_share"` // as in StepResult
	EarlyMin       int     `json:"early_buckets_min"`

	TokensPerS          float64 `json:"tokens_per_s"` // all ranks
	TokensP10PerS       float64 `json:"tokens_p10_per_s"`
	TokensP90PerS       float64 `json:"tokens_p90_per_s"`
	NoOverlapTokensPerS float64 `json:"no_overlap_tokens_per_s"`
}

func (s *sweeper) result() *BucketsResult {
	r := &BucketsResult{
		Link: s.cfg.Link, Preset: s.cfg.Preset, Device: s.g.Device.Name(), WorldSize: s.g.WorldSize, Threads: s.g.Threads,
		Params: s.model.Config.ParamCount(), GradientMB: mib(s.bytes), TokensPerStep: s.tokens(),
		Rounds: s.cfg.Rounds, Steps: s.perRound() * s.cfg.Rounds,
	}
	for _, t := range s.tries {
		r.Rows = append(r.Rows, t.row(s.g.WorldSize, s.tokens()))
	}
	r.judge()
	return r
}

func (t *try) row(worldSize, tokens int) BucketsRow {
	b := t.layout.Buckets
	r := BucketsRow{
		Settings: t.settings, Default: t.def, Buckets: len(b), FirstMB: mib(b[0].Bytes), LastMB: mib(b[len(b)-1].Bytes),
		StepMS: t.walls.median(normal), StepP10MS: quantile(t.walls[normal], 0.1), StepP90MS: quantile(t.walls[normal], 0.9),
		NoCommMS: t.walls.median(noComm), NoOverlapMS: t.walls.median(noOverlap),
		NoOverlapP10MS: quantile(t.walls[noOverlap], 0.1), NoOverlapP90MS: quantile(t.walls[noOverlap], 0.9),
		CommMS: quantile(t.comm, 0.5), EarlyMin: t.early,
	}
	if !t.def {
		r.Flags = t.settings[0].flags(t.caps)
	}
	for _, b := range b {
		r.LargeMB = max(r.LargeMB, mib(b.Bytes))
	}
	r.ExposedCommMS = r.StepMS - r.NoCommMS
	r.HiddenShare = hiddenShare(worldSize, r.StepMS, r.NoCommMS, r.NoOverlapMS)
	perS := func(ms float64) float64 { return float64(tokens) / ms * 1000 }
	// The slow steps are the small rates.
	r.TokensPerS, r.TokensP10PerS, r.TokensP90PerS = perS(r.StepMS), perS(r.StepP90MS), perS(r.StepP10MS)
	r.NoOverlapTokensPerS = perS(r.NoOverlapMS)
	return r
}

// judge finds the best row and its gains. Where rows are equal the first is
// best, which is the default.
func (r *BucketsResult) judge() {
	var def *BucketsRow
	noOverlap := 0.0
	for i := range r.Rows {
		row := &r.Rows[i]
		if row.TokensPerS > r.Rows[r.Best].TokensPerS {
			r.Best = i
		}
		if row.Default {
			def = row
		}
		noOverlap = max(noOverlap, row.NoOverlapTokensPerS)
	}
	best := &r.Rows[r.Best]
	r.GainOverDefault = best.TokensPerS/def.TokensPerS - 1
	r.GainOverNoOverlap = best.TokensPerS/noOverlap - 1
	r.Clear = def.TokensPerS < best.TokensP10PerS && best.TokensPerS > def.TokensP90PerS
}

// At is the row of a setting, nil where it was not measured.
func (r *BucketsResult) At(s Setting) *BucketsRow {
	for i := range r.Rows {
		for _, have := range r.Rows[i].Settings {
			if have == s {
				return &r.Rows[i]
			}
		}
	}
	return nil
}

// caps lists the caps of a row, shortened to its ends where there are many, as
// "0.25" or "5 … 100".
func (w *BucketsRow) caps() string {
	low, high := w.Settings[0].CapMB, w.Settings[0].CapMB
	for _, s := range w.Settings {
		low, high = min(low, s.CapMB), max(high, s.CapMB)
	}
	if low == high {
		return mb(low)
	}
	return mb(low) + " … " + mb(high)
}

// ends lists the treatments of the ends of a row.
func (w *BucketsRow) ends() string {
	var names []string
	for _, e := range AllEnds() {
		for _, s := range w.Settings {
			if s.Ends == e {
				names = append(names, string(e))
				break
			}
		}
	}
	return strings.Join(names, "/")
}

func mb(x float64) string { return strconv.FormatFloat(x, 'g', 3, 64) }

// WriteTable writes r for people: a line a layout, the default marked with a
// star and the fastest with an arrow, then what follows from it.
func (r *BucketsResult) WriteTable(out io.Writer) error {
	fmt.Fprintf(out, "%s over %s: %d ranks × %d threads on %s, %.2f MiB of gradients, %d tokens a step\n",
		r.Preset, r.Link, r.WorldSize, r.Threads, r.Device, r.GradientMB, r.TokensPerStep)
	fmt.Fprintf(out, "medians of %d steps in %d rounds; * is the default, > the fastest\n", r.Steps, r.Rounds)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "\tcap MiB\tsmall ends\tbuckets\tfirst … last MiB\tstep ms\tp10 … p90\tno comm\tno overlap\thidden\ttokens/s\tvs default\t")
	var def float64
	for _, row := range r.Rows {
		if row.Default {
			def = row.TokensPerS
		}
	}
	for i := range r.Rows {
		row := &r.Rows[i]
		mark := ""
		if i == r.Best {
			mark = ">"
		}
		if row.Default {
			mark += "*"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%.2f … %.2f\t%.2f\t%.2f … %.2f\t%.2f\t%.2f\t%v\t%.0f\t%+.1f %%\t\n",
			mark, row.caps(), row.ends(), row.Buckets, row.FirstMB, row.LastMB, row.StepMS, row.StepP10MS, row.StepP90MS,
			row.NoCommMS, row.NoOverlapMS, row.HiddenShare, row.TokensPerS, 100*(row.TokensPerS/def-1))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintln(out, r.verdict()+r.unsteady())
	return err
}

// steady is by how much medians of steps without communication may differ: they
// compute the same in every row.
const steady = 1.25

// unsteady is a warning where the machine's speed changed too much.
func (r *BucketsResult) unsteady() string {
	low, high := r.Rows[0].NoCommMS, r.Rows[0].NoCommMS
	for i := range r.Rows {
		low, high = min(low, r.Rows[i].NoCommMS), max(high, r.Rows[i].NoCommMS)
	}
	if high <= steady*low {
		return ""
	}
	return fmt.Sprintf("\nthe machine is unsteady: the same step without communication takes %.2f … %.2f ms; stop what else runs, or take more --steps and --rounds", low, high)
}

// verdict is what stands below the table.
func (r *BucketsResult) verdict() string {
	best := &r.Rows[r.Best]
	over := fmt.Sprintf("%+.1f %% over the fastest without overlap", 100*r.GainOverNoOverlap)
	switch {
	case best.Default:
		return "best: the default caps, " + over
	case !r.Clear:
		return fmt.Sprintf("best: %v, %s; its %+.1f %% over the default is within the spread: keep the default",
			best.Settings[0], over, 100*r.GainOverDefault)
	}
	return fmt.Sprintf("best: %v, %+.1f %% over the default, %s\nuse it: train %s", best.Settings[0], 100*r.GainOverDefault, over, best.Flags)
}

// WriteCSV writes a line a link and setting.
func (r *BucketsReport) WriteCSV(out io.Writer) error {
	w := csv.NewWriter(out)
	err := w.Write([]string{"link", "preset", "world_size", "threads", "cap_mb", "small_ends", "default", "best", "buckets", "first_mb", "largest_mb", "last_mb",
		"step_ms", "step_p10_ms", "step_p90_ms", "no_comm_step_ms", "no_overlap_step_ms", "no_overlap_step_p10_ms", "no_overlap_step_p90_ms",
		"comm_ms", "exposed_comm_ms", "hidden_share", "early_buckets_min", "tokens_per_s", "tokens_p10_per_s", "tokens_p90_per_s", "no_overlap_tokens_per_s"})
	if err != nil {
		return err
	}
	f := func(x float64) string { return strconv.FormatFloat(x, 'g', 6, 64) }
	for _, l := range r.Links {
		for i, row := range l.Rows {
			for _, s := range row.Settings {
				err := w.Write([]string{l.Link, l.Preset, strconv.Itoa(l.WorldSize), strconv.Itoa(l.Threads), f(s.CapMB), string(s.Ends),
					strconv.FormatBool(row.Default), strconv.FormatBool(i == l.Best), strconv.Itoa(row.Buckets), f(row.FirstMB), f(row.LargeMB), f(row.LastMB),
					f(row.StepMS), f(row.StepP10MS), f(row.StepP90MS), f(row.NoCommMS), f(row.NoOverlapMS), f(row.NoOverlapP10MS), f(row.NoOverlapP90MS),
					f(row.CommMS), f(row.ExposedCommMS), f(float64(row.HiddenShare)), strconv.Itoa(row.EarlyMin), f(row.TokensPerS), f(row.TokensP10PerS), f(row.TokensP90PerS), f(row.NoOverlapTokensPerS)})
				if err != nil {
					return err
				}
			}
		}
	}
	w.Flush()
	return w.Error()
}
