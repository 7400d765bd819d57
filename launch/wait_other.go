//go:build !linux

package launch

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// reap waits for the process to end and kills what is left of its group right
// after, since a process can't be awaited here without taking its status.
// at is when it ended.
func (r *rank) reap() (at time.Time, err error) {
	err = r.cmd.Wait()
	at = time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reaped = true
	_ = unix.Kill(-r.cmd.Process.Pid, unix.SIGKILL)
	return at, err
}

// attributes of a rank: a process group of its own.
func attributes(bool) *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
