package ring

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/rendezvous"
	"github.com/tandem-go/tandem/trace"
)

// recorded makes a group of n goroutines, each with a flight recorder for dir.
func recorded(t *testing.T, n int, timeout time.Duration, dir func(rank int) string) (device.Device, []comm.Communicator) {
	t.Helper()
	dev, err := cpu.New(&cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dev.Close() })
	st := rendezvous.NewMem()
	defer st.Close()
	all, errs := make([]comm.Communicator, n), make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			r, err := trace.NewFlightRecorder(trace.FlightOptions{Rank: i, Size: n, Dir: dir(i)})
			if errs[i] = err; err == nil {
				all[i], errs[i] = New(context.Background(), Options{Rank: i, Size: n, Store: st, Device: dev, Timeout: timeout, Flight: r})
			}
		})
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			t.Fatalf("rank %d: %v", i, err)
		}
	}
	return dev, all
}

// reduceUntil queues allreduces, fewer on one rank, and closes after all have failed.
func reduceUntil(t *testing.T, dev device.Device, all []comm.Communicator, late, count, fewer int) {
	t.Helper()
	var wg sync.WaitGroup
	for i, c := range all {
		wg.Go(func() {
			s, err := dev.NewStream(device.High)
			if err != nil {
				t.Error(err)
				return
			}
			buf, err := c.Alloc(4096)
			if err != nil {
				t.Error(err)
				return
			}
			n := count
			if i == late {
				n = fewer
			}
			for k := range n {
				if c.AllReduce(s, buf, buf, dtype.Float32, comm.Sum, comm.Tag{Name: "bucket", Bucket: k % 7}) != nil {
					break
				}
			}
			_ = s.Sync(context.Background())
			for c.Err() == nil { // the others' timeout ends the group
				time.Sleep(time.Millisecond)
			}
		})
	}
	wg.Wait()
	for _, c := range all {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Without it nobody could say, after a hang, which rank never launched what.
func TestFlightOfAHang(t *testing.T) {
	dir := t.TempDir()
	dev, all := recorded(t, 3, 400*time.Millisecond, func(int) string { return dir })
	reduceUntil(t, dev, all, 2, 13, 12)
	f, err := trace.ReadFlights(dir)
	if err != nil {
		t.Fatal(err)
	}
	d := f.Disagreement()
	if len(d.Ranks) != 1 || d.Ranks[0] != 2 || d.Seq != 12 || d.Bucket != 5 || d.Wait < 400*time.Millisecond {
		t.Errorf("%+v\n%s", d, f.Text())
	}
	for _, r := range f.Records {
		if r == nil || r.Culprit != 2 || r.Reason != "error" {
			t.Errorf("%+v", r)
		}
	}
}

// Without it a directory that is full or gone could hide the error that
// mattered, or hang the rank that wants to say it.
func TestFlightHidesNothing(t *testing.T) {
	dir := t.TempDir()
	dev, all := recorded(t, 2, 400*time.Millisecond, func(r int) string {
		if r == 0 {
			return filepath.Join(dir, "absent")
		}
		return dir
	})
	reduceUntil(t, dev, all, 1, 3, 2)
	for _, c := range all {
		var e *comm.OpError
		if !errors.As(c.Err(), &e) || e.Culprit != 1 || e.Seq != 2 {
			t.Errorf("%v", c.Err())
		}
	}
	if _, err := os.Stat(filepath.Join(dir, trace.FlightName(1))); err != nil {
		t.Error(err)
	}
}
