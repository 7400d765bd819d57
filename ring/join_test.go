package ring

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/internal/auth"
	"github.com/tandem-go/tandem/rendezvous"
)

// joinAll runs New for each of the options on one store and returns the errors.
func joinAll(t *testing.T, timeout time.Duration, all ...Options) []error {
	t.Helper()
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	dev, err := cpu.New(&cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	st := rendezvous.NewMem()
	defer st.Close()
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, o := range all {
		wg.Go(func() {
			o.Store, o.Device, o.Timeout = st, device.Device(dev), timeout
			c, err := New(context.Background(), o)
			if errs[i] = err; err == nil {
				_ = c.Close()
			}
		})
	}
	wg.Wait()
	return errs
}

// Without this ranks that can't form a group would wait until a timeout, each
// with another story or none.
func TestJoinMistakes(t *testing.T) {
	const long = 30 * time.Second
	for _, c := range []struct {
		name    string
		all     []Options
		timeout time.Duration
		want    string
	}{
		{"unequal sizes", []Options{{Rank: 0, Size: 2}, {Rank: 1, Size: 3}}, long, "world size"},
		{"missing ranks", []Options{{Rank: 0, Size: 4}, {Rank: 2, Size: 4}}, 200 * time.Millisecond, "1, 3"},
		{"twice", []Options{{Rank: 0, Size: 3}, {Rank: 1, Size: 3}, {Rank: 1, Size: 3}}, long, "rank 1 exists 2 times"},
	} {
		t.Run(c.name, func(t *testing.T) {
			start := time.Now()
			for i, err := range joinAll(t, c.timeout, c.all...) {
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("%+v: %v, want %q", c.all[i], err, c.want)
				}
				if c.timeout < long && !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("%+v: %v is no timeout", c.all[i], err)
				}
			}
			if c.timeout == long && time.Since(start) > long/2 {
				t.Error("the ranks waited for a timeout")
			}
		})
	}
}

// Without this rank 0's absence would be reported as somebody else's, or never.
func TestJoinWithoutRankZero(t *testing.T) {
	for _, err := range joinAll(t, 100*time.Millisecond, Options{Rank: 1, Size: 2}) {
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "rank 0") {
			t.Error(err)
		}
	}
}

// Without this ranks of one job with different secrets would not be told apart
// from a slow network.
func TestJoinSecrets(t *testing.T) {
	errs := joinAll(t, 5*time.Second, Options{Rank: 0, Size: 2, Secret: "a"}, Options{Rank: 1, Size: 2, Secret: "b"})
	if !errors.Is(errs[1], auth.ErrDenied) {
		t.Errorf("rank 1: %v", errs[1])
	}
	if errs[0] == nil || strings.Contains(fmt.Sprint(errs), "\"a\"") {
		t.Errorf("rank 0: %v", errs[0])
	}
}

// Without this a mistaken option would surface as a hang or a panic.
func TestOptions(t *testing.T) {
	dev, err := cpu.New(&cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	st := rendezvous.NewMem()
	defer st.Close()
	for _, c := range []struct {
		o    Options
		want string
	}{
		{Options{Size: 0}, "Size"}, {Options{Size: 2, Rank: 2}, "Rank"}, {Options{Size: 2}, "Device"},
		{Options{Size: 2, Device: dev}, "Store"}, {Options{Size: 2, Device: dev, Store: st, Timeout: -1}, "Timeout"},
		{Options{Size: 2, Device: dev, Store: st, Heartbeat: time.Second, DeadAfter: time.Second}, "DeadAfter"},
		{Options{Size: 2, Device: dev, Store: st, Generation: -1}, "Generation"},
		{Options{Size: 2, Device: dev, Store: st, Congestion: "no-such"}, "no-such"},
		{Options{Size: 2, Device: dev, Store: st, Host: "no.such.host.invalid"}, "no.such.host.invalid"},
		{Options{Size: 2, Device: dev, Store: st, Host: "192.0.2.1"}, "secret"},
		{Options{Size: 2, Device: dev, Store: st, Host: "192.0.2.1", Secret: "s"}, "192.0.2.1"},
	} {
		if _, err := New(context.Background(), c.o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want it to name %s", err, c.want)
		}
	}
}

// Without this ranks that give up together while they connect would wait for the
// verdict of one that they don't listen to.
func TestJoinCancelled(t *testing.T) {
	dev, err := cpu.New(&cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	for wait := 200 * time.Microsecond; wait < 5*time.Millisecond; wait += wait / 8 {
		st := rendezvous.NewMem()
		ctx, cancel := context.WithTimeout(context.Background(), wait)
		var wg sync.WaitGroup
		for i := range 3 {
			wg.Go(func() {
				c, err := New(ctx, Options{Rank: i, Size: 3, Store: st, Device: dev, Secret: "s", Transport: TransportTCP})
				if err == nil {
					_ = c.Close()
				} else if strings.Contains(err.Error(), "does not answer") {
					t.Errorf("after %v: %v", wait, err)
				}
			})
		}
		wg.Wait()
		cancel()
		st.Close()
	}
}
