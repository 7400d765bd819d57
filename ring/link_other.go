//go:build !linux

package ring

import (
	"fmt"
	"net"
	"syscall"
)

// setCongestion chooses the congestion control of a socket, which is Linux's.
func setCongestion(_ syscall.Conn, name string) error {
	if name != "" {
		return fmt.Errorf("congestion control %q can't be chosen on this system", name)
	}
	return nil
}

// newLink takes both connections over.
func newLink(in, out net.Conn, left, right int, _ bool, spawn func(func()), fail func(error)) (link, error) {
	return newGoLink(in, out, left, right, spawn, fail), nil
}
