package ring

import (
	"github.com/tandem-go/tandem/comm"
)

// send and receive count letters: one for the header and the first piece, one
// for each further piece of a staged buffer. The receiver counts what it has
// taken; the sender's memory is its own again when all is taken.
func (s *shared) send(o *operation) error {
	me, peer := s.g.rank, o.peer
	sent, taken := s.word(me, sentAt(peer)), s.word(peer, takenAt(me))
	call := o.call
	o.call.Kind = comm.KindRecv // what the other end calls it
	at := letterAt(len(s.ctl), peer)
	s.address(o, s.ctl[me][at:at+headBytes])
	o.call = call
	base := s.sent[peer]
	pieces := s.pieces(o, s.desc[me].src)
	for i := range pieces {
		if s.desc[me].src == 0 {
			if i >= 2 { // the half holds piece i−2
				if err := s.wait(peer, taken, base+i-1); err != nil {
					return err
				}
			}
			off := int(i) * stageBytes
			if err := s.move(s.stage(me, int(i&1)), o.src[off:min(off+stageBytes, len(o.src))]); err != nil {
				return err
			}
		}
		s.publish(sent, base+i+1)
	}
	s.sent[peer] = base + pieces
	return s.wait(peer, taken, base+pieces)
}

// pieces is how many letters o takes when its source lies in segment id.
func (s *shared) pieces(o *operation, id uint64) uint32 {
	if id != 0 || len(o.src) == 0 {
		return 1
	}
	return uint32((len(o.src) + stageBytes - 1) / stageBytes)
}

func (s *shared) receive(o *operation) error {
	me, peer := s.g.rank, o.peer
	sent, taken := s.word(peer, sentAt(me)), s.word(me, takenAt(peer))
	base := s.taken[peer]
	if err := s.wait(peer, sent, base+1); err != nil {
		return err
	}
	var own [headerSize]byte
	s.g.expect(o, algoShared, peer, own[:])
	at := letterAt(len(s.ctl), me)
	if err := s.understand(peer, s.ctl[peer][at:at+headBytes]); err != nil {
		return err
	}
	d := &s.desc[peer]
	pieces := s.pieces(o, d.src)
	for i := range pieces {
		if err := s.wait(peer, sent, base+i+1); err != nil {
			return err
		}
		off, n := 0, len(o.dst)
		if d.src == 0 {
			off = int(i) * stageBytes
			n = min(stageBytes, len(o.dst)-off)
		}
		block, err := s.piece(o, peer, off, n, int(i&1), d.src == 0)
		if err == nil {
			err = s.move(o.dst[off:off+n], block)
		}
		if err != nil {
			return err
		}
		s.publish(taken, base+i+1)
	}
	s.taken[peer] = base + pieces
	return nil
}
