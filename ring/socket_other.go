//go:build !linux

package ring

import "net"

// tune sets what a data connection wants; congestion control per socket is
// Linux's.
func tune(c net.Conn, _ string) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetNoDelay(true)
	}
}
