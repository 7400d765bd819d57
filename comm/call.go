package comm

import (
	"errors"
	"fmt"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// ErrMismatch is in the chain when ranks called different things: another
// collective, operation, type, number of elements, root or bucket.
var ErrMismatch = errors.New("comm: ranks disagree")

// ErrLost is in the chain when a rank died or could no longer be reached.
var ErrLost = errors.New("comm: rank lost")

// Kind is which method of Communicator a Call is of.
type Kind uint8

// The kinds. KindSplit and KindBarrier take turns with collectives and are
// numbered with them.
const (
	KindAllReduce Kind = iota + 1
	KindReduceScatter
	KindAllGather
	KindBroadcast
	KindSend
	KindRecv
	KindBarrier
	KindSplit
)

var kindNames = [...]string{
	KindAllReduce: "allreduce", KindReduceScatter: "reduce-scatter", KindAllGather: "all-gather",
	KindBroadcast: "broadcast", KindSend: "send", KindRecv: "recv", KindBarrier: "barrier", KindSplit: "split",
}

// Valid reports whether k is one of the declared kinds.
func (k Kind) Valid() bool { return k >= KindAllReduce && int(k) < len(kindNames) }

func (k Kind) String() string {
	if !k.Valid() {
		return fmt.Sprintf("kind(%d)", uint8(k))
	}
	return kindNames[k]
}

// Call is what ranks must agree on before a backend moves or adds anything.
// The name in Tag is the only part that may differ.
type Call struct {
	Kind Kind
	Op   Op         // AllReduce and ReduceScatter, otherwise Sum
	Type dtype.Type // Invalid for Barrier and Split
	// Count is in elements: all of the buffer of AllReduce, Broadcast, Send and
	// Recv, one rank's block of ReduceScatter and AllGather.
	Count int
	// Root is the root of Broadcast, the sender of Send and Recv, otherwise 0.
	Root int
	Tag  Tag
}

func (c Call) String() string {
	s := c.Kind.String()
	if c.Kind == KindAllReduce || c.Kind == KindReduceScatter {
		s += " " + c.Op.String()
	}
	if c.Type != dtype.Invalid {
		s += fmt.Sprintf(" of %d %v", c.Count, c.Type)
	}
	if c.Kind == KindBroadcast {
		s += fmt.Sprintf(" from rank %d", c.Root)
	}
	if c.Tag.Bucket >= 0 && c.Type != dtype.Invalid {
		s += fmt.Sprintf(" (bucket %d)", c.Tag.Bucket)
	}
	return s
}

// Disagree is nil when two ranks called the same thing, otherwise an error
// that wraps ErrMismatch, says what differs and names both calls.
func Disagree(rankA int, a Call, rankB int, b Call) error {
	what := a.differs(b)
	if what == "" {
		return nil
	}
	return fmt.Errorf("%w on the %s: rank %d called %v, rank %d called %v", ErrMismatch, what, rankA, a, rankB, b)
}

func (c Call) differs(d Call) string {
	if c.Kind == KindSend || c.Kind == KindRecv {
		if d.Kind == KindSend || d.Kind == KindRecv {
			d.Kind = c.Kind
		}
	}
	switch {
	case c.Kind != d.Kind:
		return "collective"
	case c.Op != d.Op:
		return "operation"
	case c.Type != d.Type:
		return "type"
	case c.Count != d.Count:
		return "number of elements"
	case c.Root != d.Root:
		return "root"
	case c.Tag.Bucket != d.Tag.Bucket:
		return "bucket"
	}
	return ""
}

// Bytes is the size of one Count.
func (c Call) Bytes() int { return c.Count * c.Type.Size() }

// Prepare checks the arguments of a collective before anything is queued and
// completes c.Count. dst and src are as in Communicator; Broadcast, Send and
// Recv pass their one buffer twice. The errors are the caller's: nothing was
// sent and the communicator is as before.
func (c *Call) Prepare(rank, size int, dst, src device.Buffer) error {
	if err := c.check(rank, size); err != nil {
		return err
	}
	if dst == nil || src == nil {
		return fmt.Errorf("comm: %v on rank %d: nil buffer", c.Kind, rank)
	}
	want, unit := dst.Len(), dst.Len() // want is what src must hold
	switch c.Kind {
	case KindReduceScatter:
		want = dst.Len() * size
	case KindAllGather:
		unit = src.Len()
		want = dst.Len() / size
	}
	if src.Len() != want || (c.Kind == KindAllGather && dst.Len()%size != 0) {
		return fmt.Errorf("comm: %v on rank %d of %d: dst has %d bytes, src %d", c.Kind, rank, size, dst.Len(), src.Len())
	}
	if unit%c.Type.Size() != 0 {
		return fmt.Errorf("comm: %v on rank %d: %d bytes are no whole number of %v", c.Kind, rank, unit, c.Type)
	}
	c.Count = unit / c.Type.Size()
	return nil
}

func (c *Call) check(rank, size int) error {
	switch {
	case !c.Kind.Valid():
		return fmt.Errorf("comm: invalid kind %d", c.Kind)
	case !c.Type.Valid():
		return fmt.Errorf("comm: %v on rank %d: invalid %v", c.Kind, rank, c.Type)
	case int(c.Op) >= len(opNames):
		return fmt.Errorf("comm: %v on rank %d: invalid %v", c.Kind, rank, c.Op)
	case c.Root < 0 || c.Root >= size:
		return fmt.Errorf("comm: %v on rank %d: rank %d is outside the group of %d", c.Kind, rank, c.Root, size)
	}
	return nil
}

// HostBytes is the memory of b, or an error that names the collective when the
// host can't address it.
func HostBytes(k Kind, b device.Buffer) ([]byte, error) {
	p, ok := b.HostBytes()
	if !ok {
		return nil, fmt.Errorf("comm: %v: buffer of %d bytes is not host memory: %w", k, b.Len(), device.ErrUnsupported)
	}
	return p, nil
}
