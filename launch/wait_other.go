//go:build !linux

package launch

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// reap waits for the process to end and kills what is left of its group right
// after, since a process can't be awaited here without taking its status.
func (r *rank) reap() error {
	err := r.cmd.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reaped = true
	_ = unix.Kill(-r.cmd.Process.Pid, unix.SIGKILL)
	return err
}

// attributes of a rank: a process group of its own.
func attributes(bool) *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
