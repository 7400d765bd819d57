// Command twohosts connects ranks that were started by hand, says who they are
// and how fast they exchange. See the README for the commands.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

const (
	bytes  = 4 << 20 // of each exchange
	rounds = 20
)

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	g, err := tandem.Init(ctx, &tandem.Options{Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	defer g.Close()
	host, err := os.Hostname()
	if err != nil {
		return err
	}
	fmt.Printf("rank %d of %d, number %d of %d on %s\n", g.Rank, g.WorldSize, g.LocalRank, g.LocalWorldSize, host)
	took, err := exchange(ctx, g)
	if err != nil {
		return err
	}
	if g.Rank == 0 {
		fmt.Printf("allreduce of %d MiB over %d ranks: %.1f ms\n", bytes>>20, g.WorldSize, float64(took.Microseconds())/1000)
	}
	return g.Comm.Barrier(ctx) // who leaves first would look like a failure to those still at work
}

// exchange returns the time of one of many allreduces.
func exchange(ctx context.Context, g *tandem.Group) (time.Duration, error) {
	buf, err := g.Comm.Alloc(bytes)
	if err != nil {
		return 0, err
	}
	s, err := g.Device.NewStream(device.Normal)
	if err != nil {
		return 0, err
	}
	start := time.Now()
	for round := range rounds + 1 {
		if round == 1 { // the first one warms up
			start = time.Now()
		}
		if err := g.Comm.AllReduce(s, buf, buf, dtype.Float32, comm.Sum, comm.Tag{Name: "hello", Bucket: -1}); err != nil {
			return 0, err
		}
		if err := s.Sync(ctx); err != nil {
			return 0, err
		}
	}
	return time.Since(start) / rounds, nil
}
