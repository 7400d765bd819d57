package ring

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/internal/auth"
	"github.com/tandem-go/tandem/internal/shm"
)

// The transports of Options.Transport.
const (
	TransportAuto = "auto"
	TransportShm  = "shm"
	TransportTCP  = "tcp"
)

const (
	// poolBytes is the first segment for small allocations; each next one is
	// twice as large, up to poolMax. What is larger has a segment of its own.
	poolBytes  = 256 << 10
	poolMax    = 16 << 20
	allocAlign = 64
	touchEvery = 4096
)

// host is what this process shares with the ranks of its host: the segments
// that Alloc returned and those that groups use to talk, and its mappings of
// theirs. Segments are numbered; peers ask for a number when they first need
// it.
type host struct {
	o    *Options
	self auth.Hello
	srv  *shm.Server

	mu     sync.Mutex
	closed bool
	segs   map[uint64]*shm.Segment
	added  chan struct{}  // closed and replaced when segs has grown
	data   []*shm.Segment // number i+1
	rest   []byte         // of the newest small segment
	pool   int            // size of the next one
	maps   map[remote]*shm.Mapping
}

// remote is one segment of another rank of the world.
type remote struct {
	rank int
	id   uint64
}

// hostPurpose keeps connections for memory apart from those for data.
const hostPurpose = "shm"

// newHost begins to serve segments.
func newHost(o *Options, self auth.Hello) (*host, error) {
	self.Purpose = hostPurpose
	h := &host{o: o, self: self, segs: map[uint64]*shm.Segment{}, added: make(chan struct{}),
		pool: poolBytes, maps: map[remote]*shm.Mapping{}}
	var err error
	h.srv, err = shm.Serve(self, o.Secret, h.find, o.Logger)
	return h, err
}

// find is shm.Find.
func (h *host) find(ctx context.Context, id uint64) (*shm.Segment, error) {
	for {
		h.mu.Lock()
		s, added := h.segs[id], h.added
		h.mu.Unlock()
		if s != nil {
			return s, nil
		}
		select {
		case <-added:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// add makes a segment and offers it. The caller holds the lock.
func (h *host) add(id uint64, bytes int) (*shm.Segment, error) {
	if h.closed {
		return nil, comm.ErrClosed
	}
	s, err := shm.Create(bytes)
	if err != nil {
		return nil, err
	}
	h.segs[id] = s
	close(h.added)
	h.added = make(chan struct{})
	return s, nil
}

// control is the segment in which this rank talks to a group.
func (h *host) control(id uint64, bytes int) (*shm.Segment, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.add(controlID(id), bytes)
}

// controlID numbers a group's segment, apart from those with data.
func controlID(group uint64) uint64 { return group | 1<<63 }

// alloc is memory in a segment, its pages touched.
func (h *host) alloc(bytes int) (device.Buffer, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	need := (bytes + allocAlign - 1) / allocAlign * allocAlign
	b := h.rest
	if need > len(b) {
		own := need > poolMax/4
		size := need
		if !own {
			for h.pool < 4*need {
				h.pool *= 2
			}
			size = h.pool
			h.pool = min(2*h.pool, poolMax)
		}
		s, err := h.add(uint64(len(h.data)+1), size)
		if err != nil {
			return nil, fmt.Errorf("ring: rank %d: %w", h.self.Rank, err)
		}
		h.data = append(h.data, s)
		b = s.Bytes()
		if own {
			return touched(b[:bytes]), nil
		}
	}
	h.rest = b[need:]
	return touched(b[:bytes]), nil
}

// touched takes the page faults of b now.
func touched(b []byte) device.Buffer {
	for i := 0; i < len(b); i += touchEvery {
		b[i] = 0
	}
	return cpu.Wrap(b)
}

// locate says in which segment b lies, and where; 0 is none.
func (h *host) locate(b []byte) (id uint64, off int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := len(h.data) - 1; i >= 0; i-- {
		if off, ok := within(h.data[i].Bytes(), b); ok {
			return uint64(i + 1), off
		}
	}
	return 0, 0
}

// memory is a segment of another rank, mapped when it is first asked for.
func (h *host) memory(ctx context.Context, rank int, c card, id uint64) ([]byte, error) {
	key := remote{rank, id}
	h.mu.Lock()
	m := h.maps[key]
	h.mu.Unlock()
	if m != nil {
		return m.Bytes(), nil
	}
	m, err := shm.Open(ctx, c.Shm.Addr, h.self, h.o.Secret, rank, id)
	if err != nil {
		return nil, fmt.Errorf("ring: %w", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.maps[key] = m
	return m.Bytes(), nil
}

// mapped is a segment that was mapped before, else nil.
func (h *host) mapped(rank int, id uint64) []byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	if m := h.maps[remote{rank, id}]; m != nil {
		return m.Bytes()
	}
	return nil
}

// release gives a group's segments back. Nobody may use them any more.
func (h *host) release(group uint64, world []int) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	id := controlID(group)
	var errs []error
	for _, r := range world {
		if m := h.maps[remote{r, id}]; m != nil {
			delete(h.maps, remote{r, id})
			errs = append(errs, m.Close())
		}
	}
	if s := h.segs[id]; s != nil {
		delete(h.segs, id)
		errs = append(errs, s.Close())
	}
	return firstError(errs)
}

// close gives everything back. What Alloc returned stays valid, as private
// memory.
func (h *host) close() error {
	h.mu.Lock()
	h.closed = true
	h.mu.Unlock()
	errs := []error{h.srv.Close()}
	h.mu.Lock()
	defer h.mu.Unlock()
	for key, m := range h.maps {
		delete(h.maps, key)
		errs = append(errs, m.Close())
	}
	for id, s := range h.segs {
		delete(h.segs, id)
		errs = append(errs, s.Close())
	}
	return firstError(errs)
}

func firstError(errs []error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// hostCard is what a rank that could share memory publishes.
type hostCard struct {
	Addr string // where it serves segments
	Host string // Options.Host
	shm.Place
}

// oneHost reports whether all these ranks share one host's memory. Every rank
// has the same cards, so all of a group come to the same answer.
func oneHost(cards []card, world []int) bool {
	first := cards[world[0]].Shm
	return first != nil && !slices.ContainsFunc(world, func(r int) bool {
		c := cards[r].Shm
		return c == nil || c.Host != first.Host || c.Place != first.Place
	})
}

// agreeTransport says why these cards make no group, "" if they do, and why a
// group that might share memory won't.
func agreeTransport(cards []card) (refusal, note string) {
	world := make([]int, len(cards))
	for r := range cards {
		world[r] = r
		if a, b := cards[0].Transport, cards[r].Transport; a != b {
			return fmt.Sprintf("transport is %q on rank 0, %q on rank %d: give all ranks one", a, b, r), ""
		}
		if cards[r].NoShm != "" && note == "" {
			note = fmt.Sprintf("rank %d can't share memory: %s", r, cards[r].NoShm)
		}
	}
	if cards[0].Transport != TransportShm || oneHost(cards, world) {
		return "", note
	}
	if note == "" {
		note = "the ranks are on several hosts, network namespaces or users, or have several values of Host"
	}
	return "transport is shm, but " + note, ""
}

// offer is this rank's card. Unless it is told not to, it begins to share.
func (n *node) offer(ctx context.Context) card {
	c := card{Size: n.o.Size, Addrs: n.lis.addrs(), Transport: n.o.Transport}
	if n.o.Transport == TransportTCP {
		return c
	}
	place, err := shm.Here(ctx)
	if err == nil {
		n.host, err = newHost(&n.o, n.self)
	}
	if err != nil {
		c.NoShm = err.Error()
		return c
	}
	c.Shm = &hostCard{Addr: n.host.srv.Addr(), Host: n.o.Host, Place: place}
	return c
}

// keepHost gives up sharing when no other rank is on this host.
func (n *node) keepHost() error {
	for r := range n.cards {
		if n.host != nil && r != n.o.Rank && oneHost(n.cards, []int{n.o.Rank, r}) {
			return nil
		}
	}
	if n.host == nil {
		return nil
	}
	h := n.host
	n.host = nil
	return h.close()
}
