// Package comm is what every communication backend promises: collectives over
// a fixed group of ranks, enqueued on a stream, that fail instead of hanging.
// comm/commtest proves it for a backend.
package comm

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// Op is the reduction of AllReduce and ReduceScatter.
type Op uint8

// The reductions. Avg is the sum divided by the number of ranks; for float16
// the division comes before the sum, so that it can't overflow where the
// average is finite. On integers Avg truncates towards zero.
const (
	Sum Op = iota
	Avg
	Min
	Max
	Prod
)

func (o Op) String() string {
	if int(o) < len(opNames) {
		return opNames[o]
	}
	return fmt.Sprintf("op(%d)", uint8(o))
}

var opNames = [...]string{Sum: "sum", Avg: "avg", Min: "min", Max: "max", Prod: "prod"}

// Tag says what a collective is for, in errors and recorders. Ranks must agree
// on the bucket, since buckets in another order would be added to one another;
// the name is not compared.
type Tag struct {
	// Name is the purpose, such as "bucket", "step header" or "broadcast".
	Name string
	// Bucket is the bucket's number, or -1.
	Bucket int
}

// Communicator is a group of Size ranks. Collectives enqueue on s and return:
// nil says that the operation was queued, not that it has run. Every rank must
// call the same collectives, in the same order, with the same type, operation
// and number of elements; where they differ, every rank gets an error that
// names both values. Lengths are those of the buffers, in whole elements; zero
// elements are fine and move nothing.
//
// A failure poisons s and shows in Err. After one, only Close works: every
// other call fails at once with the first cause, and buffers are undefined.
//
// Operations of one communicator run one at a time, in the order in which they
// were enqueued; use one stream. Methods may be called from several goroutines
// only for Err, Abort and Close.
type Communicator interface {
	// Rank is this process's number in the group, 0 ≤ Rank < Size.
	Rank() int
	// Size is the number of ranks, at least 1.
	Size() int
	// Alloc returns zeroed memory that the backend reaches without a copy.
	Alloc(bytes int) (device.Buffer, error)

	// AllReduce combines src of all ranks into dst of all ranks. dst and src
	// have one length and may be the same buffer. All ranks get the same bits.
	AllReduce(s device.Stream, dst, src device.Buffer, t dtype.Type, op Op, tag Tag) error
	// ReduceScatter combines src of all ranks and leaves block Rank of the
	// result in dst; len(src) = Size·len(dst).
	ReduceScatter(s device.Stream, dst, src device.Buffer, t dtype.Type, op Op, tag Tag) error
	// AllGather leaves src of rank i in block i of dst; len(dst) = Size·len(src).
	AllGather(s device.Stream, dst, src device.Buffer, t dtype.Type, tag Tag) error
	// Broadcast copies buf of rank root to all others.
	Broadcast(s device.Stream, buf device.Buffer, t dtype.Type, root int, tag Tag) error
	// Send and Recv move one buffer from this rank to peer, or back. Only the
	// two ranks call them. They match in order for each pair.
	Send(s device.Stream, src device.Buffer, t dtype.Type, peer int, tag Tag) error
	Recv(s device.Stream, dst device.Buffer, t dtype.Type, peer int, tag Tag) error
	// Barrier returns when all ranks have called it. It is for the host and
	// must not be called while collectives of this communicator are queued.
	Barrier(ctx context.Context) error

	// Split makes child groups: ranks with the same colour form one, ordered by
	// (key, rank). It is collective. A negative colour joins no group: nil, nil.
	// A child fails when its parent does, and the reverse.
	Split(ctx context.Context, color, key int) (Communicator, error)

	// Err is the first failure, nil while there is none.
	Err() error
	// Abort fails the group on every rank with cause; it returns at once.
	Abort(cause error)
	// Close releases sockets, goroutines and memory. It is idempotent and safe
	// in mid-operation, which then fails on the other ranks as if this one died.
	Close() error
}

// ErrClosed is the cause of operations on a closed communicator.
var ErrClosed = errors.New("comm: communicator is closed")

// ErrAborted is in the chain of errors that follow from Abort.
var ErrAborted = errors.New("comm: aborted")

// OpError says which collective failed, where and because of whom. All
// survivors' errors name the same Culprit, Seq and Bucket where the backend
// could agree on them. errors.Is works on the cause; a timeout is
// context.DeadlineExceeded.
type OpError struct {
	Op      string // "allreduce", "broadcast", …
	Rank    int    // who reports
	Culprit int    // the rank at fault, -1 when unknown
	Addr    string // the culprit's address, where there is one
	Seq     uint64 // sequence number in the communicator
	Tag     Tag
	Elapsed time.Duration // since the operation was at the head of the queue, 0 when unknown
	Err     error         // the cause
}

func (e *OpError) Error() string {
	s := fmt.Sprintf("%s (seq %d", e.Op, e.Seq)
	if e.Tag.Name != "" {
		s += ", " + e.Tag.Name
		if e.Tag.Bucket >= 0 {
			s += fmt.Sprintf(" %d", e.Tag.Bucket)
		}
	}
	s += fmt.Sprintf(") on rank %d", e.Rank)
	if e.Culprit >= 0 {
		s += fmt.Sprintf(": rank %d", e.Culprit)
		if e.Addr != "" {
			s += " at " + e.Addr
		}
	}
	return s + ": " + e.Err.Error()
}

func (e *OpError) Unwrap() error { return e.Err }
