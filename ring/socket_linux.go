package ring

import (
	"net"

	"golang.org/x/sys/unix"
)

// tune sets what a data connection wants. Errors are ignored: a socket without
// the option still works, only slower.
func tune(c net.Conn, congestion string) {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return
	}
	_ = t.SetNoDelay(true)
	if congestion == "" {
		congestion = "cubic"
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, congestion)
	})
}
