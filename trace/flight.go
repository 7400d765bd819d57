package trace

import (
	"fmt"
	"sync"
	"time"
)

// FlightState is how far a collective got.
type FlightState uint8

// The states, in the order in which a collective passes them.
const (
	FlightQueued  FlightState = iota // behind others, or its stream hasn't come to it
	FlightRunning                    // at the head of the queue
	FlightDone
	FlightFailed
	flightStates
)

var flightStateNames = [...]string{"queued", "running", "done", "failed"}

func (s FlightState) String() string {
	if s < flightStates {
		return flightStateNames[s]
	}
	return fmt.Sprintf("state(%d)", uint8(s))
}

// FlightCall is a collective as its caller named it. Strings are kept as they
// are, so constants cost nothing.
type FlightCall struct {
	// Comm is the number that Communicator gave.
	Comm int
	// Seq numbers the collectives of a communicator from 0; messages between two
	// ranks have a sequence for each direction.
	Seq uint64
	// Kind is "allreduce", "broadcast" …; Op is the reduction, Type the element
	// type, both "" where there is none.
	Kind, Op, Type string
	// Count is in elements.
	Count int
	// Name is what the collective is for; Bucket is -1 where none is meant.
	Name   string
	Bucket int
	// Peer is the other rank of a message, in the communicator, otherwise -1.
	Peer int
}

// FlightEntry is a recorded collective. Times count from the recorder's making
// and are 0 where the collective hasn't come so far.
type FlightEntry struct {
	FlightCall
	State                  FlightState
	Queued, Started, Ended time.Duration
}

// FlightOptions configure a FlightRecorder.
type FlightOptions struct {
	// Rank and Size say who records. A Size of 0 means 1.
	Rank, Size int
	// Dir gets flight-rank<k>.json. "" writes no file.
	Dir string
	// JobID and Generation tell the files of one run from those of another.
	JobID      string
	Generation int
	// Entries is how many collectives are kept, the newest; 0 means 2000.
	Entries int
}

const (
	defaultFlightEntries = 2000
	maxFlightEntries     = 1 << 16
	maxFlightComms       = 1 << 10
)

func (o *FlightOptions) validate() error {
	if o.Size == 0 {
		o.Size = 1
	}
	if o.Entries == 0 {
		o.Entries = defaultFlightEntries
	}
	switch {
	case o.Rank < 0 || o.Rank >= o.Size || o.Size > maxRanks:
		return fmt.Errorf("trace: rank %d of %d, at most %d ranks", o.Rank, o.Size, maxRanks)
	case o.Entries < 1 || o.Entries > maxFlightEntries:
		return fmt.Errorf("trace: %d collectives in the flight recorder, want 1 to %d", o.Entries, maxFlightEntries)
	case o.Generation < 0:
		return fmt.Errorf("trace: generation %d is negative", o.Generation)
	}
	return nil
}

// FlightComm is a communicator whose collectives are recorded.
type FlightComm struct {
	Name string `json:"name"`
	// Ranks are the members as ranks of the world, in the communicator's order.
	Ranks []int `json:"ranks"`
}

// FlightRecorder keeps the last collectives of one rank, so that after a
// failure all ranks' records say who did what last. Its methods may be called
// from several goroutines and allocate nothing, apart from Communicator and
// what writes files; on a nil FlightRecorder they do nothing.
type FlightRecorder struct {
	opts  FlightOptions
	epoch time.Time

	mu    sync.Mutex
	ring  []FlightEntry
	count uint64 // collectives ever queued; the next goes to count % len(ring)
	comms []FlightComm
	file  sync.Mutex // one file at a time
}

// NewFlightRecorder makes a recorder. All its memory is taken now.
func NewFlightRecorder(o FlightOptions) (*FlightRecorder, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	return &FlightRecorder{opts: o, epoch: time.Now(), ring: make([]FlightEntry, o.Entries)}, nil
}

// Communicator gives a communicator its number for FlightCall. The name is the
// same on all members. Past a bound of 1024 communicators all later ones share
// the last number.
func (r *FlightRecorder) Communicator(name string, ranks []int) int {
	if r == nil {
		return 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.comms) == maxFlightComms {
		r.comms[maxFlightComms-1] = FlightComm{Name: "others"}
		return maxFlightComms - 1
	}
	r.comms = append(r.comms, FlightComm{Name: name, Ranks: append([]int(nil), ranks...)})
	return len(r.comms) - 1
}

// FlightID is a recorded collective, for Start and End. The zero value is none.
type FlightID uint64

// Queue records a collective in place of the oldest.
func (r *FlightRecorder) Queue(c *FlightCall) FlightID {
	if r == nil {
		return 0
	}
	now := time.Since(r.epoch)
	r.mu.Lock()
	defer r.mu.Unlock()
	e := &r.ring[r.count%uint64(len(r.ring))]
	*e = FlightEntry{FlightCall: *c, Queued: now}
	e.Bucket, e.Peer = max(e.Bucket, -1), max(e.Peer, -1)
	r.count++
	return FlightID(r.count)
}

// Start says that a collective is at the head of the queue.
func (r *FlightRecorder) Start(id FlightID) { r.set(id, FlightRunning) }

// End says that a collective has ended, well or not.
func (r *FlightRecorder) End(id FlightID, failed bool) {
	s := FlightDone
	if failed {
		s = FlightFailed
	}
	r.set(id, s)
}

func (r *FlightRecorder) set(id FlightID, s FlightState) {
	if r == nil || id == 0 {
		return
	}
	now := time.Since(r.epoch)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.count-uint64(id) >= uint64(len(r.ring)) { // overwritten
		return
	}
	e := &r.ring[(uint64(id)-1)%uint64(len(r.ring))]
	e.State = s
	if s == FlightRunning {
		e.Started = now
	} else {
		e.Ended = now
	}
}

// Record copies what is recorded, oldest first.
func (r *FlightRecorder) Record() *FlightRecord {
	f := &FlightRecord{Rank: r.opts.Rank, Size: r.opts.Size, JobID: r.opts.JobID, Generation: r.opts.Generation,
		Culprit: -1, Start: r.epoch.Round(0)}
	r.mu.Lock()
	defer r.mu.Unlock()
	f.At = time.Since(r.epoch)
	n := min(r.count, uint64(len(r.ring)))
	f.Dropped = r.count - n
	f.Comms = append(f.Comms, r.comms...)
	f.Entries = make([]FlightEntry, n)
	for i := range f.Entries {
		f.Entries[i] = r.ring[(r.count-n+uint64(i))%uint64(len(r.ring))]
	}
	return f
}
