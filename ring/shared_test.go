package ring

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/comm/commtest"
	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/rendezvous"
)

// Without this ranks of one host could break any promise of comm, or the
// choice of their transport never be made.
func TestConformanceShared(t *testing.T) {
	needShared(t)
	commtest.Run(t, spawn(Options{Transport: TransportShm}))
}

// Without this the algorithms for long buffers would be tested on long buffers
// only, and buffers that no other rank can read, on some ranks or on all,
// nowhere. Groups take turns.
func TestConformanceSharedLong(t *testing.T) {
	needShared(t)
	groups := 0
	commtest.Run(t, func(t testing.TB, dev device.Device, n int, c commtest.Config) []comm.Communicator {
		all := spawn(Options{Transport: TransportShm, plan: plan{exchangeBytes: -1}})(t, dev, n, c)
		groups++
		for i := range all {
			all[i] = &private{Communicator: all[i], dev: dev, own: groups % 3, count: i}
		}
		return all
	})
}

// private is a communicator that allocates none, all, or a half of its buffers
// on the device, as own is 0, 1 or 2.
type private struct {
	comm.Communicator
	dev        device.Device
	own, count int
}

func (p *private) Alloc(n int) (device.Buffer, error) {
	p.count++
	if p.own == 1 || p.own == 2 && p.count%2 == 0 {
		return p.dev.Alloc(n)
	}
	return p.Communicator.Alloc(n)
}

// needShared skips where memory can't be shared.
func needShared(t *testing.T) {
	t.Helper()
	if why := noShared(t); why != "" {
		t.Skip("no shared memory here: ", why)
	}
}

// noShared is why memory can't be shared, "" if it can.
func noShared(t *testing.T) string {
	t.Helper()
	n := &node{o: Options{Size: 2, Transport: TransportShm, Logger: slog.New(slog.DiscardHandler)}, lis: &listener{}}
	c := n.offer(t.Context())
	if c.Shm == nil {
		return c.NoShm
	}
	if err := n.host.close(); err != nil {
		t.Fatal(err)
	}
	return ""
}

// Without this buffers would die with the communicator that allocated them, or
// their segments outlive it.
func TestSharedAfterClose(t *testing.T) {
	needShared(t)
	dev, err := cpu.New(&cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	all := start(t, 2, Options{Device: dev, Transport: TransportShm})
	var bufs [][]byte
	for _, n := range []int{1, 100, 70_000, 5 << 20} {
		for _, c := range all {
			b, err := c.Alloc(n)
			if err != nil {
				t.Fatal(err)
			}
			p, _ := b.HostBytes()
			if len(bytes.Trim(p, "\x00")) != 0 {
				t.Fatalf("%d bytes are not zero", n)
			}
			for i := range p {
				p[i] = byte(i*7 + n)
			}
			bufs = append(bufs, p)
		}
	}
	if errs := exchangeMessages(dev, all); errors.Join(errs...) != nil {
		t.Fatal(errs)
	}
	if n := segments(t); n == 0 {
		t.Error("no segment is mapped")
	}
	for _, c := range all {
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range bufs {
		n := len(p)
		for i := range p {
			if p[i] != byte(i*7+n) {
				t.Fatalf("byte %d of %d changed", i, n)
			}
			p[i]++
		}
	}
	if n := segments(t); n != 0 {
		t.Errorf("%d segments are still mapped", n)
	}
}

// segments counts mappings of segments in this process.
func segments(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(b), "memfd:tandem")
}

// Without this two transports could be mixed in one group, or ranks that can't
// share be made to, or one would not hear why.
func TestTransports(t *testing.T) {
	needShared(t)
	dev, err := cpu.New(&cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	const shared, tcp = "shared", "tcp"
	for _, c := range []struct{ t0, t1, h0, h1, want string }{
		{"", "", "", "", shared},
		{TransportShm, TransportShm, "", "", shared},
		{TransportTCP, TransportTCP, "", "", tcp},
		{"", "", "127.0.0.1", "127.0.0.2", tcp},
		{TransportShm, TransportTCP, "", "", "transport"},
		{TransportAuto, TransportTCP, "", "", "transport"},
		{TransportShm, TransportShm, "127.0.0.1", "127.0.0.2", "several values of Host"},
	} {
		st := rendezvous.NewMem()
		all, errs := make([]comm.Communicator, 2), make([]error, 2)
		var wg sync.WaitGroup
		for i := range all {
			wg.Go(func() {
				o := Options{Rank: i, Size: 2, Store: st, Device: dev, Transport: []string{c.t0, c.t1}[i], Host: []string{c.h0, c.h1}[i]}
				all[i], errs[i] = New(context.Background(), o)
			})
		}
		wg.Wait()
		for i := range all {
			if errs[i] != nil {
				if c.want == shared || c.want == tcp || !strings.Contains(errs[i].Error(), c.want) {
					t.Errorf("%+v: rank %d: %v", c, i, errs[i])
				}
				continue
			}
			g := all[i].(*group)
			if got := map[bool]string{true: shared, false: tcp}[g.shared != nil]; got != c.want || (g.link == nil) != (got == shared) {
				t.Errorf("%+v: rank %d: %s", c, i, got)
			}
			defer all[i].Close()
		}
		_ = st.Close()
	}
}

// Without this an offset that a faulty peer gives could make this rank read
// outside of a mapping.
func TestSharedBounds(t *testing.T) {
	needShared(t)
	dev, err := cpu.New(&cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	all := start(t, 2, Options{Device: dev, Transport: TransportShm, Timeout: time.Second})
	g := all[0].(*group)
	b, err := all[1].Alloc(4096)
	if err != nil {
		t.Fatal(err)
	}
	p, _ := b.HostBytes()
	id, off := all[1].(*group).n.host.locate(p)
	if got, err := g.shared.view(1, id, off, len(p)); err != nil || len(got) != len(p) {
		t.Fatal(err)
	}
	for _, c := range []struct {
		id     uint64
		off, n int
	}{{id, -1, 1}, {id, off, 1 << 40}, {id, 1 << 40, 1}, {id, 1<<63 - 1, 8}, {id + 7, 0, 1}} {
		if _, err := g.shared.view(1, c.id, c.off, c.n); err == nil {
			t.Errorf("%+v: no error", c)
		}
	}
	for _, c := range all {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Without this a run could not tell that its sums are added in another order
// than before.
func TestTransport(t *testing.T) {
	dev, err := cpu.New(&cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	wants := map[string]string{TransportTCP: TransportTCP}
	if noShared(t) == "" {
		wants[TransportShm], wants[TransportAuto] = TransportShm, TransportShm
	}
	check := func(n int, transport, want string) {
		t.Helper()
		for _, c := range start(t, n, Options{Device: dev, Transport: transport}) {
			if got := c.(interface{ Transport() string }).Transport(); got != want {
				t.Errorf("%d ranks with %s: %q, want %q", n, transport, got, want)
			}
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	for transport, want := range wants {
		check(3, transport, want)
	}
	check(1, TransportAuto, "")
}
