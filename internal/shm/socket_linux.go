//go:build linux && (amd64 || arm64)

package shm

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-go/tandem/internal/auth"
)

const (
	handshakeTime = 5 * time.Second
	maxStrangers  = 1024 // connections served at once
	requestSize   = 8
)

// Find returns the segment of an id, waiting until ctx ends for one that will
// exist.
type Find func(ctx context.Context, id uint64) (*Segment, error)

// Server hands this process's segments to peers that prove the job's secret.
type Server struct {
	l      *net.UnixListener
	self   auth.Hello
	secret auth.Secret
	find   Find
	log    *slog.Logger
	ctx    context.Context // ends with the server: it bounds what its own goroutines wait for
	stop   context.CancelFunc
	wg     sync.WaitGroup
	slots  chan struct{}
}

// Serve listens on a socket in the abstract namespace, which no file system
// has to hold and which vanishes with the process.
func Serve(self auth.Hello, secret auth.Secret, find Find, log *slog.Logger) (*Server, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: "@tandem-" + rand.Text(), Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("shm: %w", err)
	}
	s := &Server{l: l, self: self, secret: secret, find: find, log: log, slots: make(chan struct{}, maxStrangers)}
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.wg.Go(s.accept)
	return s, nil
}

// Addr is what Open takes.
func (s *Server) Addr() string { return s.l.Addr().String() }

// Close ends the server and all its connections.
func (s *Server) Close() error {
	s.stop()
	err := s.l.Close()
	s.wg.Wait()
	return err
}

func (s *Server) accept() {
	for {
		c, err := s.l.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			s.log.Warn("accept", "addr", s.Addr(), "err", err)
			time.Sleep(10 * time.Millisecond)
			continue
		}
		select {
		case s.slots <- struct{}{}:
			s.wg.Go(func() {
				defer func() { <-s.slots }()
				if err := s.serve(c); err != nil && s.ctx.Err() == nil {
					s.log.Warn("refused to share memory", "err", err)
				}
			})
		default:
			_ = c.Close()
		}
	}
}

// serve answers one request. The connection has no other user, so what ends it
// is the deadline, the server's end or the peer's.
func (s *Server) serve(c *net.UnixConn) error {
	defer c.Close()
	defer context.AfterFunc(s.ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })()
	if err := sameUser(c); err != nil {
		return err
	}
	deadline := time.Now().Add(handshakeTime)
	if _, err := auth.Server(c, s.secret, s.self, deadline); err != nil {
		return err
	}
	if err := c.SetDeadline(deadline); err != nil {
		return err
	}
	var b [requestSize]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return err
	}
	if s.ctx.Err() != nil {
		return s.ctx.Err()
	}
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	s.wg.Go(func() { // the peer that gives up closes; it never writes again
		_ = c.SetReadDeadline(time.Time{})
		_, _ = c.Read(make([]byte, 1))
		cancel()
	})
	seg, err := s.find(ctx, binary.LittleEndian.Uint64(b[:]))
	if err != nil {
		return fmt.Errorf("shm: segment %x: %w", b, err)
	}
	return seg.send(c)
}

// send passes the descriptor, with one byte, as there must be one.
func (s *Segment) send(c *net.UnixConn) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		return os.ErrClosed
	}
	_ = c.SetWriteDeadline(time.Now().Add(handshakeTime))
	_, _, err := c.WriteMsgUnix([]byte{1}, unix.UnixRights(s.fd), nil)
	return err
}

// sameUser refuses processes of other users before anything is read.
func sameUser(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var get error
	err = raw.Control(func(fd uintptr) {
		cred, get = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err = errors.Join(err, get); err != nil {
		return err
	}
	if int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("shm: process %d belongs to user %d, this one to %d", cred.Pid, cred.Uid, os.Geteuid())
	}
	return nil
}

// Open maps segment id of the process that serves at addr, which must prove
// the secret and that it is rank. It waits until ctx ends for a segment that
// does not exist yet.
func Open(ctx context.Context, addr string, self auth.Hello, secret auth.Secret, rank int, id uint64) (*Mapping, error) {
	m, err := open(ctx, addr, self, secret, rank, id)
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, fmt.Errorf("shm: rank %d asks rank %d for segment %x: %w", self.Rank, rank, id, err)
	}
	return m, nil
}

func open(ctx context.Context, addr string, self auth.Hello, secret auth.Secret, rank int, id uint64) (*Mapping, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", addr)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	c := conn.(*net.UnixConn)
	if err := sameUser(c); err != nil {
		return nil, err
	}
	peer, err := auth.Client(c, secret, self, time.Now().Add(handshakeTime))
	if err == nil && peer.Rank != rank {
		err = fmt.Errorf("%s is rank %d, not rank %d", addr, peer.Rank, rank)
	}
	if err != nil {
		return nil, err
	}
	if ctx.Err() != nil { // the handshake has set the deadline anew
		return nil, context.Cause(ctx)
	}
	if _, err := c.Write(binary.LittleEndian.AppendUint64(nil, id)); err != nil {
		return nil, err
	}
	fd, err := receive(c)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return mapFile(fd)
}

// receive takes the one descriptor that send passes.
func receive(c *net.UnixConn) (int, error) {
	b, oob := make([]byte, 1), make([]byte, unix.CmsgSpace(4))
	n, oobn, flags, _, err := c.ReadMsgUnix(b, oob)
	switch {
	case err != nil:
		return -1, err
	case n == 0:
		return -1, io.ErrUnexpectedEOF
	}
	var fds []int
	if msgs, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil {
		for i := range msgs {
			if more, err := unix.ParseUnixRights(&msgs[i]); err == nil {
				fds = append(fds, more...)
			}
		}
	}
	if len(fds) != 1 || flags&syscall.MSG_CTRUNC != 0 {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
		return -1, fmt.Errorf("shm: %d descriptors came, want 1", len(fds))
	}
	return fds[0], nil
}
