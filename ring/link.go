package ring

import (
	"net"
)

// link is a rank's two data connections in a group, from the left and to the
// right, as an operation uses them: what it sends is a header and a list of
// segments, of which more and more may go while data come in. Only one
// goroutine uses a link, except for close, which ends what is in progress.
type link interface {
	// frame is the operation's header, to be filled in before start.
	frame() []byte
	// queue appends to what the operation will send.
	queue(segment []byte)
	// start begins to send; the first limit bytes of the segments may go.
	start(limit int) error
	// allow lets n more bytes go.
	allow(n int) error
	// read receives at least one byte, and sends meanwhile what may go.
	read(p []byte) (int, error)
	// waitSent waits until the kernel has taken n bytes of the segments, and
	// returns how many it has taken.
	waitSent(n int) (int, error)
	// finish waits until everything was taken; the segments' memory is the
	// caller's again, and the link ready for the next operation.
	finish() error
	close()
}

const (
	// inlineBytes is how much an operation writes without a second thought: it
	// fits the socket's buffer.
	inlineBytes = 16 << 10
	// pieceBytes bounds one write, so that sending and receiving take turns and
	// what is under way stays in the cache.
	pieceBytes = 256 << 10
)

// outgoing is what an operation sends and how far it is.
type outgoing struct {
	head     [headerSize]byte
	segs     [][]byte
	headLeft int // bytes of head to send
	at, off  int // next byte: segs[at][off]
	sent     int // bytes of segments
	limit    int
	total    int
}

func (o *outgoing) begin(limit int) {
	o.headLeft, o.at, o.off, o.sent, o.limit, o.total = headerSize, 0, 0, 0, limit, 0
	for _, b := range o.segs {
		o.total += len(b)
	}
}

// pending is whether something may be sent.
func (o *outgoing) pending() bool { return o.headLeft > 0 || o.sent < min(o.limit, o.total) }

// next is the rest of the header and the next piece of the segments.
func (o *outgoing) next() (head, piece []byte) {
	for o.at < len(o.segs) && o.off == len(o.segs[o.at]) {
		o.at, o.off = o.at+1, 0
	}
	if o.at < len(o.segs) {
		p := o.segs[o.at][o.off:]
		piece = p[:min(len(p), o.limit-o.sent, pieceBytes)]
	}
	return o.head[headerSize-o.headLeft:], piece
}

// took records that n bytes of what next returned are gone.
func (o *outgoing) took(n int) {
	h := min(n, o.headLeft)
	o.headLeft -= h
	o.off += n - h
	o.sent += n - h
}

func (o *outgoing) end() {
	clear(o.segs)
	o.segs = o.segs[:0]
}

// tune sets what connections of data want. Errors are no reason to do without
// the connection: listen has tried what was asked for.
func tune(c net.Conn, congestion string) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetNoDelay(true)
		_ = setCongestion(t, congestion)
	}
}
