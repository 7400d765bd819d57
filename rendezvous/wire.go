package rendezvous

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// The protocol, after authentication. Both directions carry frames: a 32-bit
// big-endian length and that many bytes.
//
//	request  = op (1) · id (8) · ack (8) · body
//	response = status (1) · id (8) · body
//	text     = length (4) · bytes
//
// ack says that the client has the answers to all its changes with a smaller
// id; the server keeps the others, so that a change sent again after a broken
// connection is answered, not made twice. The first request names the session.
type opcode uint8

const (
	opSession opcode = iota + 1 // session (16 bytes); no response
	opSet                       // key text, value text
	opGet                       // key text → value
	opWait                      // count (4), key texts
	opCancel                    // forget the wait with this id; no response
	opAdd                       // key text, delta (8) → sum (8)
	opCAS                       // key text, old present (1), old text, new text → present (1), value
	opDelete                    // key text
	opBye                       // the session ends; no response
)

// changes says whether an operation may be made only once.
func (o opcode) changes() bool { return o == opSet || o == opAdd || o == opCAS || o == opDelete }

var opNames = map[opcode]string{
	opSet: "set", opGet: "get", opWait: "wait", opAdd: "add", opCAS: "compare-and-set", opDelete: "delete",
}

func (o opcode) String() string { return opNames[o] }

type status uint8

const (
	statusOK status = iota
	statusNotFound
	statusClosed
	statusNotInteger
	statusError // body: the text
)

const (
	headRequest  = 17
	headResponse = 9
	maxFrame     = 2*MaxValue + 1<<20 // fits the largest compare-and-set and wait
	maxQueued    = 4 * maxFrame       // bytes that a peer who does not read may cause

	frameTimeout = 30 * time.Second // for a frame that has begun, either way
)

var errFrame = errors.New("rendezvous: malformed frame")

// begin starts a frame with room for its length.
func begin(head ...byte) []byte { return append(make([]byte, 4, 64), head...) }

// finish writes the length into a frame's first four bytes.
func finish(b []byte) []byte {
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	return b
}

func request(op opcode, id, ack uint64) []byte {
	b := begin(byte(op))
	b = binary.BigEndian.AppendUint64(b, id)
	return binary.BigEndian.AppendUint64(b, ack)
}

func response(s status, id uint64, body []byte) []byte {
	b := begin(byte(s))
	b = binary.BigEndian.AppendUint64(b, id)
	return finish(append(b, body...))
}

func putText[T string | []byte](b []byte, t T) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(len(t)))
	return append(b, t...)
}

// readFrame reads one frame. It waits for the first byte as long as it takes,
// for the rest at most frameTimeout. A length above the limit is refused
// before anything is allocated.
func readFrame(c net.Conn, r *bufio.Reader, least int) ([]byte, error) {
	if _, err := r.Peek(1); err != nil {
		return nil, err
	}
	_ = c.SetReadDeadline(time.Now().Add(frameTimeout))
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := int(binary.BigEndian.Uint32(head[:]))
	if n < least || n > maxFrame {
		return nil, fmt.Errorf("%w: length %d, want %d to %d", errFrame, n, least, maxFrame)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return nil, err
	}
	return b, c.SetReadDeadline(time.Time{})
}

// parser takes a body apart; the first failure sticks.
type parser struct {
	b   []byte
	bad bool
}

func (p *parser) take(n int) []byte {
	if p.bad || n < 0 || n > len(p.b) {
		p.bad = true
		return nil
	}
	v := p.b[:n:n]
	p.b = p.b[n:]
	return v
}

func (p *parser) u8() byte {
	if v := p.take(1); v != nil {
		return v[0]
	}
	return 0
}

func (p *parser) u32() uint32 {
	if v := p.take(4); v != nil {
		return binary.BigEndian.Uint32(v)
	}
	return 0
}

func (p *parser) u64() uint64 {
	if v := p.take(8); v != nil {
		return binary.BigEndian.Uint64(v)
	}
	return 0
}

func (p *parser) text() []byte { return p.take(int(p.u32())) }

// end reports whether everything was taken and nothing missing.
func (p *parser) end() error {
	if p.bad || len(p.b) != 0 {
		return errFrame
	}
	return nil
}

// outbox is the queue of frames to one peer. Pushing never blocks, so a slow
// peer delays nobody else.
type outbox struct {
	mu     sync.Mutex
	frames net.Buffers
	bytes  int
	wake   chan struct{}
}

func newOutbox() *outbox { return &outbox{wake: make(chan struct{}, 1)} }

// push queues a frame, or reports false when the peer has let too much pile up.
func (o *outbox) push(frame []byte) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.bytes > maxQueued {
		return false
	}
	o.frames = append(o.frames, frame)
	o.bytes += len(frame)
	select {
	case o.wake <- struct{}{}:
	default:
	}
	return true
}

// run writes what is pushed until done is closed or a write fails. What was
// queued when done closed is still written.
func (o *outbox) run(c net.Conn, done <-chan struct{}) error {
	for {
		last := false
		select {
		case <-o.wake:
		case <-done:
			last = true
		}
		o.mu.Lock()
		frames := o.frames
		o.frames, o.bytes = nil, 0
		o.mu.Unlock()
		if len(frames) > 0 {
			if !last { // else whoever closed done has set one
				_ = c.SetWriteDeadline(time.Now().Add(frameTimeout))
			}
			if _, err := frames.WriteTo(c); err != nil {
				return err
			}
		}
		if last {
			return nil
		}
	}
}
