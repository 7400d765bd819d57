package ring

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/dtype"
)

// A frame is one operation's bytes on one connection: a header, then as many
// bytes as the operation moves there, which both ends compute from the call.
// The receiver compares the header with its own call before it adds or keeps
// anything.
//
// Little endian: magic 4, version 2, kind 1, op 1, type 1, algorithm 1, zero 2,
// root 4, job 8, generation 8, group 8, seq 8, count 8, bucket 4, sender 4.
const (
	headerSize   = 64
	headerMagic  = 0x474e5254 // "TRNG"
	wireVersion  = 1
	maxWorld     = 1 << 20
	algoExchange = 1 // every rank gets all contributions and adds them itself
	algoRing     = 2 // reduce-scatter and all-gather around the ring
	algoDirect   = 3 // between two ranks
	algoShared   = 4 // through memory of one host
)

// header is everything that two neighbours must agree on.
type header struct {
	call       comm.Call
	algorithm  uint8
	job        uint64
	generation uint64
	group      uint64
	seq        uint64
	from       int // the sender's rank in the group
}

// marshal writes h to b, which has headerSize bytes.
func (h *header) marshal(b []byte) {
	le := binary.LittleEndian
	_ = b[headerSize-1]
	le.PutUint32(b, headerMagic)
	le.PutUint16(b[4:], wireVersion)
	b[6], b[7], b[8], b[9] = byte(h.call.Kind), byte(h.call.Op), byte(h.call.Type), h.algorithm
	le.PutUint16(b[10:], 0)
	le.PutUint32(b[12:], uint32(h.call.Root))
	le.PutUint64(b[16:], h.job)
	le.PutUint64(b[24:], h.generation)
	le.PutUint64(b[32:], h.group)
	le.PutUint64(b[40:], h.seq)
	le.PutUint64(b[48:], uint64(h.call.Count))
	le.PutUint32(b[56:], uint32(int32(h.call.Tag.Bucket)))
	le.PutUint32(b[60:], uint32(h.from))
}

// parseHeader is the inverse of marshal. It accepts exactly what marshal
// writes for valid calls.
func parseHeader(b []byte) (h header, err error) {
	le := binary.LittleEndian
	if len(b) != headerSize {
		return h, fmt.Errorf("ring: header of %d bytes, want %d", len(b), headerSize)
	}
	if m := le.Uint32(b); m != headerMagic {
		return h, fmt.Errorf("ring: no frame header here: it begins with %q", b[:4])
	}
	if v := le.Uint16(b[4:]); v != wireVersion {
		return h, fmt.Errorf("ring: peer speaks version %d of the frame format, this rank %d: use one build of tandem on all ranks", v, wireVersion)
	}
	h.call.Kind, h.call.Op, h.call.Type = comm.Kind(b[6]), comm.Op(b[7]), dtype.Type(b[8])
	h.algorithm = b[9]
	h.call.Root = int(le.Uint32(b[12:]))
	h.job, h.generation = le.Uint64(b[16:]), le.Uint64(b[24:])
	h.group, h.seq = le.Uint64(b[32:]), le.Uint64(b[40:])
	count := le.Uint64(b[48:])
	h.call.Count = int(count)
	h.call.Tag.Bucket = int(int32(le.Uint32(b[56:])))
	h.from = int(le.Uint32(b[60:]))
	switch {
	case !h.call.Kind.Valid(), h.call.Op > comm.Prod, h.call.Type != dtype.Invalid && !h.call.Type.Valid(),
		h.algorithm < algoExchange || h.algorithm > algoShared, le.Uint16(b[10:]) != 0,
		h.call.Root >= maxWorld, h.from >= maxWorld, count > 1<<56:
		return h, fmt.Errorf("ring: malformed frame header % x", b)
	}
	return h, nil
}

// disagree says how the header that came differs from the one that this rank
// expected. self is this rank.
func (want *header) disagree(self int, b []byte) error {
	got, err := parseHeader(b)
	if err != nil {
		return err
	}
	if got.job != want.job || got.generation != want.generation || got.group != want.group {
		return fmt.Errorf("ring: frame of job %x generation %d group %x, want job %x generation %d group %x",
			got.job, got.generation, got.group, want.job, want.generation, want.group)
	}
	if err := comm.Disagree(self, want.call, want.from, got.call); err != nil {
		if got.seq != want.seq {
			err = fmt.Errorf("%w (their seq %d, here %d)", err, got.seq, want.seq)
		}
		return err
	}
	switch {
	case got.seq != want.seq:
		return fmt.Errorf("%w on the sequence number of %v: rank %d is at %d, rank %d at %d",
			comm.ErrMismatch, want.call, self, want.seq, want.from, got.seq)
	case got.algorithm != want.algorithm:
		return fmt.Errorf("%w on the algorithm of %v: rank %d chose %d, rank %d chose %d",
			comm.ErrMismatch, want.call, self, want.algorithm, want.from, got.algorithm)
	}
	return fmt.Errorf("ring: frame from rank %d on the connection of rank %d", got.from, want.from)
}

// hash64 names jobs and child groups in headers.
func hash64(parts ...any) uint64 {
	h := fnv.New64a()
	for _, p := range parts {
		_, _ = fmt.Fprintf(h, "%v\x00", p)
	}
	return h.Sum64()
}
