package launch

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// reap waits for the process to end, kills what is left of its group, and only
// then takes its exit status: until then its number, and its group's, can't
// become anyone else's. at is when it ended.
func (r *rank) reap() (at time.Time, err error) {
	pid := r.cmd.Process.Pid
	for {
		if err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil); err != unix.EINTR {
			break
		}
	}
	at = time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	_ = unix.Kill(-pid, unix.SIGKILL)
	r.reaped = true
	return at, r.cmd.Wait()
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
