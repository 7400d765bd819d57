package bench

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// The collectives that Collectives measures.
const (
	AllReduce     = "allreduce"
	ReduceScatter = "reduce-scatter"
	AllGather     = "all-gather"
	Broadcast     = "broadcast"
	SendRecv      = "sendrecv" // to the next rank, from the one before
)

// CollectiveNames lists them.
func CollectiveNames() []string {
	return []string{AllReduce, ReduceScatter, AllGather, Broadcast, SendRecv}
}

// CollectivesConfig says what Collectives measures: every collective with every
// type and size.
type CollectivesConfig struct {
	// Names are from CollectiveNames; empty means AllReduce.
	Names []string
	// Types are the element types; empty means float32.
	Types []dtype.Type
	// Op is the reduction of AllReduce and ReduceScatter.
	Op comm.Op
	// Bytes are the sizes as nccl-tests counts them: the larger of a rank's two
	// buffers, rounded down to a whole number of elements for every rank. Empty
	// means 4 KiB, 64 KiB, 1 MiB, 25 MiB and 100 MiB.
	Bytes []int
	// Time is how long each row takes, at least 5 and at most 3000 calls. 0 means 1 s.
	Time time.Duration
	// OutOfPlace gives source and destination buffers of their own.
	OutOfPlace bool
	// Cores is how many this machine has for the group's ranks on it; rows of
	// more ranks than that are marked. 0 marks none.
	Cores int
	// Backend names what is measured, for CollectiveRow.
	Backend string
}

// The repetitions of a row.
const (
	warmCalls = 2
	minCalls  = 5
	maxCalls  = 3000
)

func (c *CollectivesConfig) validate() error {
	if len(c.Names) == 0 {
		c.Names = []string{AllReduce}
	}
	if len(c.Types) == 0 {
		c.Types = []dtype.Type{dtype.Float32}
	}
	if len(c.Bytes) == 0 {
		c.Bytes = []int{4 << 10, 64 << 10, 1 << 20, 25 << 20, 100 << 20}
	}
	if c.Time == 0 {
		c.Time = time.Second
	}
	for _, n := range c.Names {
		if !slices.Contains(CollectiveNames(), n) {
			return fmt.Errorf("bench: there is no collective %q; want one of %v", n, CollectiveNames())
		}
	}
	for _, b := range c.Bytes {
		if b < 0 || b > 1<<34 {
			return fmt.Errorf("bench: a size of %d bytes, want 0 to %d", b, 1<<34)
		}
	}
	if c.Time < 0 {
		return fmt.Errorf("bench: %v a row, want more than 0", c.Time)
	}
	return nil
}

// CollectiveRow is one line of nccl-tests' table. Times are of one blocking
// call, in microseconds: quantiles over calls, of the slowest rank.
type CollectiveRow struct {
	Bench      string `json:"bench"`
	Backend    string `json:"backend"`
	Collective string `json:"collective"`
	Type       string `json:"type"`
	Redop      string `json:"redop"` // "none" where nothing is reduced
	Root       int    `json:"root"`  // -1 where there is none
	Ranks      int    `json:"ranks"`
	Bytes      int    `json:"bytes"`
	Count      int    `json:"count"` // elements, as the call counts them
	InPlace    bool   `json:"in_place"`
	Iters      int    `json:"iters"`

	AvgUS float64 `json:"avg_us"`
	P50US float64 `json:"p50_us"`
	P99US float64 `json:"p99_us"`
	MaxUS float64 `json:"max_us"`
	// AlgBW is Bytes / P50, BusBW that times the share of the bytes that must
	// cross a rank's link (nccl-tests' PERFORMANCE.md), both in GB/s.
	AlgBW float64 `json:"algbw_gbps"`
	BusBW float64 `json:"busbw_gbps"`
	// Wrong counts elements that were not what they should be, on all ranks.
	Wrong int `json:"wrong"`
	// Oversubscribed says that there were more ranks than cores, so that the row
	// measures the scheduler as well.
	Oversubscribed bool `json:"oversubscribed"`
}

// Collectives measures on one rank; all ranks call it with the same c. Each row
// is the same on all ranks and is given to row as soon as it is there. Results
// are checked before the timed calls and after them.
func Collectives(ctx context.Context, dev device.Device, g comm.Communicator, c CollectivesConfig, row func(CollectiveRow) error) error {
	if err := c.validate(); err != nil {
		return err
	}
	s, err := dev.NewStream(device.High)
	if err != nil {
		return err
	}
	b := &collBench{c: c, g: g, s: s}
	if b.scratch, err = g.Alloc(8 * 4); err != nil {
		return err
	}
	if err := b.alloc(); err != nil {
		return err
	}
	for _, name := range c.Names {
		for _, t := range c.Types {
			for _, bytes := range c.Bytes {
				r, err := b.row(ctx, name, t, bytes)
				if err != nil {
					return fmt.Errorf("bench: %s of %d bytes of %v: %w", name, bytes, t, err)
				}
				if err := row(r); err != nil {
					return err
				}
			}
		}
	}
	// Who leaves first would look like a failure to those still at work.
	return g.Barrier(ctx)
}

// collBench is one rank of the measurement.
type collBench struct {
	c        CollectivesConfig
	g        comm.Communicator
	s        device.Stream
	scratch  device.Buffer // four float64
	src, dst device.Buffer // of the largest size
	times    []float64
}

func (b *collBench) alloc() (err error) {
	most := max(slices.Max(b.c.Bytes), 1)
	if b.dst, err = b.g.Alloc(most); err != nil {
		return err
	}
	b.src = b.dst
	if b.c.OutOfPlace {
		b.src, err = b.g.Alloc(most)
	}
	b.times = make([]float64, 0, maxCalls)
	return err
}

// row measures one line.
func (b *collBench) row(ctx context.Context, name string, t dtype.Type, bytes int) (CollectiveRow, error) {
	k := b.newCall(name, t, bytes)
	r := CollectiveRow{Bench: "collectives", Backend: b.c.Backend, Collective: name, Type: t.String(), Redop: "none", Root: -1,
		Ranks: b.g.Size(), Bytes: k.bytes, Count: k.count, InPlace: !b.c.OutOfPlace,
		Oversubscribed: b.c.Cores > 0 && b.g.Size() > b.c.Cores}
	if name == AllReduce || name == ReduceScatter {
		r.Redop = b.c.Op.String()
	}
	if name == Broadcast {
		r.Root = 0
	}
	before, err := k.check(ctx)
	if err != nil {
		return r, err
	}
	k.clear()
	if r.Iters, err = b.calls(ctx, k); err != nil {
		return r, err
	}
	if err := b.time(ctx, k, r.Iters); err != nil {
		return r, err
	}
	after, err := k.check(ctx)
	if err != nil {
		return r, err
	}
	return r, b.agree(ctx, &r, before+after)
}

// calls settles on a number of calls from how long a few take on the slowest rank.
func (b *collBench) calls(ctx context.Context, k *collCall) (int, error) {
	var took time.Duration
	for i := range warmCalls + 1 {
		start := time.Now()
		if err := k.run(ctx); err != nil {
			return 0, err
		}
		if i >= warmCalls {
			took = time.Since(start)
		}
	}
	v, err := b.reduce(ctx, comm.Max, took.Seconds())
	if err != nil {
		return 0, err
	}
	return max(minCalls, min(maxCalls, int(b.c.Time.Seconds()/max(v[0], 1e-7)))), nil
}

func (b *collBench) time(ctx context.Context, k *collCall, iters int) error {
	if err := b.g.Barrier(ctx); err != nil {
		return err
	}
	b.times = b.times[:0]
	for range iters {
		start := time.Now()
		if err := k.run(ctx); err != nil {
			return err
		}
		b.times = append(b.times, float64(time.Since(start))/float64(time.Microsecond))
	}
	return nil
}

// agree makes the row that of all ranks.
func (b *collBench) agree(ctx context.Context, r *CollectiveRow, wrong int) error {
	sum := 0.0
	for _, t := range b.times {
		sum += t
	}
	v, err := b.reduce(ctx, comm.Max, sum/float64(len(b.times)), quantile(b.times, 0.5), quantile(b.times, 0.99), slices.Max(b.times))
	if err != nil {
		return err
	}
	r.AvgUS, r.P50US, r.P99US, r.MaxUS = v[0], v[1], v[2], v[3]
	r.bandwidth()
	v, err = b.reduce(ctx, comm.Sum, float64(wrong))
	r.Wrong = int(v[0])
	return err
}

// bandwidth fills in what follows from the size and the time.
func (r *CollectiveRow) bandwidth() {
	if r.P50US > 0 {
		r.AlgBW = float64(r.Bytes) / r.P50US / 1e3
		r.BusBW = r.AlgBW * busFactor(r.Collective, r.Ranks)
	}
}

// busFactor is nccl-tests' factor from algorithm to bus bandwidth.
func busFactor(name string, n int) float64 {
	share := float64(n-1) / float64(n)
	switch {
	case name == AllReduce:
		return 2 * share
	case name == ReduceScatter || name == AllGather:
		return share
	}
	return 1
}

// reduce combines up to four numbers of all ranks.
func (b *collBench) reduce(ctx context.Context, op comm.Op, v ...float64) ([4]float64, error) {
	var out [4]float64
	mem, err := comm.HostBytes(comm.KindAllReduce, b.scratch)
	if err != nil {
		return out, err
	}
	copy(out[:], v)
	for i, x := range out {
		binary.LittleEndian.PutUint64(mem[8*i:], math.Float64bits(x))
	}
	tag := comm.Tag{Name: "bench", Bucket: -1}
	if err := b.g.AllReduce(b.s, b.scratch, b.scratch, dtype.Float64, op, tag); err != nil {
		return out, err
	}
	if err := b.s.Sync(ctx); err != nil {
		return out, err
	}
	for i := range out {
		out[i] = math.Float64frombits(binary.LittleEndian.Uint64(mem[8*i:]))
	}
	return out, nil
}
