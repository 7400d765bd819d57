package overlap

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

var update = flag.Bool("update", false, "rewrite testdata/*.txt with what happens now")

// Without it the order of waits, collectives and updates, which is what keeps a
// step free of races, could change without anybody seeing. Each script in
// testdata holds commands (lines that start with ">") and, indented below each,
// everything that the reducer asked of the device and of the communicator.
func TestGoldenOrder(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			require.NoError(t, err)
			got := replay(t, string(want))
			if *update {
				require.NoError(t, os.WriteFile(file, []byte(got), 0o644))
				return
			}
			require.Equal(t, string(want), got)
		})
	}
}

// replay runs the commands of a script and returns it with their effects.
func replay(t *testing.T, text string) string {
	s := &script{rec: new(recorder)}
	for line := range strings.Lines(text) {
		switch {
		case strings.HasPrefix(line, "#"):
			s.rec.log.WriteString(line)
		case strings.HasPrefix(line, ">"):
			s.rec.log.WriteString(line)
			if err := s.run(strings.Fields(line[1:])); err != nil {
				s.rec.printf("  error: %v", err)
			}
		}
	}
	require.NotNil(t, s.r, "the script has no 'new'")
	return s.rec.log.String()
}

// script is the state of one golden test.
type script struct {
	rec      *recorder
	r        *Reducer
	schedule Schedule
}

func (s *script) run(f []string) error {
	arg := -1
	if len(f) == 2 {
		arg, _ = strconv.Atoi(f[1])
	}
	switch f[0] {
	case "new": // new external|per-bucket|whole|late 0 1 | 2
		return s.create(f[1], strings.Fields(strings.Join(f[2:], " ")))
	case "schedule":
		s.schedule = map[string]Schedule{"normal": Normal, "no-overlap": NoOverlap, "no-comm": NoComm}[f[1]]
		return nil
	case "begin":
		return s.r.Begin(context.Background(), f[1] == "sync", s.schedule)
	case "read":
		return s.r.Read(arg)
	case "write":
		return s.r.Write(arg)
	case "lastread":
		return s.r.LastRead(arg)
	case "ready":
		return s.r.Ready(arg)
	case "end":
		return s.r.End()
	case "rows":
		return s.r.Rows()
	case "updates":
		return s.r.Updates()
	case "reduced":
		return s.r.WaitReduced(context.Background())
	case "sync":
		return s.r.Sync(context.Background())
	}
	return fmt.Errorf("no such command: %v", f)
}

// create lays out parameters of 16 elements in the buckets that groups lists.
func (s *script) create(mode string, groups []string) error {
	l := &bucket.Layout{}
	b := bucket.Bucket{Type: dtype.Float32}
	slots := map[int]bucket.Slot{}
	for _, g := range append(groups, "|") {
		if g == "|" {
			l.Buckets = append(l.Buckets, b)
			b = bucket.Bucket{Type: dtype.Float32}
			continue
		}
		p, err := strconv.Atoi(g)
		if err != nil {
			return err
		}
		slots[p] = bucket.Slot{Bucket: len(l.Buckets), Offset: b.Bytes, Bytes: 64}
		b.Params, b.Bytes = append(b.Params, p), b.Bytes+64
	}
	for p := range len(slots) {
		l.Slots = append(l.Slots, slots[p])
		l.Params = append(l.Params, bucket.Param{Name: fmt.Sprintf("w%d", p), Shape: []int{16}, Type: dtype.Float32})
	}
	cfg := Config{Device: s.rec, Comm: s.rec, Layout: l}
	for _, b := range l.Buckets {
		cfg.Grads = append(cfg.Grads, fakeBuffer(b.Bytes))
	}
	cfg.Agree = func() (comm.Op, error) { s.rec.printf("  host: agree"); return comm.Avg, nil }
	enqueue := func(what string) func(device.Stream, int) error {
		return func(st device.Stream, k int) error { s.rec.printf("  %v: %s %d", st, what, k); return nil }
	}
	if mode != "external" {
		cfg.Update = enqueue("update")
	}
	if mode == "late" { // per-bucket, the first completed by a tail
		cfg.Late = make([]bool, len(l.Buckets))
		cfg.Late[0] = true
		cfg.Tail = func(st device.Stream) error { s.rec.printf("  %v: tail", st); return nil }
	}
	if mode == "whole" {
		cfg.Whole, cfg.Reduced, cfg.Prepare = true, enqueue("squares"), enqueue("scale")
	}
	var err error
	if s.r, err = New(cfg); err == nil {
		nameEvents(s.r, s.rec)
	}
	return err
}
