package launch

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// drainTime is how long the output of an ended rank may go on: what it left in
// the pipe, or what a process outside its group that inherited the pipe writes.
const drainTime = time.Second

// rank is one process of the job.
type rank struct {
	n       int
	cmd     *exec.Cmd
	log     *os.File // nil without Dir
	pipes   []*os.File
	readers sync.WaitGroup
	err     tail
	started time.Time

	mu     sync.Mutex
	reaped bool
	told   bool // we have signalled it to stop
}

// newRank prepares a process and its log, and starts nothing.
func newRank(o *Options, env *environment, alive *os.File, n int) (*rank, error) {
	args := o.Args
	if o.Wrap != nil {
		args = o.Wrap(n, slices.Clone(args))
	}
	r := &rank{n: n, cmd: exec.Command(args[0], args[1:]...)}
	if r.cmd.Err != nil {
		return nil, fmt.Errorf("launch: %w", r.cmd.Err)
	}
	r.cmd.Env = env.of(o, n)
	r.cmd.ExtraFiles = []*os.File{alive}
	r.cmd.SysProcAttr = attributes(o.Foreign)
	if o.Dir != "" {
		mode := os.O_CREATE | os.O_WRONLY | os.O_TRUNC
		if o.Append || o.Generation > 0 { // a restart goes on
			mode = os.O_CREATE | os.O_WRONLY | os.O_APPEND
		}
		f, err := os.OpenFile(filepath.Join(o.Dir, fmt.Sprintf("rank%d.log", n)), mode, 0o644)
		if err != nil {
			return nil, fmt.Errorf("launch: log of rank %d: %w", n, err)
		}
		r.log = f
	}
	return r, nil
}

// start starts the process and the readers of its output.
func (r *rank) start(o *Options, m *mux, secret []byte) error {
	out, outW, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("launch: rank %d: %w", r.n, err)
	}
	errs, errW, err := os.Pipe()
	if err != nil {
		_ = out.Close()
		_ = outW.Close()
		return fmt.Errorf("launch: rank %d: %w", r.n, err)
	}
	r.pipes = []*os.File{out, errs}
	r.cmd.Stdout, r.cmd.Stderr = outW, errW // stdin stays /dev/null
	r.started = time.Now()
	err = r.cmd.Start()
	_ = outW.Close()
	_ = errW.Close()
	if err != nil {
		r.close()
		return fmt.Errorf("launch: start rank %d: %w", r.n, err)
	}
	show := o.Ranks == nil || slices.Contains(o.Ranks, r.n)
	raw := o.Passthrough && r.n == 0
	r.readers.Go(func() { r.copy(o, m, out, o.Stdout, nil, show, raw, secret) })
	r.readers.Go(func() { r.copy(o, m, errs, o.Stderr, r.err.add, show, raw, secret) })
	return nil
}

// copy takes one stream of the rank to its log, its forwarding and its tail.
func (r *rank) copy(o *Options, m *mux, from *os.File, to io.Writer, keep func([]byte), show, raw bool, secret []byte) {
	red := &redactor{secret: secret}
	prefix := fmt.Sprintf("%s%d: ", o.Prefix, r.n)
	split := &lines{emit: func(line []byte) {
		if keep != nil {
			keep(line)
		}
		if show && !raw {
			m.line(to, prefix, line)
		}
	}}
	log := &logWriter{to: r.log, failed: func(err error) {
		o.Logger.Warn("the log of a rank is incomplete", "rank", r.n, "err", err)
	}}
	take := func(p []byte) {
		if len(p) == 0 {
			return
		}
		log.write(p)
		if show && raw {
			m.raw(to, p)
		}
		split.write(p)
	}
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		take(red.feed(buf[:n]))
		if err != nil {
			break
		}
	}
	take(red.rest())
	log.flush()
	split.flush()
}

// wait returns how and when the process ended, after the rest of its group was
// killed and its output has come.
func (r *rank) wait() exit {
	at, err := r.reap()
	r.mu.Lock()
	told := r.told
	r.mu.Unlock()
	timer := time.AfterFunc(drainTime, r.close)
	r.readers.Wait()
	timer.Stop()
	r.close()
	if r.cmd.ProcessState == nil {
		return exit{Outcome{Rank: r.n, PID: r.cmd.Process.Pid, ExitCode: -1, Signal: fmt.Sprint(err)}, at}
	}
	o := outcome(r.n, r.cmd.ProcessState)
	o.ByUs = told
	return exit{o, at}
}

// close closes what the launcher holds of the rank.
func (r *rank) close() {
	for _, p := range r.pipes {
		_ = p.Close()
	}
}

// signal sends sig to the rank, or with group to its process group, as long as
// the number is the rank's.
func (r *rank) signal(sig syscall.Signal, group bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.reaped || r.cmd.Process == nil {
		return
	}
	pid := r.cmd.Process.Pid
	if group {
		pid = -pid
	}
	_ = unix.Kill(pid, sig)
}

// stop signals the group and remembers that the end is our doing.
func (r *rank) stop(sig syscall.Signal) {
	r.mu.Lock()
	r.told = true
	r.mu.Unlock()
	r.signal(sig, true)
	if sig != unix.SIGKILL {
		r.signal(unix.SIGCONT, true) // a process that is suspended hears nothing else
	}
}
