package launch

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// livenessFD is where a rank finds the read end of the launcher's pipe.
const livenessFD = 3

// Launched says that this process was started by Launch.
func Launched() bool { return os.Getenv(envLaunched) != "" }

// Guard makes this process die with the launcher that started it, together
// with its process group; without a launcher it does nothing. The launcher
// holds the other end of a pipe and never writes, so that the end of the pipe
// is the end of the launcher, however it died. Only a rank's first call has an
// effect, and processes that the rank starts are not affected.
func Guard() {
	pipe := inherited(os.Getenv(envLiveness))
	_ = os.Unsetenv(envLiveness)
	if pipe == nil {
		return
	}
	go func() {
		var b [1]byte
		if _, err := pipe.Read(b[:]); err != io.EOF {
			return
		}
		// Nothing is said: whoever read our output is gone, too.
		if unix.Getpgrp() == unix.Getpid() {
			_ = unix.Kill(0, unix.SIGKILL)
		}
		os.Exit(1) // behind a wrapper, whose group is not ours to kill
	}()
}

// inherited opens the pipe that "fd:inode" names, or returns nil when this
// process got the variable without the pipe.
func inherited(s string) *os.File {
	var fd int
	var inode uint64
	if n, _ := fmt.Sscanf(s, "%d:%d", &fd, &inode); n != 2 {
		return nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || uint64(st.Ino) != inode || st.Mode&unix.S_IFMT != unix.S_IFIFO {
		return nil
	}
	unix.CloseOnExec(fd)
	return os.NewFile(uintptr(fd), "liveness")
}

// livenessName is what inherited understands, for the read end r.
func livenessName(r *os.File) (string, error) {
	var st unix.Stat_t
	c, err := r.SyscallConn()
	if err != nil {
		return "", err
	}
	if e := c.Control(func(fd uintptr) { err = unix.Fstat(int(fd), &st) }); e != nil || err != nil {
		return "", errors.Join(e, err)
	}
	return fmt.Sprintf("%d:%d", livenessFD, uint64(st.Ino)), nil
}

// TerminalWidth is the number of columns of the terminal that this process's
// output reaches, 0 when it reaches none: its own, or the launcher's when rank
// 0's output is passed through.
func TerminalWidth() int {
	if n, err := strconv.Atoi(os.Getenv(envTerminal)); err == nil && n > 0 {
		return n
	}
	return terminalWidth(os.Stdout)
}

func terminalWidth(w any) int {
	f, ok := w.(*os.File)
	if !ok {
		return 0
	}
	c, err := f.SyscallConn()
	if err != nil {
		return 0
	}
	width := 0
	_ = c.Control(func(fd uintptr) {
		if ws, err := unix.IoctlGetWinsize(int(fd), unix.TIOCGWINSZ); err == nil {
			width = max(int(ws.Col), 1)
		}
	})
	return width
}
