package ring

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// BenchmarkLatency is what one allreduce of 4 KB takes from its call until its
// stream is done, between two ranks of this process, with the compute thread
// idle and then kept busy with matrix products. Median and 99th percentile; where
// kernels held communication up, the second would be many milliseconds.
func BenchmarkLatency(b *testing.B) {
	// As package cpu asks for, and one more for the second rank.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(cpu.GOMAXPROCS(1) + 1))
	for _, busy := range []bool{false, true} {
		b.Run(map[bool]string{false: "idle", true: "busy"}[busy], func(b *testing.B) {
			dev, err := cpu.New(&cpu.Options{Threads: 1})
			if err != nil {
				b.Fatal(err)
			}
			defer dev.Close()
			all := start(b, 2, Options{Device: dev})
			ended := make(chan error, 1)
			go func() { ended <- run(dev, all[1], 4<<10, func() bool { return true }) }()
			if busy {
				defer keepBusy(b, dev)()
			}
			var took []time.Duration
			var at time.Time
			err = run(dev, all[0], 4<<10, func() bool {
				now := time.Now()
				if !at.IsZero() {
					took = append(took, now.Sub(at))
				}
				at = now
				return b.Loop()
			})
			if err != nil {
				b.Fatal(err)
			}
			_ = all[0].Close()
			<-ended // the other rank, whose last allreduce has lost its peer
			_ = all[1].Close()
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "p50-ns")
			b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "p99-ns")
		})
	}
}

// keepBusy multiplies matrices on a stream of dev until the function that it
// returns is called.
func keepBusy(b *testing.B, dev device.Device) (stop func()) {
	s, err := dev.NewStream(device.Normal)
	if err != nil {
		b.Fatal(err)
	}
	m := device.Tensor{Shape: []int{512, 512}, Type: dtype.Float32}
	k, err := dev.Compile(device.Op{Kind: device.MatMul, In: []device.Tensor{m, m}, Out: []device.Tensor{m}})
	if err != nil {
		b.Fatal(err)
	}
	var args []device.Buffer
	for range 3 {
		x, err := dev.Alloc(m.Bytes())
		if err != nil {
			b.Fatal(err)
		}
		args = append(args, x)
	}
	var enough atomic.Bool
	var next func() error
	next = func() error {
		if enough.Load() {
			return nil
		}
		if err := s.Launch(k, args); err != nil {
			return fmt.Errorf("multiplying: %w", err)
		}
		return s.HostFunc(next)
	}
	if err := s.HostFunc(next); err != nil {
		b.Fatal(err)
	}
	return func() {
		enough.Store(true)
		for range 2 { // what next has enqueued meanwhile, too
			if err := s.Sync(context.Background()); err != nil {
				b.Error(err)
			}
		}
	}
}
