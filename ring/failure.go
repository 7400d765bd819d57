package ring

import (
	"context"
	"errors"
	"io"
	"net"
	"syscall"
	"time"

	"github.com/tandem-go/tandem/comm"
)

// code classes a failure, so that errors.Is works on ranks that only heard of
// it.
type code uint8

const (
	codeLost     code = iota + 1 // a rank died or a connection broke
	codeMismatch                 // ranks called different things
	codeTimeout                  // a rank's data did not come in time
	codeAborted                  // somebody called Abort, or a context ended
	codeClosed                   // a rank closed its communicator
	codeProtocol                 // bytes that make no sense
	codeEnd
)

// sentinel is what errors.Is finds for a code.
func (c code) sentinel() error {
	switch c {
	case codeLost:
		return comm.ErrLost
	case codeMismatch:
		return comm.ErrMismatch
	case codeTimeout:
		return context.DeadlineExceeded
	case codeAborted:
		return comm.ErrAborted
	case codeClosed:
		return comm.ErrClosed
	}
	return nil
}

// failure is the first thing that went wrong. It travels between ranks; ranks
// in it are numbers of the world.
type failure struct {
	code     code
	weak     bool // a broken connection: a symptom, if somebody knows a cause
	culprit  int  // -1 when unknown
	reporter int
	kind     comm.Kind // 0 when no operation was running
	group    uint64
	seq      uint64
	tag      comm.Tag
	text     string

	cause error // on the rank where it happened; text is its wording
}

// remoteError is a cause that came over the wire, or that has no cause of its own.
type remoteError struct {
	text string
	code code
}

func (e *remoteError) Error() string { return e.text }

// Is finds the sentinel of the code.
func (e *remoteError) Is(target error) bool { return target == e.code.sentinel() }

// err is the cause for OpError.
func (f *failure) err() error {
	if f.cause != nil {
		return f.cause
	}
	return &remoteError{f.text, f.code}
}

// opError is f as the rank of g tells it. o is the operation that fails
// because of it, nil if none; it is named when f happened between operations.
// The first call decides the wording.
func (g *group) opError(f *failure, o *operation, elapsed time.Duration) error {
	if e := g.err.Load(); e != nil {
		return e
	}
	e := &comm.OpError{Op: "idle", Rank: g.rank, Culprit: g.local(f.culprit),
		Seq: f.seq, Tag: f.tag, Elapsed: elapsed, Err: f.err()}
	switch {
	case f.kind != 0:
		e.Op = f.kind.String()
	case o != nil:
		e.Op, e.Seq, e.Tag = o.call.Kind.String(), o.seq, o.call.Tag
	}
	if f.culprit >= 0 && f.culprit < len(g.n.cards) && f.culprit != g.n.o.Rank {
		if a := g.n.cards[f.culprit].Addrs; len(a) > 0 {
			e.Addr = a[0]
		}
	}
	g.err.CompareAndSwap(nil, e)
	return g.err.Load()
}

// classify turns an error of a connection to or from peer into a failure.
func (g *group) classify(o *operation, err error) *failure {
	f := &failure{culprit: -1, reporter: g.n.o.Rank, kind: o.call.Kind, group: g.id, seq: o.seq, tag: o.call.Tag}
	var pe *peerError
	if errors.As(err, &pe) {
		f.culprit = g.world[pe.peer]
	}
	switch {
	case errors.Is(err, comm.ErrMismatch):
		f.code = codeMismatch
	case errors.Is(err, context.DeadlineExceeded):
		f.code = codeTimeout
	case broken(err):
		f.code, f.weak = codeLost, true
		err = &remoteError{"connection broken: " + err.Error(), codeLost}
	default:
		f.code = codeProtocol
	}
	f.cause, f.text = err, err.Error()
	return f
}

// broken reports whether err is what a dead or closed peer looks like.
func broken(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ETIMEDOUT) || errors.Is(err, syscall.ECONNREFUSED)
}

// peerError says which rank of the group a connection leads to.
type peerError struct {
	peer int
	err  error
}

func (e *peerError) Error() string { return e.err.Error() }
func (e *peerError) Unwrap() error { return e.err }
