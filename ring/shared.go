package ring

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/internal/shm"
)

// Shared memory. Every rank of a group has a control segment, which it alone
// writes and the others read:
//
//	phase     counts what this rank has told the group; others wait for it
//	asleep    whom it waits for in the kernel, as that rank + 1
//	closed    not 0 when it has left
//	mail      for each peer, how many letters it has sent and taken
//	slots     two, in turn: header, descriptor and payload of a collective
//	letters   for each peer, header and descriptor of a message
//	stage     two halves, for data that lie in no segment
//
// Words that somebody waits for have cache lines of their own. All ranks of a
// group count phases alike: every collective begins with one that says what is
// called, which is compared before anything else is believed.
const (
	lineBytes  = 128 // two lines, since processors fetch pairs
	phaseAt    = 0
	asleepAt   = lineBytes
	closedAt   = 2 * lineBytes
	mailAt     = 3 * lineBytes
	mailBytes  = 2 * lineBytes // sent, taken
	descBytes  = 32
	headBytes  = 128 // header and descriptor
	slotBytes  = 128 << 10
	slotsBytes = 256 << 10 // the most that a rank reads from slots
	stageBytes = 512 << 10 // a half
	pageBytes  = 4096
)

const (
	// spinFor is how long a rank looks for a word without a break: a word that is
	// written on another core is there at once. From then until yieldFor it lets
	// others have the core in between, since the one that is waited for may need
	// it; then it sleeps. (At 20 µs of looking, ranks that shared a busy core took
	// six times as long for 4 KB as at 2 µs.)
	spinFor  = 2 * time.Microsecond
	yieldFor = 100 * time.Microsecond
	// sleepFor bounds one sleep, in case a wake was lost.
	sleepFor = 50 * time.Millisecond
)

// shared is a group's shared memory. Only the holder of group.run uses it,
// except for hangUp.
type shared struct {
	g     *group
	spin  bool
	ctl   [][]byte // of each rank
	phase uint32
	turn  int // which slot
	sent  []uint32
	taken []uint32
	desc  []descriptor // of each rank, in this operation
	from  [][]byte     // each rank's part of what is being added

	copied [headerSize + descBytes]byte // of another rank's, which it can't change

	failed  atomic.Bool
	waiting atomic.Pointer[atomic.Uint32] // what this rank sleeps on
}

// descriptor says where the buffers of an operation lie; id 0 is in no segment.
type descriptor struct {
	src, dst       uint64
	srcOff, dstOff int
}

// controlBytes is the size of a control segment in a group of size ranks.
func controlBytes(size int) int { return stageAt(size) + 2*stageBytes }
func slotAt(size, turn int) int { return mailAt + size*mailBytes + turn*(headBytes+slotBytes) }
func sentAt(to int) int         { return mailAt + to*mailBytes }
func takenAt(from int) int      { return mailAt + from*mailBytes + lineBytes }
func letterAt(size, to int) int { return slotAt(size, 2) + to*headBytes }
func stageAt(size int) int {
	return (letterAt(size, size) + pageBytes - 1) / pageBytes * pageBytes
}

// connectShared makes the group's segments known to all its ranks. It returns
// when all have mapped all.
func (g *group) connectShared(ctx context.Context) error {
	n, size := g.n, len(g.world)
	s := &shared{g: g, spin: size <= runtime.NumCPU(), ctl: make([][]byte, size),
		sent: make([]uint32, size), taken: make([]uint32, size), desc: make([]descriptor, size), from: make([][]byte, size)}
	own, err := n.host.control(g.id, controlBytes(size))
	if err != nil {
		return err
	}
	s.ctl[g.rank] = own.Bytes()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(ctx, s.hangUp)()
	g.mu.Lock()
	g.shared = s
	g.mu.Unlock()
	defer g.endWith(func() { cancel(net.ErrClosed) })()
	for r, w := range g.world {
		if r == g.rank {
			continue
		}
		if s.ctl[r], err = n.host.memory(ctx, w, n.cards[w], controlID(g.id)); err != nil {
			return err
		}
		if len(s.ctl[r]) < controlBytes(size) {
			return fmt.Errorf("ring: rank %d shares %d bytes, want %d", w, len(s.ctl[r]), controlBytes(size))
		}
	}
	if err = s.round(); err != nil && ctx.Err() != nil {
		err = fmt.Errorf("ring: rank %d waits for the others to map its memory: %w", n.o.Rank, context.Cause(ctx))
	}
	return err
}

func (s *shared) word(rank, off int) *atomic.Uint32 { return shm.Word(s.ctl[rank], off) }

// slot is rank's header, descriptor and payload of this operation.
func (s *shared) slot(rank int) []byte {
	at := slotAt(len(s.ctl), s.turn)
	return s.ctl[rank][at : at+headBytes+slotBytes]
}

// stage is half h of rank's staging memory.
func (s *shared) stage(rank, h int) []byte {
	at := stageAt(len(s.ctl)) + h*stageBytes
	return s.ctl[rank][at : at+stageBytes]
}

// publish sets a word of this rank and wakes whoever sleeps on it.
func (s *shared) publish(w *atomic.Uint32, v uint32) {
	w.Store(v)
	for r := range s.ctl {
		if r != s.g.rank && s.word(r, asleepAt).Load() == uint32(s.g.rank+1) {
			shm.Wake(w)
			return
		}
	}
}

// tell ends a phase of this rank.
func (s *shared) tell() {
	s.phase++
	s.publish(s.word(s.g.rank, phaseAt), s.phase)
}

// await waits until rank has told as much as this rank.
func (s *shared) await(rank int) error { return s.wait(rank, s.word(rank, phaseAt), s.phase) }

// round is a phase of all ranks: all that they wrote before can be read after.
func (s *shared) round() error {
	s.tell()
	for r := range s.ctl {
		if err := s.await(r); err != nil {
			return err
		}
	}
	return nil
}

// reached compares counters that wrap around.
func reached(w *atomic.Uint32, v uint32) bool { return int32(w.Load()-v) >= 0 }

// wait waits until a word of rank has reached v. It fails when rank has left
// or the group has failed; how long a rank may take is the clock's affair,
// which ends in hangUp.
func (s *shared) wait(rank int, w *atomic.Uint32, v uint32) error {
	if reached(w, v) || s.look(w, v) {
		return nil
	}
	own := s.word(s.g.rank, asleepAt)
	defer func() {
		own.Store(0)
		s.waiting.Store(nil)
	}()
	for {
		own.Store(uint32(rank + 1))
		s.waiting.Store(w)
		have := w.Load()
		switch {
		case int32(have-v) >= 0:
			return nil
		case s.failed.Load():
			return &peerError{rank, net.ErrClosed}
		case s.word(rank, closedAt).Load() != 0 && !reached(w, v):
			return &peerError{rank, io.EOF}
		}
		shm.Wait(w, have, sleepFor)
	}
}

// look looks for a while. When there are more ranks than cores it yields at
// once: the one that is waited for may need this core.
func (s *shared) look(w *atomic.Uint32, v uint32) bool {
	start := time.Now()
	for s.spin && time.Since(start) < spinFor {
		for range 64 {
			if reached(w, v) {
				return true
			}
		}
	}
	if !s.spin {
		runtime.Gosched()
	}
	for time.Since(start) < yieldFor {
		shm.Yield()
		if reached(w, v) {
			return true
		}
	}
	return false
}

// hangUp ends what waits here, and lets the others know that nothing more
// comes.
func (s *shared) hangUp() {
	s.failed.Store(true)
	if w := s.waiting.Load(); w != nil {
		shm.Wake(w)
	}
	own := s.g.rank
	s.word(own, closedAt).Store(1)
	shm.Wake(s.word(own, phaseAt))
	for r := range s.ctl {
		shm.Wake(s.word(own, sentAt(r)))
		shm.Wake(s.word(own, takenAt(r)))
	}
}

// release gives the segments back, once nothing runs any more.
func (g *group) release() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shared == nil {
		return nil
	}
	return g.n.host.release(g.id, g.world)
}

// address writes the header and the descriptor of o for the group or, with to,
// for one peer.
func (s *shared) address(o *operation, b []byte) {
	g := s.g
	g.expect(o, algoShared, g.rank, b[:headerSize])
	d := &s.desc[g.rank]
	d.src, d.srcOff = g.n.host.locate(o.src)
	d.dst, d.dstOff = d.src, d.srcOff
	if unsafe.SliceData(o.dst) != unsafe.SliceData(o.src) || len(o.dst) > len(o.src) {
		d.dst, d.dstOff = g.n.host.locate(o.dst)
	}
	le := binary.LittleEndian
	le.PutUint64(b[headerSize:], d.src)
	le.PutUint64(b[headerSize+8:], uint64(d.srcOff))
	le.PutUint64(b[headerSize+16:], d.dst)
	le.PutUint64(b[headerSize+24:], uint64(d.dstOff))
}

// understand compares what rank wrote with this rank's own call.
func (s *shared) understand(rank int, b []byte) error {
	c := s.copied[:copy(s.copied[:], b)]
	s.g.want.from = rank
	if err := s.g.checkHead(c[:headerSize]); err != nil {
		return err
	}
	le := binary.LittleEndian
	s.desc[rank] = descriptor{src: le.Uint64(c[headerSize:]), srcOff: int(le.Uint64(c[headerSize+8:])),
		dst: le.Uint64(c[headerSize+16:]), dstOff: int(le.Uint64(c[headerSize+24:]))}
	return nil
}

// meet begins a collective: all ranks say what they call and give payload, and
// nobody goes on who has not compared all.
func (s *shared) meet(o *operation, payload []byte) error {
	s.turn ^= 1
	b := s.slot(s.g.rank)
	s.address(o, b)
	copy(b[headBytes:], payload)
	s.tell()
	for r := range s.ctl {
		if r == s.g.rank {
			continue
		}
		if err := s.await(r); err != nil {
			return err
		}
		if err := s.understand(r, s.slot(r)); err != nil {
			return err
		}
	}
	return nil
}

// view is n bytes of a buffer of rank.
func (s *shared) view(rank int, id uint64, off, n int) ([]byte, error) {
	g := s.g
	w := g.world[rank]
	b := g.n.host.mapped(w, id)
	if b == nil {
		ctx, cancel := context.WithTimeout(context.Background(), g.n.o.Timeout)
		defer cancel()
		defer g.endWith(cancel)()
		var err error
		if b, err = g.n.host.memory(ctx, w, g.n.cards[w], id); err != nil {
			return nil, &peerError{rank, err}
		}
	}
	if off < 0 || off > len(b) || n > len(b)-off {
		return nil, &peerError{rank, fmt.Errorf("ring: rank %d points at %d bytes at %d of a segment of %d", rank, n, off, len(b))}
	}
	return b[off : off+n], nil
}

// endWith calls cancel when the group fails, until the function that it
// returns is called.
func (g *group) endWith(cancel func()) (stop func()) {
	done := make(chan struct{})
	go func() {
		select {
		case <-g.n.failed:
			cancel()
		case <-done:
		}
	}()
	return func() { close(done) }
}

// within is where b lies in seg.
func within(seg, b []byte) (off int, ok bool) {
	lo, p := uintptr(unsafe.Pointer(unsafe.SliceData(seg))), uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	if len(b) == 0 || p < lo || p+uintptr(len(b)) > lo+uintptr(len(seg)) {
		return 0, false
	}
	return int(p - lo), true
}

// staged is whether some rank's source, or with dst its result, lies in no
// segment. All ranks know all descriptors, so they agree.
func (s *shared) staged(dst bool) bool {
	for i := range s.desc {
		if s.desc[i].src == 0 || dst && s.desc[i].dst == 0 {
			return true
		}
	}
	return false
}

// small is whether a payload goes through the slots.
func (s *shared) small(c *comm.Call, n int) bool {
	return s.g.n.o.plan.exchangeBytes >= 0 && n <= slotBytes && (len(s.ctl)-1)*n <= slotsBytes
}
