package tandem

import (
	"os"
	"os/signal"
	"syscall"

	"github.com/tandem-go/tandem/rendezvous"
	"github.com/tandem-go/tandem/trace"
)

// recordFlight makes the flight recorder that Options.FlightDir asks for, nil
// without one, and has it written on SIGUSR1 until g.quiet is called.
func (g *Group) recordFlight(o Options, e rendezvous.Env) (*trace.FlightRecorder, error) {
	if o.FlightDir == "" {
		return nil, nil
	}
	r, err := trace.NewFlightRecorder(trace.FlightOptions{Rank: e.Rank, Size: e.WorldSize, Dir: o.FlightDir,
		JobID: e.JobID, Generation: e.Generation})
	if err != nil {
		return nil, err
	}
	c, stop, done := make(chan os.Signal, 1), make(chan struct{}), make(chan struct{})
	signal.Notify(c, syscall.SIGUSR1)
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			case <-c:
			}
			if err := r.DumpSignal(); err != nil {
				o.Logger.Warn("no flight record", "rank", e.Rank, "err", err)
			}
		}
	}()
	g.quiet = func() {
		signal.Stop(c)
		close(stop)
		<-done
	}
	return r, nil
}
