package ring

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/tandem-go/tandem/comm"
)

// Control messages: length 4 (of what follows), type 1, body. Little endian.
const (
	msgHeartbeat = iota + 1 // empty
	msgReport               // failure: a rank tells rank 0
	msgVerdict              // failure: rank 0 tells all
	msgQuery                // group 8: how far are you?
	msgStatus               // group 8, started 8: so far
	msgBye                  // empty: an orderly end
	msgEnd

	maxMessage = 16 << 10
	maxText    = 4 << 10
	failureFix = 1 + 1 + 4 + 4 + 1 + 8 + 8 + 4 // before the texts
)

var errMessage = errors.New("ring: malformed control message")

// message is one control message; only the fields of its type are set.
type message struct {
	kind    uint8
	failure *failure
	group   uint64
	started uint64
}

func (m *message) append(b []byte) []byte {
	le := binary.LittleEndian
	at := len(b)
	b = append(b, 0, 0, 0, 0, m.kind)
	switch m.kind {
	case msgReport, msgVerdict:
		b = m.failure.append(b)
	case msgQuery:
		b = le.AppendUint64(b, m.group)
	case msgStatus:
		b = le.AppendUint64(b, m.group)
		b = le.AppendUint64(b, m.started)
	}
	le.PutUint32(b[at:], uint32(len(b)-at-4))
	return b
}

// readMessage reads one message into buf, which has maxMessage bytes.
func readMessage(r io.Reader, buf []byte) (message, error) {
	if _, err := io.ReadFull(r, buf[:4]); err != nil {
		return message{}, err
	}
	n := binary.LittleEndian.Uint32(buf)
	if n < 1 || n > maxMessage {
		return message{}, fmt.Errorf("%w: length %d, want 1 to %d", errMessage, n, maxMessage)
	}
	if _, err := io.ReadFull(r, buf[:n]); err != nil {
		return message{}, err
	}
	return parseMessage(buf[:n])
}

// parseMessage is the inverse of append, without the length.
func parseMessage(b []byte) (m message, err error) {
	le := binary.LittleEndian
	if len(b) < 1 {
		return m, errMessage
	}
	m.kind, b = b[0], b[1:]
	want := 0
	switch m.kind {
	case msgReport, msgVerdict:
		m.failure, err = parseFailure(b)
		return m, err
	case msgQuery:
		want = 8
	case msgStatus:
		want = 16
	case msgHeartbeat, msgBye:
	default:
		return m, fmt.Errorf("%w: type %d", errMessage, m.kind)
	}
	if len(b) != want {
		return m, fmt.Errorf("%w: type %d with %d bytes, want %d", errMessage, m.kind, len(b), want)
	}
	if want >= 8 {
		m.group = le.Uint64(b)
	}
	if want >= 16 {
		m.started = le.Uint64(b[8:])
	}
	return m, nil
}

func (f *failure) append(b []byte) []byte {
	le := binary.LittleEndian
	weak := byte(0)
	if f.weak {
		weak = 1
	}
	b = append(b, byte(f.code), weak)
	b = le.AppendUint32(b, uint32(int32(f.culprit)))
	b = le.AppendUint32(b, uint32(int32(f.reporter)))
	b = append(b, byte(f.kind))
	b = le.AppendUint64(b, f.group)
	b = le.AppendUint64(b, f.seq)
	b = le.AppendUint32(b, uint32(int32(f.tag.Bucket)))
	for _, s := range []string{f.tag.Name, f.text} {
		s = s[:min(len(s), maxText)]
		b = le.AppendUint16(b, uint16(len(s)))
		b = append(b, s...)
	}
	return b
}

func parseFailure(b []byte) (*failure, error) {
	le := binary.LittleEndian
	if len(b) < failureFix {
		return nil, fmt.Errorf("%w: failure of %d bytes", errMessage, len(b))
	}
	f := &failure{
		code: code(b[0]), weak: b[1] == 1,
		culprit: int(int32(le.Uint32(b[2:]))), reporter: int(int32(le.Uint32(b[6:]))),
		kind: comm.Kind(b[10]), group: le.Uint64(b[11:]), seq: le.Uint64(b[19:]),
	}
	f.tag.Bucket = int(int32(le.Uint32(b[27:])))
	if f.code < codeLost || f.code >= codeEnd || b[1] > 1 || f.kind != 0 && !f.kind.Valid() ||
		f.culprit < -1 || f.culprit >= maxWorld || f.reporter < 0 || f.reporter >= maxWorld {
		return nil, fmt.Errorf("%w: failure % x", errMessage, b[:failureFix])
	}
	b = b[failureFix:]
	for _, s := range []*string{&f.tag.Name, &f.text} {
		if len(b) < 2 {
			return nil, fmt.Errorf("%w: truncated text", errMessage)
		}
		n := int(le.Uint16(b))
		if b = b[2:]; n > maxText || n > len(b) {
			return nil, fmt.Errorf("%w: text of %d bytes", errMessage, n)
		}
		*s, b = string(b[:n]), b[n:]
	}
	if len(b) != 0 {
		return nil, fmt.Errorf("%w: %d bytes too many", errMessage, len(b))
	}
	return f, nil
}
