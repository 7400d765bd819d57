package ring

import (
	"net"

	"github.com/tandem-go/tandem/comm"
)

const (
	// sumBytes is how much is added at a time: sums of several ranks stay in
	// the cache.
	sumBytes = 64 << 10
	// moveBytes is how much is copied at a time: a copy can't be interrupted.
	moveBytes = 1 << 20
	// stepBytes is how much is added everywhere before it is collected: what was
	// read and written is then still in the cache that cores share.
	stepBytes = 4 << 20
)

// perform is group.perform over shared memory. Each operation is direct, when
// all buffers that others must read lie in segments, or goes through the
// stages piece by piece.
func (s *shared) perform(o *operation) error {
	switch o.call.Kind {
	case comm.KindAllReduce:
		if s.small(&o.call, len(o.src)) {
			return s.slotReduce(o, 0, len(o.src))
		}
		return s.allReduce(o)
	case comm.KindReduceScatter:
		if s.small(&o.call, len(o.src)) {
			n := len(o.dst)
			return s.slotReduce(o, s.g.rank*n, n)
		}
		return s.reduceScatter(o)
	case comm.KindAllGather:
		if s.small(&o.call, len(o.src)) {
			return s.slotGather(o, o.src)
		}
		return s.allGather(o)
	case comm.KindBroadcast:
		return s.broadcast(o)
	case comm.KindBarrier:
		return s.meet(o, nil)
	case comm.KindSplit:
		return s.slotGather(o, o.payload[:])
	case comm.KindSend:
		return s.send(o)
	}
	return s.receive(o)
}

// slotReduce adds n bytes at off of all payloads.
func (s *shared) slotReduce(o *operation, off, n int) error {
	if err := s.meet(o, o.src); err != nil {
		return err
	}
	for r := range s.from {
		s.from[r] = s.slot(r)[headBytes+off:][:n]
	}
	return s.reduce(o, o.dst)
}

func (s *shared) slotGather(o *operation, own []byte) error {
	if err := s.meet(o, own); err != nil {
		return err
	}
	for r := range s.ctl {
		copy(o.dst[r*len(own):][:len(own)], s.slot(r)[headBytes:])
	}
	return nil
}

// reduce leaves the sum of s.from in dst, added in the order of the ranks: the
// bits don't depend on who adds. dst may be this rank's part.
func (s *shared) reduce(o *operation, dst []byte) error {
	for off := 0; off < len(dst); off += sumBytes {
		if s.failed.Load() {
			return &peerError{s.g.rank, net.ErrClosed}
		}
		s.reducePiece(o, dst, off, min(off+sumBytes, len(dst)))
	}
	return nil
}

func (s *shared) reducePiece(o *operation, dst []byte, lo, hi int) {
	k, c, size := s.g.n.kernels, &o.call, len(s.from)
	op, first := reduceOp(c.Op), divideFirst(c)
	sum, spare := s.g.scratch[:hi-lo], s.g.spare[:hi-lo]
	part := func(r int, to []byte) []byte {
		p := s.from[r][lo:hi]
		if !first {
			return p
		}
		k.ScaleBytes(c.Type, to, p, size)
		return to
	}
	left := part(0, sum)
	for r := 1; r < size; r++ {
		to := sum
		if r == size-1 {
			to = dst[lo:hi] // only now: it may be a part
		}
		k.Reduce(op, c.Type, to, left, part(r, spare))
		left = to
	}
	if c.Op == comm.Avg && !first {
		k.ScaleBytes(c.Type, dst[lo:hi], dst[lo:hi], size)
	}
}

// move copies, and gives up when the group has failed.
func (s *shared) move(dst, src []byte) error {
	for len(src) > 0 {
		if s.failed.Load() {
			return &peerError{s.g.rank, net.ErrClosed}
		}
		n := copy(dst, src[:min(len(src), moveBytes)])
		dst, src = dst[n:], src[n:]
	}
	return nil
}

// allReduce: each rank adds its block of all ranks' sources, then takes the
// other blocks from those who added them. Nobody leaves, or stages the next
// piece, before all are done.
func (s *shared) allReduce(o *operation) error {
	if err := s.meet(o, nil); err != nil {
		return err
	}
	step, staged := stepBytes, s.staged(true)
	if staged {
		step = stageBytes
	}
	for off := 0; off < len(o.src); off += step {
		n := min(step, len(o.src)-off)
		var err error
		if staged {
			err = s.reduceStaged(o, off, n)
		} else {
			err = s.reduceDirect(o, off, n)
		}
		if err != nil {
			return err
		}
		s.tell()
		if err := s.collect(o, off, n, staged); err != nil {
			return err
		}
	}
	return s.round()
}

// reduceDirect adds this rank's block of n bytes at off where it belongs.
func (s *shared) reduceDirect(o *operation, off, n int) (err error) {
	lo, hi := blockRange(n, len(s.ctl), s.g.rank)
	if lo == hi {
		return nil
	}
	lo, hi = lo+off, hi+off
	for r := range s.from {
		s.from[r] = o.src[lo:hi]
		if d := &s.desc[r]; r != s.g.rank {
			if s.from[r], err = s.view(r, d.src, d.srcOff+lo, hi-lo); err != nil {
				return err
			}
		}
	}
	return s.reduce(o, o.dst[lo:hi])
}

// reduceStaged shows n bytes at off to all, and adds this rank's block of them
// on the other half of its stage.
func (s *shared) reduceStaged(o *operation, off, n int) error {
	if err := s.move(s.stage(s.g.rank, 0), o.src[off:off+n]); err != nil {
		return err
	}
	if err := s.round(); err != nil {
		return err
	}
	lo, hi := blockRange(n, len(s.ctl), s.g.rank)
	for r := range s.from {
		s.from[r] = s.stage(r, 0)[lo:hi]
	}
	return s.reduce(o, s.stage(s.g.rank, 1)[:hi-lo])
}

// collect takes all blocks of n bytes at off, its own only if it was staged.
// It begins with its right neighbour, so that not all read from one.
func (s *shared) collect(o *operation, off, n int, staged bool) error {
	size := len(s.ctl)
	for i := range size {
		r := (s.g.rank + 1 + i) % size
		lo, hi := blockRange(n, size, r)
		if err := s.await(r); err != nil {
			return err
		}
		var block []byte
		switch d := &s.desc[r]; {
		case lo == hi, !staged && r == s.g.rank:
			continue
		case staged:
			block = s.stage(r, 1)[:hi-lo]
		default:
			var err error
			if block, err = s.view(r, d.dst, d.dstOff+off+lo, hi-lo); err != nil {
				return err
			}
		}
		if err := s.move(o.dst[off+lo:off+hi], block); err != nil {
			return err
		}
	}
	return nil
}

// reduceScatter is the first half; staged, a piece holds a part of each block.
func (s *shared) reduceScatter(o *operation) (err error) {
	if err := s.meet(o, nil); err != nil {
		return err
	}
	size, n := len(s.ctl), len(o.dst)
	if !s.staged(false) {
		for r := range s.from {
			s.from[r] = o.src[s.g.rank*n:][:n]
			if d := &s.desc[r]; r != s.g.rank && n > 0 {
				if s.from[r], err = s.view(r, d.src, d.srcOff+s.g.rank*n, n); err != nil {
					return err
				}
			}
		}
		if err := s.reduce(o, o.dst); err != nil {
			return err
		}
		return s.round()
	}
	step := stageBytes / size / blockAlign * blockAlign
	for off, half := 0, 0; off < n; off, half = off+step, half^1 {
		m := min(step, n-off)
		for b := range size {
			if err := s.move(s.stage(s.g.rank, half)[b*m:], o.src[b*n+off:][:m]); err != nil {
				return err
			}
		}
		if err := s.round(); err != nil { // all have read the half before this one
			return err
		}
		for r := range s.from {
			s.from[r] = s.stage(r, half)[s.g.rank*m:][:m]
		}
		if err := s.reduce(o, o.dst[off:off+m]); err != nil {
			return err
		}
	}
	return s.round()
}

// allGather copies every rank's source from where it lies, or piece by piece
// from its stage.
func (s *shared) allGather(o *operation) error {
	if err := s.meet(o, nil); err != nil {
		return err
	}
	size, n, staged := len(s.ctl), len(o.src), s.staged(false)
	step := n
	if staged {
		step = stageBytes
	}
	for off, half := 0, 0; off < n; off, half = off+step, half^1 {
		m := min(step, n-off)
		if staged {
			if err := s.showStage(o.src[off:off+m], half); err != nil {
				return err
			}
		}
		for i := range size {
			r := (s.g.rank + 1 + i) % size
			block, err := s.piece(o, r, off, m, half, staged)
			if err == nil {
				err = s.move(o.dst[r*n+off:][:m], block)
			}
			if err != nil {
				return err
			}
		}
	}
	return s.round()
}

// showStage lets all see b, on a half that all have read.
func (s *shared) showStage(b []byte, half int) error {
	if err := s.move(s.stage(s.g.rank, half), b); err != nil {
		return err
	}
	return s.round()
}

// piece is n bytes at off of rank's source.
func (s *shared) piece(o *operation, rank, off, n, half int, staged bool) ([]byte, error) {
	d := &s.desc[rank]
	switch {
	case rank == s.g.rank:
		return o.src[off : off+n], nil
	case staged:
		return s.stage(rank, half)[:n], nil
	}
	return s.view(rank, d.src, d.srcOff+off, n)
}

// broadcast copies the root's buffer, as allGather does.
func (s *shared) broadcast(o *operation) error {
	root, n := o.call.Root, len(o.src)
	small := s.small(&o.call, n)
	var payload []byte
	if small && root == s.g.rank {
		payload = o.src
	}
	if err := s.meet(o, payload); err != nil {
		return err
	}
	if small {
		if root != s.g.rank {
			copy(o.dst, s.slot(root)[headBytes:])
		}
		return nil
	}
	step, staged := n, s.desc[root].src == 0
	if staged {
		step = stageBytes
	}
	for off, half := 0, 0; off < n; off, half = off+step, half^1 {
		m := min(step, n-off)
		var mine []byte
		if root == s.g.rank {
			mine = o.src[off : off+m]
		}
		if staged {
			if err := s.showStage(mine, half); err != nil {
				return err
			}
		}
		if root == s.g.rank {
			continue
		}
		block, err := s.piece(o, root, off, m, half, staged)
		if err == nil {
			err = s.move(o.dst[off:off+m], block)
		}
		if err != nil {
			return err
		}
	}
	return s.round()
}
