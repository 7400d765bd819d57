package tandem

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/launch"
	"github.com/tandem-go/tandem/rendezvous"
)

// Run runs f as one rank of a job. Started as a rank (by torchrun, mpirun,
// srun, tandem's launcher, or with Options.WorldSize) it calls Init, f and
// Close. Started by hand it starts this executable NProc times with the same
// arguments, and returns when all ranks have ended; f then runs in the
// children only, so what comes before Run should be cheap and free of side
// effects. NProc 1 runs f here, without a child.
//
// The error of a job of children is a *launch.RankError, which names the rank
// that failed first and carries its exit code: os.Exit(launch.ExitCode(err)).
// f runs on the caller's ctx; a collective that fails returns its error to f.
func Run(ctx context.Context, o *Options, f func(context.Context, *Group) error) error {
	opts, err := o.validate()
	if err != nil {
		return err
	}
	e, err := rendezvous.Find(opts.flags(), os.LookupEnv)
	if errors.Is(err, rendezvous.ErrInside) && o != nil && o.NProc > 0 {
		// A tool that a rank started, told to start a job of its own.
		opts.Logger.Warn("the variables of the rank that started this process are ignored", "err", err)
		e, err = rendezvous.Env{WorldSize: 1, LocalWorldSize: 1, Source: rendezvous.SourceNone}, nil
	}
	if err != nil {
		return err
	}
	if e.Source == rendezvous.SourceNone && opts.NProc > 1 {
		return opts.start(ctx, e)
	}
	g, err := initRank(ctx, opts, e)
	if err != nil {
		return err
	}
	err = f(ctx, g)
	g.blame(err)
	return errors.Join(err, g.Close())
}

// blame tells the launcher which other rank err is the fault of, if any.
func (g *Group) blame(err error) {
	rank := culprit(err)
	if !launch.Launched() || rank < 0 || rank == g.Rank {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = launch.Blame(ctx, g.Store, g.Rank, rank) // the launcher may be the one that is gone
}

// culprit is the rank that err is the fault of, -1 when it doesn't say. An error
// that tells it with a method comes before a collective's, which may have failed
// because a rank ended for that very reason.
func culprit(err error) int {
	var cause interface{ Culprit() int }
	if errors.As(err, &cause) && cause.Culprit() >= 0 {
		return cause.Culprit()
	}
	var op *comm.OpError
	if errors.As(err, &op) {
		return op.Culprit
	}
	return -1
}

// start runs this executable once for each rank.
func (o *Options) start(ctx context.Context, e rendezvous.Env) error {
	for _, n := range e.Notes {
		o.Logger.Warn(n)
	}
	_, line, loud, err := thisMachine().choose(o.Backend)
	if err != nil {
		return err
	}
	o.tell(line, loud)
	l := o.Launch
	l.NProc = o.NProc
	if l.Threads, err = o.threads(o.NProc); err != nil {
		return err
	}
	if l.Logger == nil {
		l.Logger = o.Logger
	}
	if len(l.Args) == 0 {
		exe, err := os.Executable()
		if err != nil {
			return err
		}
		l.Args = append([]string{exe}, os.Args[1:]...)
	}
	return launch.Launch(ctx, l)
}
