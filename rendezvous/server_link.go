package rendezvous

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
)

// serverLink is one connection.
type serverLink struct {
	s   *Server
	c   net.Conn
	out *outbox

	waits map[uint64]func() // cancels, by request; the reader's own

	mu    sync.Mutex
	ended []uint64 // waits that were answered, by whoever set their last key
}

// read handles requests until the client leaves (nil) or the connection fails.
func (l *serverLink) read() (err error) {
	r := bufio.NewReader(l.c)
	first, err := readFrame(l.c, r, headRequest)
	if err != nil {
		return err
	}
	if opcode(first[0]) != opSession || len(first) != headRequest+16 {
		return fmt.Errorf("%w: expected a session", errFrame)
	}
	id := string(first[headRequest:])
	x := l.s.session(id)
	bye := false
	defer func() { l.s.endSession(id, x, bye) }()
	for {
		b, err := readFrame(l.c, r, headRequest)
		if err != nil {
			return err
		}
		op, id, ack := opcode(b[0]), binary.BigEndian.Uint64(b[1:]), binary.BigEndian.Uint64(b[9:])
		p := &parser{b: b[headRequest:]}
		switch {
		case op == opBye:
			bye = true
			return nil
		case op == opCancel:
			l.cancel(id)
		case op == opWait:
			err = l.wait(id, p)
		case op.changes():
			err = l.change(x, op, id, ack, p)
		case op == opGet:
			key := string(p.text())
			if err = p.end(); err == nil {
				v, e := l.s.t.get(key)
				err = l.answer(id, v, e)
			}
		default:
			err = fmt.Errorf("%w: operation %d", errFrame, op)
		}
		if err != nil {
			return err
		}
	}
}

func (l *serverLink) answer(id uint64, body []byte, err error) error {
	return l.send(respond(id, body, err))
}

func (l *serverLink) send(frame []byte) error {
	if !l.out.push(frame) {
		return errors.New("rendezvous: the client does not read its answers")
	}
	return nil
}

func respond(id uint64, body []byte, err error) []byte {
	switch {
	case err == nil:
		return response(statusOK, id, body)
	case errors.Is(err, ErrNotFound):
		return response(statusNotFound, id, nil)
	case errors.Is(err, ErrClosed):
		return response(statusClosed, id, nil)
	case errors.Is(err, ErrNotInteger):
		return response(statusNotInteger, id, nil)
	}
	return response(statusError, id, []byte(err.Error()))
}

// change makes a change once, however often the client sends it.
func (l *serverLink) change(x *session, op opcode, id, ack uint64, p *parser) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if ack > x.ack {
		x.ack = ack
		for k := range x.answers {
			if k < ack {
				delete(x.answers, k)
			}
		}
	}
	if id < x.ack {
		return nil // a late copy of a change that was answered long ago
	}
	if a, ok := x.answers[id]; ok {
		return l.send(a)
	}
	a, err := l.s.apply(op, id, p)
	if err != nil {
		return err
	}
	x.answers[id] = a
	return l.send(a)
}

// apply makes a change and returns its response, or an error for a frame that
// makes no sense.
func (s *Server) apply(op opcode, id uint64, p *parser) ([]byte, error) {
	key := string(p.text())
	if err := checkKey(key); err != nil {
		return nil, errFrame
	}
	switch op {
	case opSet:
		v := p.text()
		if err := p.end(); err != nil {
			return nil, err
		}
		return respond(id, nil, s.t.set(key, v)), nil
	case opAdd:
		d := int64(p.u64())
		if err := p.end(); err != nil {
			return nil, err
		}
		n, err := s.t.add(key, d)
		return respond(id, binary.BigEndian.AppendUint64(nil, uint64(n)), err), nil
	case opCAS:
		old, v := optional(p), p.text()
		if err := p.end(); err != nil {
			return nil, err
		}
		got, err := s.t.compareAndSet(key, old, v)
		return respond(id, putOptional(nil, got), err), nil
	}
	if err := p.end(); err != nil {
		return nil, err
	}
	return respond(id, nil, s.t.delete(key)), nil
}

// optional reads a flag and a text: nil when the flag is 0.
func optional(p *parser) []byte {
	present, v := p.u8(), p.text()
	if present == 0 {
		return nil
	}
	return v
}

func putOptional(b, v []byte) []byte {
	if v == nil {
		b = append(b, 0)
	} else {
		b = append(b, 1)
	}
	return putText(b, v)
}

// wait registers a wait whose answer is sent by whoever sets the last key.
func (l *serverLink) wait(id uint64, p *parser) error {
	n := int(p.u32())
	if n > MaxWait {
		return fmt.Errorf("%w: wait for %d keys", errFrame, n)
	}
	keys := make([]string, 0, min(n, len(p.b)/4+1))
	for range n {
		if keys = append(keys, string(p.text())); p.bad {
			return errFrame
		}
	}
	if err := p.end(); err != nil {
		return err
	}
	cancel := l.s.t.wait(keys, func(err error) {
		if !l.out.push(respond(id, nil, err)) {
			_ = l.c.Close()
		}
		l.mu.Lock()
		l.ended = append(l.ended, id)
		l.mu.Unlock()
	})
	if cancel != nil {
		l.waits[id] = cancel
	}
	l.mu.Lock()
	for _, id := range l.ended {
		delete(l.waits, id)
	}
	l.ended = l.ended[:0]
	l.mu.Unlock()
	return nil
}

// cancel forgets a wait; it is a no-op for one that has ended.
func (l *serverLink) cancel(id uint64) {
	if c := l.waits[id]; c != nil {
		delete(l.waits, id)
		c()
	}
}
