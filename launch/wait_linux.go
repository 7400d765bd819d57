package launch

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// reap waits for the process to end, kills what is left of its group, and only
// then takes its exit status: until then its number, and its group's, can't
// become anyone else's.
func (r *rank) reap() error {
	pid := r.cmd.Process.Pid
	for {
		if err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil); err != unix.EINTR {
			break
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	_ = unix.Kill(-pid, unix.SIGKILL)
	r.reaped = true
	return r.cmd.Wait()
}

// attributes of a rank: a process group of its own. Pdeathsig, for programs
// without Guard, follows the thread that forked, which Launch keeps.
func attributes(foreign bool) *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Setpgid: true}
	if foreign {
		a.Pdeathsig = syscall.SIGKILL
	}
	return a
}
