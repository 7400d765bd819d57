package ring

import (
	"context"
	"sync"
	"testing"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/comm/commtest"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/rendezvous"
)

// start makes a group whose ranks are goroutines and meet over loopback.
func start(t testing.TB, n int, o Options) []comm.Communicator {
	t.Helper()
	st := rendezvous.NewMem()
	defer st.Close()
	all, errs := make([]comm.Communicator, n), make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			o := o
			o.Rank, o.Size, o.Store = i, n, st
			all[i], errs[i] = New(context.Background(), o)
		})
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			t.Fatalf("rank %d: %v", i, err)
		}
	}
	return all
}

func spawn(o Options) commtest.Spawn {
	return func(t testing.TB, dev device.Device, n int, c commtest.Config) []comm.Communicator {
		o := o
		o.Device, o.Timeout, o.Secret = dev, c.Timeout, "a secret"
		return start(t, n, o)
	}
}

// Without this the TCP backend could break any promise of comm.
func TestConformance(t *testing.T) {
	commtest.Run(t, spawn(Options{Transport: TransportTCP}))
}

// Without this the pipelined algorithms would be tested on long buffers only,
// where blocks are never empty.
func TestConformancePipelined(t *testing.T) {
	commtest.Run(t, spawn(Options{Transport: TransportTCP, plan: plan{exchangeBytes: -1}}))
}

// Without this the link of the systems that have no poll here would be tested
// nowhere.
func TestConformancePortable(t *testing.T) {
	commtest.Run(t, spawn(Options{Transport: TransportTCP, plan: plan{exchangeBytes: -1, portable: true}}))
}
