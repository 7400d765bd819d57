package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/tandem-go/tandem/trainer"
)

// reporter prints what rank 0 has to say: a line every few steps, or JSON.
type reporter struct {
	out   io.Writer
	json  bool
	quiet bool
	every int
	total int
}

func (r *reporter) observe(m *trainer.Metrics) {
	if r.quiet || m.Step != 1 && m.Step%r.every != 0 && m.ValLoss == nil {
		return
	}
	if r.json {
		r.encode(m)
		return
	}
	fmt.Fprintf(r.out, "step %d/%d  loss %.4f  %s tokens/s  %.1f ms  %3.0f %% of comm hidden",
		m.Step, r.total, m.Loss, thousands(m.TokensPerS), m.StepMS, 100*m.HiddenShare())
	if m.ValLoss != nil {
		fmt.Fprintf(r.out, "  val_loss %.4f", *m.ValLoss)
	}
	fmt.Fprintln(r.out)
}

func (r *reporter) finish(res *trainer.Result) {
	if r.quiet {
		return
	}
	if r.json {
		r.encode(res)
		return
	}
	fmt.Fprintf(r.out, "done: loss %.4f, val_loss %.4f after %d steps, %s tokens/s (median)\n",
		res.Loss, res.ValLoss, res.Steps, thousands(res.TokensPerS))
	if res.Sample != "" {
		fmt.Fprintf(r.out, "---\n%s\n", res.Sample)
	}
}

func (r *reporter) start(i *trainer.Info, text, out string) {
	if r.json || r.quiet {
		return
	}
	ranks := "1 rank"
	if i.WorldSize > 1 {
		ranks = fmt.Sprintf("%d ranks, each", i.WorldSize)
	}
	fmt.Fprintf(r.out, "%s on %s\n", ranks, i.Device)
	fmt.Fprintf(r.out, "model: %s parameters, vocabulary of %d; %d buckets with a cap of %.2f MiB; %d tokens a step\n",
		thousands(float64(i.Params)), i.Vocab, i.Buckets, i.BucketCap, i.TokensStep)
	fmt.Fprintf(r.out, "text: %s\nout: %s\n", text, out)
	if i.Resumed != "" {
		fmt.Fprintf(r.out, "resumed: %s, after step %d\n", i.Resumed, i.Step)
	}
	for _, n := range i.Notes {
		fmt.Fprintf(r.out, "note: %s\n", n)
	}
}

func (r *reporter) encode(v any) {
	if err := json.NewEncoder(r.out).Encode(v); err != nil {
		fmt.Fprintln(os.Stderr, "train: writing to standard output:", err)
	}
}

func thousands(x float64) string {
	if x >= 10000 {
		return fmt.Sprintf("%.1f k", x/1000)
	}
	return fmt.Sprintf("%.0f", x)
}

// isTerminal reports whether f is a terminal, where a progress bar is welcome.
func isTerminal(f *os.File) bool {
	st, err := f.Stat()
	return err == nil && st.Mode()&os.ModeCharDevice != 0 && os.Getenv("TERM") != "dumb" && st.Name() != os.DevNull && hasSize(f)
}

// barWriter draws a progress bar below the lines written to it. The bar moves
// with the lines ("step 120/1000 …"), so the process that owns the terminal
// needs no other channel to the rank that trains.
type barWriter struct {
	out  io.Writer
	bars *mpb.Progress
	bar  *mpb.Bar
	part []byte
	// barOnly keeps the lines that move the bar off the screen.
	barOnly bool
}

var stepLine = regexp.MustCompile(`^step (\d+)/(\d+) `)

func newBarWriter(out io.Writer) *barWriter {
	return &barWriter{out: out, bars: mpb.New(mpb.WithOutput(out), mpb.WithWidth(48), mpb.WithAutoRefresh())}
}

// Write passes whole lines on and keeps an unfinished one until its end comes.
func (w *barWriter) Write(p []byte) (int, error) {
	w.part = append(w.part, p...)
	for {
		i := bytes.IndexByte(w.part, '\n')
		if i < 0 {
			return len(p), nil
		}
		line := w.part[:i+1]
		if moved := w.advance(line); !moved || !w.barOnly {
			if _, err := w.bars.Write(line); err != nil {
				return 0, err
			}
		}
		w.part = w.part[i+1:]
	}
}

// advance moves the bar if line says where the run is.
func (w *barWriter) advance(line []byte) bool {
	m := stepLine.FindSubmatch(line)
	if m == nil {
		return false
	}
	at, err1 := strconv.ParseInt(string(m[1]), 10, 64)
	total, err2 := strconv.ParseInt(string(m[2]), 10, 64)
	if err1 != nil || err2 != nil {
		return false
	}
	if w.bar == nil {
		w.bar = w.bars.AddBar(total,
			mpb.PrependDecorators(decor.CountersNoUnit("%d / %d steps")),
			mpb.AppendDecorators(decor.AverageETA(decor.ET_STYLE_GO)))
	}
	w.bar.SetCurrent(at)
	return true
}

// Close ends the bar where it stands and flushes what has no newline.
func (w *barWriter) Close() error {
	if w.bar != nil && !w.bar.Completed() {
		w.bar.Abort(false)
	}
	w.bars.Wait()
	_, err := w.out.Write(w.part)
	return err
}
