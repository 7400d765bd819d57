package ring

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// setCongestion chooses the congestion control of a socket. An empty name means
// cubic, if the kernel has it.
func setCongestion(c syscall.Conn, name string) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	use := name
	if use == "" {
		use = "cubic"
	}
	var set error
	err = raw.Control(func(fd uintptr) {
		set = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, use)
	})
	if set != nil && name != "" {
		err = errors.Join(err, fmt.Errorf("congestion control %q: %w", name, set))
	}
	return err
}

// pollLink sends and receives on the one goroutine that also adds: it tries
// both without blocking, and when neither gets on it waits for either with
// poll; when only one is left to do it blocks in that call. A goroutine a
// direction would hand over at every piece, by way of epoll and the scheduler,
// which on the few cores of a rank costs more than it overlaps. A waiting call
// holds its thread; the runtime lends the thread's P away.
type pollLink struct {
	in, out     int // descriptors, in blocking mode
	left, right int // ranks, for errors

	o    outgoing
	msg  unix.Msghdr
	iov  [2]unix.Iovec
	poll [2]unix.PollFd

	use  sync.RWMutex // held for reading by calls: close waits for them
	gone bool
}

// newLink takes both connections over.
func newLink(in, out net.Conn, left, right int, portable bool, spawn func(func()), fail func(error)) (link, error) {
	if portable {
		return newGoLink(in, out, left, right, spawn, fail), nil
	}
	l := &pollLink{left: left, right: right}
	var errIn, errOut error
	l.in, errIn = detach(in)
	l.out, errOut = detach(out)
	if err := errors.Join(errIn, errOut); err != nil {
		l.close()
		return nil, fmt.Errorf("ring: %w", err)
	}
	return l, nil
}

// detach is c's socket without the runtime's poller, in blocking mode.
func detach(c net.Conn) (int, error) {
	defer c.Close() // the duplicate lives on
	sc, ok := c.(syscall.Conn)
	if !ok {
		return -1, fmt.Errorf("%T has no descriptor", c)
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd, dup := -1, error(nil)
	err = raw.Control(func(orig uintptr) { fd, dup = unix.FcntlInt(orig, unix.F_DUPFD_CLOEXEC, 0) })
	if err = errors.Join(err, dup); err == nil {
		err = unix.SetNonblock(fd, false)
	}
	return fd, err
}

func (l *pollLink) frame() []byte        { return l.o.head[:] }
func (l *pollLink) queue(segment []byte) { l.o.segs = append(l.o.segs, segment) }

func (l *pollLink) start(limit int) error {
	l.o.begin(limit)
	return l.allow(0)
}

// allow sends a first piece at once: the right neighbour may be waiting.
func (l *pollLink) allow(n int) error {
	l.o.limit += n
	l.use.RLock()
	defer l.use.RUnlock()
	if l.o.pending() {
		_, err := l.push(unix.MSG_DONTWAIT)
		return err
	}
	return nil
}

func (l *pollLink) read(p []byte) (int, error) {
	l.use.RLock()
	defer l.use.RUnlock()
	for !l.gone {
		flags := 0
		if l.o.pending() {
			flags = unix.MSG_DONTWAIT
		}
		n, err := l.receive(p, flags)
		if n > 0 || err != nil {
			return n, err
		}
		moved, err := l.push(unix.MSG_DONTWAIT)
		if err != nil {
			return 0, err
		}
		if !moved && l.o.pending() {
			l.wait()
		}
	}
	return 0, &peerError{l.left, net.ErrClosed}
}

func (l *pollLink) waitSent(n int) (int, error) {
	l.use.RLock()
	defer l.use.RUnlock()
	for l.o.sent < n || l.o.headLeft > 0 {
		if _, err := l.push(0); err != nil {
			return l.o.sent, err
		}
	}
	return l.o.sent, nil
}

func (l *pollLink) finish() error {
	_, err := l.waitSent(l.o.total)
	l.o.end()
	return err
}

// push sends one piece of what may go and reports whether any of it went.
func (l *pollLink) push(flags uintptr) (bool, error) {
	head, piece := l.o.next()
	n, err := l.send(head, piece, flags)
	l.o.took(n)
	return n > 0, err
}

// receive is one recv; 0 says that there is nothing yet.
func (l *pollLink) receive(p []byte, flags int) (int, error) {
	n, _, e := syscall.Syscall6(unix.SYS_RECVFROM, uintptr(l.in), uintptr(unsafe.Pointer(unsafe.SliceData(p))),
		uintptr(len(p)), uintptr(flags), 0, 0)
	switch {
	case e == unix.EAGAIN || e == unix.EINTR:
		return 0, nil
	case e != 0:
		return 0, l.wrap(l.left, "recv", e)
	case n == 0:
		return 0, &peerError{l.left, io.EOF}
	}
	return int(n), nil
}

// send is one sendmsg of a and b; 0 says that the socket is full.
func (l *pollLink) send(a, b []byte, flags uintptr) (int, error) {
	if l.gone {
		return 0, &peerError{l.right, net.ErrClosed}
	}
	if len(a) == 0 {
		a, b = b, nil
	}
	l.iov[0].Base, l.iov[1].Base = unsafe.SliceData(a), unsafe.SliceData(b)
	l.iov[0].SetLen(len(a))
	l.iov[1].SetLen(len(b))
	l.msg.Iov = &l.iov[0]
	l.msg.SetIovlen(len(l.iov))
	n, _, e := syscall.Syscall(unix.SYS_SENDMSG, uintptr(l.out), uintptr(unsafe.Pointer(&l.msg)), flags|unix.MSG_NOSIGNAL)
	l.iov = [2]unix.Iovec{}
	switch e {
	case 0:
		return int(n), nil
	case unix.EAGAIN, unix.EINTR:
		return 0, nil
	}
	return 0, l.wrap(l.right, "sendmsg", e)
}

// wait blocks until data have come, or there is room to send, or close has shut
// the sockets down. Errors show in the next call.
func (l *pollLink) wait() {
	l.poll[0] = unix.PollFd{Fd: int32(l.in), Events: unix.POLLIN}
	l.poll[1] = unix.PollFd{Fd: int32(l.out), Events: unix.POLLOUT}
	_, _ = unix.Poll(l.poll[:], -1)
}

func (l *pollLink) wrap(rank int, call string, err error) error {
	return &peerError{rank, os.NewSyscallError(call, err)}
}

func (l *pollLink) close() {
	// A closing goroutine that holds the lock, or waits for it, has shut down
	// already; afterwards the numbers may belong to others.
	if l.use.TryRLock() {
		if !l.gone {
			_ = unix.Shutdown(l.in, unix.SHUT_RDWR)
			_ = unix.Shutdown(l.out, unix.SHUT_RDWR)
		}
		l.use.RUnlock()
	}
	l.use.Lock()
	defer l.use.Unlock()
	if l.gone {
		return
	}
	l.gone = true
	for _, fd := range []int{l.in, l.out} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}
