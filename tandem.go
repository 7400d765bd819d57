// Package tandem turns a process into one rank of a data-parallel job: who am
// I, which device, which backend, and a communicator that connects all ranks.
//
// A program that trains calls Run, which works everywhere: started by torchrun,
// mpirun, srun or tandem's own launcher it is a rank and joins the others;
// started by hand it starts itself NProc times and watches the ranks. A program
// that must not start processes calls Init. Models and gradients are the
// affair of package ddp.
package tandem

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/launch"
	"github.com/tandem-go/tandem/rendezvous"
	"github.com/tandem-go/tandem/ring"
)

// Group is this process's membership in the job.
type Group struct {
	// Rank is in [0, WorldSize); LocalRank counts the LocalWorldSize ranks of
	// this machine.
	Rank, LocalRank           int
	WorldSize, LocalWorldSize int
	// Source says how this process knows its rank (rendezvous.Env.Source).
	Source string
	// Backend is the one in use, Ring or NCCL.
	Backend string
	// Threads is the number of compute threads of Device.
	Threads int
	// Device computes and owns memory.
	Device device.Device
	// Comm connects the ranks. ddp and others split children off it.
	Comm comm.Communicator
	// Store is shared by all ranks; give each use its own rendezvous.Prefix.
	Store rendezvous.Store

	conn  *rendezvous.Conn
	quiet func() // stops listening for signals
	close sync.Once
	err   error
}

// Init makes this process the rank that its environment, or Options, says it
// is, and returns when all ranks have come. Without any such variable it is a
// world of one, without sockets; a partial set is an error that lists what is
// missing (rendezvous.ErrPartial), never a world of one. When ranks don't come
// in time, the error is a *rendezvous.AbsentError that names them.
//
// Init owns what belongs to the process: it raises GOMAXPROCS to Threads + 2,
// sets the variable TANDEM_INSIDE for those that this process starts, and ends
// the process when the launcher that started it dies. Call it once, in a
// program rather than a library. ctx bounds Init alone.
func Init(ctx context.Context, o *Options) (*Group, error) {
	opts, err := o.validate()
	if err != nil {
		return nil, err
	}
	e, err := rendezvous.Find(opts.flags(), os.LookupEnv)
	if err != nil {
		return nil, err
	}
	return initRank(ctx, opts, e)
}

func initRank(ctx context.Context, o Options, e rendezvous.Env) (*Group, error) {
	launch.Guard()
	log := o.Logger.With("rank", e.Rank)
	for _, n := range e.Notes {
		log.Warn(n)
	}
	backend, line, loud, err := thisMachine().choose(o.Backend)
	if err != nil {
		return nil, err
	}
	if !launch.Launched() && e.Rank == 0 { // else the parent has said it
		o.tell(line, loud)
	}
	threads, err := o.threads(max(e.LocalWorldSize, 1))
	if err != nil {
		return nil, err
	}
	raiseGOMAXPROCS(threads)
	if e.Source != rendezvous.SourceNone {
		if err := os.Setenv(e.Mark()); err != nil {
			return nil, fmt.Errorf("tandem: %w", err)
		}
	}
	log.Debug("joining", "world", e.WorldSize, "source", e.Source, "store", e.Addr(), "threads", threads)
	ctx, cancel := context.WithTimeoutCause(ctx, o.JoinTimeout, joinExpired(o.JoinTimeout))
	defer cancel()
	g := &Group{
		Rank: e.Rank, LocalRank: e.LocalRank, WorldSize: e.WorldSize, LocalWorldSize: e.LocalWorldSize,
		Source: e.Source, Backend: backend, Threads: threads,
	}
	if err := g.open(ctx, o, e); err != nil {
		return nil, errors.Join(fmt.Errorf("tandem: init: %w", err), g.Close())
	}
	return g, nil
}

// expired is the end of JoinTimeout: it says how long that was, and is a
// deadline to errors.Is.
type expired time.Duration

func joinExpired(d time.Duration) error { return expired(d) }

func (e expired) Error() string { return fmt.Sprintf("join timeout of %v", time.Duration(e)) }
func (expired) Unwrap() error   { return context.DeadlineExceeded }

// tell logs a line about the machine, if there is one.
func (o *Options) tell(line string, loud bool) {
	switch {
	case line == "":
	case loud:
		o.Logger.Warn(line)
	default:
		o.Logger.Info(line)
	}
}

// open joins the group and connects it. What it has opened when it fails is
// g.Close's to close.
func (g *Group) open(ctx context.Context, o Options, e rendezvous.Env) (err error) {
	if _, err := o.host(e); errors.Is(err, rendezvous.ErrLoopback) || errors.Is(err, rendezvous.ErrInterface) {
		return err // before others meet a rank that they couldn't reach
	}
	if g.conn, err = rendezvous.Connect(ctx, e, &rendezvous.ConnectOptions{Logger: o.Logger}); err != nil {
		return err
	}
	g.Store = g.conn.Store
	dev, err := cpu.New(&cpu.Options{Threads: g.Threads, Logger: o.Logger})
	if err != nil {
		return err
	}
	g.Device = dev
	host, err := o.host(e)
	if err != nil {
		return err
	}
	flight, err := g.recordFlight(o, e)
	if err != nil {
		return err
	}
	c, err := ring.New(ctx, ring.Options{
		Rank: e.Rank, Size: e.WorldSize, Store: rendezvous.Prefix(g.Store, "ring/"), Device: dev,
		Secret: e.Secret, JobID: e.JobID, Generation: e.Generation,
		Host: host, Timeout: o.Timeout, Logger: o.Logger,
		Transport: cmp.Or(o.Transport, os.Getenv("TANDEM_TRANSPORT")), Flight: flight,
	})
	if err != nil {
		return err
	}
	g.Comm = c
	return nil
}

// Transport is how the bytes of Comm travel, "shm" or "tcp"; "" for a world of
// one and for communicators that don't say. Sums of three or more ranks depend
// on it in their last bits.
func (g *Group) Transport() string {
	if c, ok := g.Comm.(interface{ Transport() string }); ok {
		return c.Transport()
	}
	return ""
}

// Close ends this rank's membership and releases the communicator, the device
// and the store. Collectives that other ranks have in flight fail, so finish
// together (a Barrier of Comm) where that matters. It is idempotent.
func (g *Group) Close() error {
	g.close.Do(func() {
		var errs []error
		if g.quiet != nil {
			g.quiet()
		}
		if g.Comm != nil {
			errs = append(errs, g.Comm.Close())
		}
		if g.Device != nil {
			errs = append(errs, g.Device.Close())
		}
		if g.conn != nil {
			errs = append(errs, g.conn.Close())
		}
		g.err = errors.Join(errs...)
	})
	return g.err
}
