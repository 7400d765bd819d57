package ring

import (
	"time"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/trace"
)

// dumpTime bounds how long Close waits for the flight record of a failed group:
// a disk that hangs must not hang the rank.
const dumpTime = 5 * time.Second

// record puts o into the flight recorder.
func (g *group) record(o *operation) {
	r := g.n.o.Flight
	if r == nil {
		return
	}
	c := trace.FlightCall{Comm: g.flight, Seq: o.seq, Kind: o.call.Kind.String(), Count: o.call.Count,
		Name: o.call.Tag.Name, Bucket: o.call.Tag.Bucket, Peer: o.peer}
	if o.call.Kind == comm.KindAllReduce || o.call.Kind == comm.KindReduceScatter {
		c.Op = o.call.Op.String()
	}
	if o.call.Type != dtype.Invalid {
		c.Type = o.call.Type.String()
	}
	o.flight = r.Queue(&c)
}

// dumpFlight writes the record, without waiting for the disk: the failure is
// what matters, and nothing that goes wrong here replaces it.
func (n *node) dumpFlight(f *failure) {
	if n.o.Flight == nil {
		return
	}
	done := make(chan struct{})
	n.mu.Lock()
	n.dumped = done
	n.mu.Unlock()
	go func() {
		defer close(done)
		if err := n.o.Flight.DumpError(f.text, f.culprit); err != nil {
			n.o.Logger.Warn("no flight record", "rank", n.o.Rank, "err", err)
		}
	}()
}

// awaitFlight gives dumpFlight a moment to finish.
func (n *node) awaitFlight() {
	n.mu.Lock()
	done := n.dumped
	n.mu.Unlock()
	if done == nil {
		return
	}
	select {
	case <-done:
	case <-time.After(dumpTime):
		n.o.Logger.Warn("the flight record was not written in time", "rank", n.o.Rank, "timeout", dumpTime)
	}
}
