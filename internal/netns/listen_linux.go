package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Listen opens a TCP listener on a free port of host rank. A socket stays in
// the namespace in which it was made, so this process serves the hosts without
// being one of them.
func (n *Net) Listen(ctx context.Context, rank int) (ln net.Listener, err error) {
	err = inside(n.host(rank), func() error {
		var lc net.ListenConfig
		ln, err = lc.Listen(ctx, "tcp", net.JoinHostPort(n.Addr(rank), "0"))
		return err
	})
	return ln, err
}

// inside runs f on a thread that is in the namespace for that long.
func inside(ns string, f func() error) error {
	runtime.LockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("netns: %w", err)
	}
	defer home.Close()
	there, err := os.Open("/run/netns/" + ns)
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("netns: %w", err)
	}
	defer there.Close()
	if err := unix.Setns(int(there.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("netns: entering %s: %w", ns, err)
	}
	err = f()
	if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
		// The thread stays locked, so the runtime ends it with its goroutine.
		return errors.Join(err, fmt.Errorf("netns: leaving %s: %w", ns, back))
	}
	runtime.UnlockOSThread()
	return err
}
