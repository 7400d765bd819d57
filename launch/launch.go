package launch

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"github.com/tandem-go/tandem/internal/auth"
	"github.com/tandem-go/tandem/rendezvous"
	"golang.org/x/sys/unix"
)

// settle is how long after a failure others may still be found to have failed
// before it, or for a better reason: a rank that is killed takes the others
// down with errors of their own, within milliseconds.
const settle = 150 * time.Millisecond

// Launch starts the ranks and returns when all have ended: nil when every one
// exited with 0, a *RankError for the first that did not, a *SignalError when
// a forwarded SIGINT, SIGTERM or SIGHUP ended the job, or the cause of ctx. In all
// cases nothing of the job is left: what doesn't stop within Options.Grace of
// a SIGTERM is killed, as are the remains of each rank's process group.
//
// A program that starts itself must tell from its environment that it is a
// rank (rendezvous.FromEnv), or it starts itself without end.
func Launch(ctx context.Context, o Options) error {
	o, err := o.validate()
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		if o.Listener != nil {
			_ = o.Listener.Close()
		}
		return err
	}
	// Pdeathsig fires when the thread that forked ends, so keep it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	j, err := prepare(&o)
	if err != nil {
		return err
	}
	defer j.release()
	if err := j.start(); err != nil {
		return err
	}
	return j.watch(ctx)
}

// job is one Launch.
type job struct {
	o      *Options
	secret auth.Secret
	store  *rendezvous.Server
	alive  [2]*os.File // the liveness pipe, read and write end
	ranks  []*rank
	before memory
	mux    mux

	exits   chan exit
	signals chan os.Signal
	running int

	failures []exit // in the order in which they were seen
	stopped  error  // why we stop without a failure: a signal or ctx
	stopping bool
	signaled bool // a signal to end has come
	settled  <-chan time.Time
	deadline <-chan time.Time
	limited  bool // deadline was set
}

// prepare opens everything that can fail before a process is started.
func prepare(o *Options) (*job, error) {
	j := &job{
		o: o, secret: auth.NewSecret(), before: readMemory("/"),
		exits: make(chan exit, o.NProc), signals: make(chan os.Signal, 8),
	}
	if err := j.open(); err != nil {
		j.release()
		return nil, err
	}
	return j, nil
}

func (j *job) open() error {
	o := j.o
	var err error
	ln := o.Listener
	if ln == nil {
		if ln, err = rendezvous.Listen(context.Background(), net.JoinHostPort("127.0.0.1", "0")); err != nil {
			return err
		}
	}
	j.store = rendezvous.Serve(ln, rendezvous.ServerOptions{
		Secret: j.secret, JobID: o.JobID, Generation: o.Generation, Logger: o.Logger,
	})
	if o.Dir != "" {
		if err := os.MkdirAll(o.Dir, 0o755); err != nil {
			return fmt.Errorf("launch: directory for the logs: %w", err)
		}
		if err := os.Rename(errorFile(o.Dir), errorFile(o.Dir)+".1"); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("launch: put the last job's error aside: %w", err)
		}
	}
	if j.alive[0], j.alive[1], err = os.Pipe(); err != nil {
		return fmt.Errorf("launch: %w", err)
	}
	name, err := livenessName(j.alive[0])
	if err != nil {
		return fmt.Errorf("launch: liveness pipe: %w", err)
	}
	env, err := newEnvironment(o, j.secret, j.store.Addr(), name)
	if err != nil {
		return err
	}
	for n := range o.NProc {
		r, err := newRank(o, env, j.alive[0], n)
		if err != nil {
			return err
		}
		j.ranks = append(j.ranks, r)
	}
	return nil
}

func (j *job) release() {
	if j.store != nil {
		_ = j.store.Close()
	}
	for _, f := range j.alive {
		if f != nil {
			_ = f.Close()
		}
	}
	for _, r := range j.ranks {
		if r.log != nil {
			_ = r.log.Close()
		}
	}
	signal.Stop(j.signals)
}

// start starts all ranks, or none: those that were started are killed when a
// later one can't be.
func (j *job) start() error {
	if !j.o.KeepSignals {
		signal.Notify(j.signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2)
		if !signal.Ignored(syscall.SIGHUP) { // as under nohup
			signal.Notify(j.signals, syscall.SIGHUP)
		}
	}
	for i, r := range j.ranks {
		if err := r.start(j.o, &j.mux, []byte(j.secret.Reveal())); err != nil {
			for _, s := range j.ranks[:i] {
				s.stop(unix.SIGKILL)
				s.wait()
			}
			return err
		}
	}
	for _, r := range j.ranks {
		j.running++
		go func() { j.exits <- r.wait() }()
	}
	j.o.Logger.Debug("ranks started", "nproc", j.o.NProc, "job", j.o.JobID, "generation", j.o.Generation, "store", j.store.Addr().String())
	return nil
}

// watch handles what happens until the last rank has ended.
func (j *job) watch(ctx context.Context) error {
	done := ctx.Done()
	for j.running > 0 {
		select {
		case e := <-j.exits:
			j.running--
			j.ended(e)
		case s := <-j.signals:
			j.forward(s.(syscall.Signal))
		case <-done:
			done = nil
			j.stop(context.Cause(ctx))
		case <-j.settled:
			j.settled = nil
			j.stop(nil)
		case <-j.deadline:
			j.deadline = nil
			j.o.Logger.Warn("ranks did not stop in time: killing them", "grace", j.o.Grace, "running", j.running)
			j.signalAll(unix.SIGKILL)
		}
	}
	return j.verdict()
}

// ended books one rank's end. The first failure stops the job, but not before
// those that failed at the same time had a chance to be seen.
func (j *job) ended(e exit) {
	j.o.Logger.Debug("rank ended", "rank", e.Rank, "code", e.ExitCode, "signal", e.Signal)
	if e.ok() {
		return
	}
	j.failures = append(j.failures, e)
	if j.stopping {
		j.limit() // what is not in order doesn't get the time of an orderly end
	}
	if len(j.failures) == 1 && j.running > 0 && !j.stopping {
		j.settled = time.After(settle)
	}
}

// forward passes a signal on. SIGINT, SIGTERM and SIGHUP go to the whole groups, as
// from a terminal, and end the job; a second one kills it. A caller whose ctx
// ends with the same signal may have stopped the job already: that is the first.
func (j *job) forward(s syscall.Signal) {
	switch {
	case s == syscall.SIGUSR1 || s == syscall.SIGUSR2:
		for _, r := range j.ranks {
			r.signal(s, false)
		}
	case j.signaled:
		j.signalAll(unix.SIGKILL)
	case !j.stopping:
		j.signaled = true
		j.begin(&SignalError{s}, s)
	default:
		j.signaled = true
		if j.stopped != nil {
			j.stopped = &SignalError{s}
		}
	}
}

// stop asks all ranks to end, once.
func (j *job) stop(why error) {
	if !j.stopping {
		j.begin(why, unix.SIGTERM)
	}
	j.limit()
}

// limit kills, after the grace, what is still running then.
func (j *job) limit() {
	if !j.limited {
		j.limited, j.deadline = true, time.After(j.o.Grace)
	}
}

func (j *job) begin(why error, s syscall.Signal) {
	j.stopping = true
	if len(j.failures) == 0 {
		j.stopped = why
	}
	if !j.o.Orderly || !j.signaled {
		j.limit()
	}
	j.signalAll(s)
}

func (j *job) signalAll(s syscall.Signal) {
	for _, r := range j.ranks {
		r.stop(s)
	}
}

// verdict is what Launch returns. A job that ends well after it was told to
// stop by a signal has ended well: it may have saved its state.
func (j *job) verdict() error {
	if len(j.failures) == 0 || j.stopped != nil {
		var s *SignalError
		if errors.As(j.stopped, &s) && len(j.failures) == 0 {
			return nil
		}
		return j.stopped
	}
	first := culprit(j.failures, j.blame())
	f := j.failures[first]
	r := j.ranks[f.Rank]
	e := &RankError{Outcome: f.Outcome, Stderr: r.err.last(), Time: f.at, Elapsed: f.at.Sub(r.started)}
	for i, o := range j.failures {
		if i != first {
			e.Hurt = append(e.Hurt, o.Outcome)
		}
	}
	if f.signal == unix.SIGKILL && !f.ByUs {
		e.Hint = readMemory("/").hint(j.before)
	}
	if r.log != nil {
		e.Log = r.log.Name()
		if err := e.write(j.o.Dir); err != nil {
			j.o.Logger.Warn("the error file could not be written", "dir", j.o.Dir, "err", err)
		}
	}
	return e
}

// blame reads whom the ranks have accused.
func (j *job) blame() map[int]int {
	env := rendezvous.Env{Generation: j.o.Generation}
	s := rendezvous.Prefix(j.store.Store(), env.Prefix())
	m := map[int]int{}
	for _, f := range j.failures {
		v, err := s.Get(context.Background(), blameKey(f.Rank)) // in this process: does not block
		if c, e := strconv.Atoi(string(v)); err == nil && e == nil {
			m[f.Rank] = c
		}
	}
	return m
}
