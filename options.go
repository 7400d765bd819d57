package tandem

import (
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strconv"
	"time"

	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/launch"
	"github.com/tandem-go/tandem/rendezvous"
)

// The backends that Options.Backend names.
const (
	Auto = "auto" // NCCL where there are GPUs that this build can use, else the ring
	Ring = "ring" // CPU: shared memory within a host, TCP between hosts
	NCCL = "nccl" // NVIDIA GPUs
)

const (
	defaultNProc       = 2
	defaultJoinTimeout = 5 * time.Minute
	maxNProc           = 1024
)

// Options of Init and Run. nil and the zero value mean the defaults.
type Options struct {
	// Backend is Auto, Ring or NCCL; "" means Auto.
	Backend string
	// Threads is the number of compute threads of this rank. 0 means
	// TANDEM_THREADS, or else the allowed cores divided by the ranks on this
	// machine, at least 1. Goroutines come on top: Init raises GOMAXPROCS to
	// Threads + 2 if it is lower, so that communication never waits for assembly.
	Threads int

	// NProc is the number of ranks that Run starts on this machine when it was
	// not started as one itself. 0 means 2 (without GPUs). Init ignores it.
	NProc int
	// Launch is how Run starts them. Run fills in NProc, Threads and, where
	// they are empty, Args and Logger.
	Launch launch.Options

	// WorldSize, Rank, LocalWorldSize and LocalRank say who this process is; a
	// WorldSize of 0 leaves that to the environment (rendezvous.Find lists what
	// is looked for).
	WorldSize, Rank, LocalWorldSize, LocalRank int
	// Store is where the ranks meet: "env://" (MASTER_ADDR and MASTER_PORT) or
	// "tcp://host:port", where rank 0 serves the store. "" means "env://".
	Store string
	// Host is the name or address under which other machines reach this one.
	// "" means TANDEM_HOST, or else the addresses of the interfaces that
	// TANDEM_SOCKET_IFNAME chooses (rendezvous.ChosenAddrs), or else the address
	// that leads to the store. Several are separated by commas.
	Host string

	// JoinTimeout is how long Init waits for the other ranks. 0 means 5 minutes.
	JoinTimeout time.Duration
	// Timeout is how long a collective waits for the other ranks. 0 means the
	// backend's default, 60 s for the ring.
	Timeout time.Duration

	// Transport is how the ring's bytes travel, see ring.Options: "auto", "shm"
	// or "tcp". "" means TANDEM_TRANSPORT, or else "auto".
	Transport string

	// FlightDir gets flight-rank<k>.json, the last collectives of this rank, when
	// the group fails or the process is sent SIGUSR1; "train flight" reads them.
	// "" records nothing and leaves the signal alone.
	FlightDir string

	// Logger gets who this rank is, waiting and failures; nil discards.
	Logger *slog.Logger
}

// validate returns o with defaults filled in that need no environment.
func (o *Options) validate() (Options, error) {
	var v Options
	if o != nil {
		v = *o
	}
	if v.Backend == "" {
		v.Backend = Auto
	}
	if v.JoinTimeout == 0 {
		v.JoinTimeout = defaultJoinTimeout
	}
	if v.NProc == 0 {
		v.NProc = defaultNProc
	}
	if v.Logger == nil {
		v.Logger = slog.New(slog.DiscardHandler)
	}
	switch {
	case v.Backend != Auto && v.Backend != Ring && v.Backend != NCCL:
		return v, fmt.Errorf("tandem: unknown backend %q, want %s, %s or %s", v.Backend, Auto, Ring, NCCL)
	case v.NProc < 1 || v.NProc > maxNProc:
		return v, fmt.Errorf("tandem: nproc %d, want 1 to %d", v.NProc, maxNProc)
	case v.Threads < 0:
		return v, fmt.Errorf("tandem: threads %d, want at least 1, or 0 for a share of the cores", v.Threads)
	case v.JoinTimeout < 0 || v.Timeout < 0:
		return v, fmt.Errorf("tandem: join timeout %v and timeout %v must not be negative", v.JoinTimeout, v.Timeout)
	}
	return v, nil
}

func (o *Options) flags() rendezvous.Flags {
	return rendezvous.Flags{
		WorldSize: o.WorldSize, Rank: o.Rank, LocalWorldSize: o.LocalWorldSize, LocalRank: o.LocalRank, Store: o.Store,
	}
}

// threads is the number of compute threads for one of n ranks here.
func (o *Options) threads(n int) (int, error) {
	if o.Threads > 0 {
		return o.Threads, nil
	}
	if s := os.Getenv("TANDEM_THREADS"); s != "" {
		t, err := strconv.Atoi(s)
		if err != nil || t < 1 {
			return 0, fmt.Errorf("tandem: TANDEM_THREADS=%q, want a number of at least 1", s)
		}
		return t, nil
	}
	return max(1, cpu.AllowedCores()/n), nil
}

// raiseGOMAXPROCS gives goroutines room beside the compute threads.
func raiseGOMAXPROCS(threads int) {
	if n := cpu.GOMAXPROCS(threads); runtime.GOMAXPROCS(0) < n {
		runtime.GOMAXPROCS(n)
	}
}
