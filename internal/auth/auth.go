package auth

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

var (
	// ErrDenied is in the chain when the peer does not know the secret.
	ErrDenied = errors.New("auth: peer does not know this job's secret")
	// ErrForeign is in the chain when the peer knows the secret but belongs to
	// another job, generation or purpose.
	ErrForeign = errors.New("auth: peer belongs elsewhere")
	// ErrProtocol is in the chain when the peer speaks something else.
	ErrProtocol = errors.New("auth: peer does not speak this protocol")
	// ErrNoSecret is in the chain when a connection that leaves the machine
	// would go without a secret.
	ErrNoSecret = errors.New("auth: a connection between hosts needs a job secret (TANDEM_SECRET)")
)

// Hello is what an end says of itself. Both hellos are part of both proofs, so
// neither can be changed or replayed under another role, job or purpose.
type Hello struct {
	JobID      string // at most 256 bytes
	Generation int    // restarts of the job so far
	Purpose    string // "store", "ring" …; at most 256 bytes
	Rank       int    // -1 when the end is no rank
}

func (h Hello) String() string {
	return fmt.Sprintf("job %q, generation %d, %s, rank %d", h.JobID, h.Generation, h.Purpose, h.Rank)
}

const (
	magic     = "TNDMAUT1"
	nonceSize = 32
	maxText   = 256
	maxHello  = 8 + 8 + 2 + maxText + 2 + maxText
	proofSize = sha256.Size

	labelClient = "tandem auth 1: client"
	labelServer = "tandem auth 1: server"
	labelAccept = "tandem auth 1: accept"
)

// Client proves knowledge of s to the server at the other end of c, and the
// reverse; it returns what the server said of itself. Job, generation and
// purpose are compared here, the rank is the caller's to judge. The whole
// exchange, four messages, must end before deadline; c then has no deadline.
// After an error c is useless and must be closed.
//
// Each side sends a fresh nonce and answers with an HMAC-SHA-256 over a label
// of its role, both nonces and both hellos. The traffic that follows is not
// encrypted: the proof keeps strangers and stray ranks out, it does not hide
// gradients from someone who can read the wire.
func Client(c net.Conn, s Secret, self Hello, deadline time.Time) (Hello, error) {
	peer, err := client(c, s, self, deadline)
	return peer, describe(c, err)
}

// Server is the other half of Client, for the side that accepted c.
func Server(c net.Conn, s Secret, self Hello, deadline time.Time) (Hello, error) {
	peer, err := server(c, s, self, deadline)
	return peer, describe(c, err)
}

func client(c net.Conn, s Secret, self Hello, deadline time.Time) (peer Hello, err error) {
	if err := begin(c, s, deadline); err != nil {
		return peer, err
	}
	mine, err := opening(self)
	if err != nil {
		return peer, err
	}
	if _, err := c.Write(mine); err != nil {
		return peer, err
	}
	theirs, peer, err := readOpening(c)
	if err != nil {
		return peer, err
	}
	if err := readProof(c, prove(s, labelServer, mine, theirs)); err != nil {
		return peer, err
	}
	if _, err := c.Write(prove(s, labelClient, mine, theirs)); err != nil {
		return peer, err
	}
	if err := self.match(peer); err != nil {
		return peer, err
	}
	if err := readProof(c, prove(s, labelAccept, mine, theirs)); err != nil {
		return peer, err
	}
	return peer, c.SetDeadline(time.Time{})
}

func server(c net.Conn, s Secret, self Hello, deadline time.Time) (peer Hello, err error) {
	if err := begin(c, s, deadline); err != nil {
		return peer, err
	}
	mine, err := opening(self)
	if err != nil {
		return peer, err
	}
	theirs, peer, err := readOpening(c)
	if err != nil {
		return peer, err
	}
	if _, err := c.Write(append(mine[:len(mine):len(mine)], prove(s, labelServer, theirs, mine)...)); err != nil {
		return peer, err
	}
	if err := readProof(c, prove(s, labelClient, theirs, mine)); err != nil {
		return peer, err
	}
	if err := self.match(peer); err != nil {
		return peer, err
	}
	if _, err := c.Write(prove(s, labelAccept, theirs, mine)); err != nil {
		return peer, err
	}
	return peer, c.SetDeadline(time.Time{})
}

// begin refuses a connection between hosts without a secret, on both sides,
// and sets the deadline.
func begin(c net.Conn, s Secret, deadline time.Time) error {
	if s == "" && !Loopback(c) {
		return ErrNoSecret
	}
	return c.SetDeadline(deadline)
}

// opening is magic, nonce, length and text of a hello: a side's first message.
func opening(h Hello) ([]byte, error) {
	if len(h.JobID) > maxText || len(h.Purpose) > maxText {
		return nil, fmt.Errorf("auth: job id and purpose of %d and %d bytes, at most %d each", len(h.JobID), len(h.Purpose), maxText)
	}
	b := make([]byte, len(magic)+nonceSize, len(magic)+nonceSize+2+maxHello)
	copy(b, magic)
	_, _ = rand.Read(b[len(magic):])
	text := h.marshal()
	b = binary.BigEndian.AppendUint16(b, uint16(len(text)))
	return append(b, text...), nil
}

func readOpening(r io.Reader) (raw []byte, h Hello, err error) {
	const head = len(magic) + nonceSize + 2
	raw = make([]byte, head, head+maxHello)
	if _, err := io.ReadFull(r, raw[:len(magic)]); err != nil {
		return nil, h, closedEarly(err)
	}
	if string(raw[:len(magic)]) != magic {
		return nil, h, fmt.Errorf("%w: it began with %q", ErrProtocol, raw[:len(magic)])
	}
	if _, err := io.ReadFull(r, raw[len(magic):head]); err != nil {
		return nil, h, closedEarly(err)
	}
	n := int(binary.BigEndian.Uint16(raw[head-2:]))
	if n > maxHello {
		return nil, h, fmt.Errorf("%w: hello of %d bytes, at most %d", ErrProtocol, n, maxHello)
	}
	raw = raw[:head+n]
	if _, err := io.ReadFull(r, raw[head:]); err != nil {
		return nil, h, closedEarly(err)
	}
	h, err = parseHello(raw[head:])
	return raw, h, err
}

// prove is the proof of one role for this exchange. Openings carry their own
// length, so the concatenation is unambiguous.
func prove(s Secret, label string, client, server []byte) []byte {
	m := hmac.New(sha256.New, []byte(s))
	_, _ = io.WriteString(m, label)
	_, _ = m.Write([]byte{0})
	_, _ = m.Write(client)
	_, _ = m.Write(server)
	return m.Sum(nil)
}

func readProof(r io.Reader, want []byte) error {
	var got [proofSize]byte
	if _, err := io.ReadFull(r, got[:]); err != nil {
		return closedEarly(err)
	}
	if !hmac.Equal(got[:], want) {
		return ErrDenied
	}
	return nil
}

// closedEarly explains a peer that hung up: it refused us, or died.
func closedEarly(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("peer closed the connection during authentication (it may hold another secret): %w", io.ErrUnexpectedEOF)
	}
	return err
}

func describe(c net.Conn, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("authenticate %s: %w", c.RemoteAddr(), err)
}

func (h Hello) match(peer Hello) error {
	if h.JobID != peer.JobID || h.Generation != peer.Generation || h.Purpose != peer.Purpose {
		return fmt.Errorf("%w: peer is (%v), here is (%v)", ErrForeign, peer, h)
	}
	return nil
}

// marshal is generation, rank, and two texts with 16-bit lengths.
func (h Hello) marshal() []byte {
	b := make([]byte, 0, maxHello)
	b = binary.BigEndian.AppendUint64(b, uint64(int64(h.Generation)))
	b = binary.BigEndian.AppendUint64(b, uint64(int64(h.Rank)))
	for _, t := range []string{h.JobID, h.Purpose} {
		b = binary.BigEndian.AppendUint16(b, uint16(len(t)))
		b = append(b, t...)
	}
	return b
}

func parseHello(b []byte) (h Hello, err error) {
	if len(b) < 16 {
		return h, fmt.Errorf("%w: hello of %d bytes", ErrProtocol, len(b))
	}
	h.Generation = int(int64(binary.BigEndian.Uint64(b)))
	h.Rank = int(int64(binary.BigEndian.Uint64(b[8:])))
	b = b[16:]
	for _, t := range []*string{&h.JobID, &h.Purpose} {
		if len(b) < 2 {
			return h, fmt.Errorf("%w: truncated hello", ErrProtocol)
		}
		n := int(binary.BigEndian.Uint16(b))
		if b = b[2:]; n > maxText || n > len(b) {
			return h, fmt.Errorf("%w: text of %d bytes in a hello", ErrProtocol, n)
		}
		*t, b = string(b[:n]), b[n:]
	}
	if len(b) != 0 {
		return h, fmt.Errorf("%w: %d bytes after a hello", ErrProtocol, len(b))
	}
	return h, nil
}
