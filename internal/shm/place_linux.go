//go:build linux && (amd64 || arm64)

package shm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Here is this process's place, or why it can't share memory: every call that
// sharing needs is tried once.
func Here(ctx context.Context) (Place, error) {
	if err := probe(ctx); err != nil {
		return Place{}, err
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return Place{}, fmt.Errorf("shm: %w", err)
	}
	ns, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return Place{}, fmt.Errorf("shm: %w", err)
	}
	return Place{Boot: strings.TrimSpace(string(boot)), Net: ns, User: os.Geteuid()}, nil
}

// probe passes a small segment to itself.
func probe(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if os.Getpagesize() != pageSize {
		return fmt.Errorf("shm: pages of %d bytes: %w", os.Getpagesize(), ErrUnsupported)
	}
	if err := probeWait(); err != nil {
		return fmt.Errorf("shm: futex: %w: %w", ErrUnsupported, err)
	}
	s, err := Create(pageSize)
	if err != nil {
		return err
	}
	fd, err := passToSelf(s.fd)
	if err != nil {
		_ = s.Close()
		return fmt.Errorf("shm: pass a descriptor: %w: %w", ErrUnsupported, err)
	}
	m, err := mapFile(fd)
	_ = unix.Close(fd)
	if err != nil {
		return errors.Join(err, s.Close())
	}
	s.b[0] = 1
	if m.b[0] != 1 {
		err = fmt.Errorf("shm: two mappings of one segment differ: %w", ErrUnsupported)
	}
	return errors.Join(err, m.Close(), s.Close())
}

func passToSelf(fd int) (int, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	if err := unix.Sendmsg(pair[0], []byte{1}, unix.UnixRights(fd), nil, unix.MSG_NOSIGNAL); err != nil {
		return -1, err
	}
	b, oob := make([]byte, 1), make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(pair[1], b, oob, syscall.MSG_CMSG_CLOEXEC)
	if err != nil {
		return -1, err
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(msgs) != 1 {
		return -1, errors.Join(err, errors.New("no descriptor came"))
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil {
		return -1, err
	}
	return fds[0], nil
}
