package bench

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/overlap"
)

// Ends says which ends of the sequence of buckets get a small one: the first, so
// that communication starts early, the last, because nothing hides it.
type Ends string

// The treatments of the first and the last bucket. "Small" is the library's
// default cap for them (bucket.Caps); otherwise they are as large as the others.
const (
	SmallBoth  Ends = "both" // the library's default
	SmallFirst Ends = "first"
	SmallLast  Ends = "last"
	SmallNone  Ends = "none"
)

// AllEnds are the values of Ends.
func AllEnds() []Ends { return []Ends{SmallBoth, SmallFirst, SmallLast, SmallNone} }

// Setting is one choice of bucket caps.
type Setting struct {
	CapMB float64 `json:"cap_mb"` // MiB
	Ends  Ends    `json:"small_ends"`
}

func (s Setting) String() string { return fmt.Sprintf("cap %.4g MiB, small ends %s", s.CapMB, s.Ends) }

// caps are those of s for a model with these parameters.
func (s Setting) caps(params []bucket.Param, order []int) (bucket.Caps, error) {
	bytes, err := bucket.MiB([]float64{s.CapMB})
	if err != nil {
		return bucket.Caps{}, err
	}
	c, err := bucket.Caps{Cap: bytes}.Resolve(params, order)
	if err != nil {
		return bucket.Caps{}, err
	}
	small := c.First
	if s.Ends == SmallLast || s.Ends == SmallNone {
		c.First = c.Cap[0]
	}
	c.Last = small
	if s.Ends == SmallFirst || s.Ends == SmallNone {
		size := 0
		for _, p := range params {
			size += p.Bytes() + bucket.Align
		}
		c.Last = (size>>20 + 1) << 20 // what is more than the model never cuts
	}
	return c, nil
}

// flags are the options of the program that choose s, whose caps are c.
func (s Setting) flags(c bucket.Caps) string {
	number := func(x float64) string { return strconv.FormatFloat(x, 'g', -1, 64) }
	f := "--bucket-cap-mb " + number(s.CapMB)
	if s.Ends == SmallLast || s.Ends == SmallNone {
		f += " --first-bucket-mb " + number(mib(c.First))
	}
	if s.Ends != SmallBoth {
		f += " --last-bucket-mb " + number(mib(c.Last))
	}
	return f
}

// try is a layout with the settings that give it and its timings.
type try struct {
	settings []Setting
	def      bool // the library's default is among them
	caps     bucket.Caps
	layout   *bucket.Layout

	walls walls
	comm  []float64
	early int
}

// plan asks ddp for the production order of the gradients and lists the
// layouts to try, the default's first. It is collective.
func (s *sweeper) plan(ctx context.Context) error {
	if err := s.open(ctx, bucket.Caps{}); err != nil {
		return err
	}
	def, caps := s.ddp.Layout(), s.ddp.Caps()
	if err := s.ddp.Close(); err != nil {
		return err
	}
	s.bytes = def.Bytes()
	var err error
	s.tries, err = tries(&s.cfg, def, caps)
	return err
}

// tries are the layouts that differ, each with all settings that give it. def
// is the layout of the default caps.
func tries(c *BucketsConfig, def *bucket.Layout, caps bucket.Caps) ([]*try, error) {
	var order []int // buckets and their parameters are in production order
	for _, b := range def.Buckets {
		order = append(order, b.Params...)
	}
	first := &try{
		settings: []Setting{{CapMB: mib(caps.Cap[len(caps.Cap)-1]), Ends: SmallBoth}},
		def:      true, layout: def, early: len(def.Buckets),
	}
	all, known := []*try{first}, map[[32]byte]*try{def.Hash(): first}
	for _, e := range c.Ends {
		for _, mb := range c.CapMB {
			set := Setting{CapMB: mb, Ends: e}
			caps, err := set.caps(def.Params, order)
			if err != nil {
				return nil, err
			}
			l, err := bucket.Assign(def.Params, order, caps)
			if err != nil {
				return nil, err
			}
			t := known[l.Hash()]
			if t == nil {
				t = &try{caps: caps, layout: l, early: len(l.Buckets)}
				all, known[l.Hash()] = append(all, t), t
			}
			if set != first.settings[0] {
				t.settings = append(t.settings, set)
			}
		}
	}
	return all, nil
}

func (t *try) record(mode int, wall time.Duration, times overlap.Times) {
	t.walls[mode] = append(t.walls[mode], ms(wall))
	if mode == normal {
		t.comm = append(t.comm, ms(times.Comm))
		t.early = min(t.early, times.Early)
	}
}

func mib(bytes int) float64 { return float64(bytes) / (1 << 20) }
