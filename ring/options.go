package ring

import (
	"fmt"
	"log/slog"
	"net"
	"strings"
	"time"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/internal/auth"
	"github.com/tandem-go/tandem/rendezvous"
	"github.com/tandem-go/tandem/trace"
)

// Options of New. Rank, Size and Device must be set, and Store for more than
// one rank; zero values of the rest mean the defaults.
type Options struct {
	// Rank is this process's number, 0 ≤ Rank < Size.
	Rank int
	// Size is the number of ranks.
	Size int
	// Store is where ranks publish their addresses. It is used only in New.
	Store rendezvous.Store
	// Device owns the memory that Alloc returns. It must be a host device.
	Device device.Device

	// Secret is the job's shared secret. It may be empty only while every
	// connection stays on the loopback interface.
	Secret auth.Secret
	// JobID and Generation (how often the job was restarted) keep strays of
	// other jobs and of earlier lives of this one out.
	JobID      string
	Generation int

	// Host is the name or address of this host to listen on and to publish, as
	// the other ranks reach it, or several, separated by commas; a name is looked
	// up and all its addresses are used. Default: the loopback address, for ranks of one host.
	Host string
	// Congestion is the TCP congestion control of data connections (Linux).
	// Default: cubic where the kernel has it, else the system's. cubic is the
	// default because bbr, which paces, reaches a quarter to a half of its rate
	// on loopback and nothing more on the links that ranks are placed on.
	Congestion string

	// Transport is TransportAuto (also ""), TransportShm or TransportTCP; all
	// ranks must give the same. Auto means shared memory in groups whose ranks
	// are on one host, which is where Host, user, running kernel and network
	// namespace are equal, and TCP in others. Shm refuses to do without.
	Transport string

	// Timeout is how long New waits for the other ranks, and how long an
	// operation at the head of the queue waits for their data. Default 60 s.
	Timeout time.Duration
	// Heartbeat is the interval of liveness messages. Default 1 s.
	Heartbeat time.Duration
	// DeadAfter is how long a rank may be silent before it counts as dead. At
	// least twice Heartbeat. Default 10 s.
	DeadAfter time.Duration

	// Logger gets failures and refused connections. nil discards.
	Logger *slog.Logger

	// Flight keeps the last collectives of this node's groups, and writes them to
	// its directory when the group fails. nil keeps none.
	Flight *trace.FlightRecorder

	plan plan
}

// plan holds the constants that choose algorithms. They are the same on all
// ranks, since they decide what goes over the wire.
type plan struct {
	// exchangeBytes is the most that a rank of more than two may receive in an
	// exchange (all contributions to all ranks, then the same additions
	// everywhere). An exchange takes P−1 hops instead of 2(P−1), but moves up to
	// P/2 times the bytes; between two ranks it moves the same. Negative: never.
	exchangeBytes int
	// portable chooses the link that other systems have, for tests.
	portable bool
}

// exchangeLimit is exchangeBytes for a group of size ranks.
func (p *plan) exchangeLimit(size int) int {
	if p.exchangeBytes >= 0 && size == 2 {
		return pairExchange
	}
	return p.exchangeBytes
}

const (
	defaultExchange  = 32 << 10
	pairExchange     = scratchBytes
	defaultTimeout   = 60 * time.Second
	defaultHeartbeat = time.Second
	defaultDeadAfter = 10 * time.Second
)

// validate returns o with the defaults filled in.
func (o Options) validate() (Options, error) {
	if o.Timeout == 0 {
		o.Timeout = defaultTimeout
	}
	if o.Heartbeat == 0 {
		o.Heartbeat = defaultHeartbeat
	}
	if o.DeadAfter == 0 {
		o.DeadAfter = max(defaultDeadAfter, 2*o.Heartbeat)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Transport == "" {
		o.Transport = TransportAuto
	}
	if o.Host == "" {
		o.Host = "127.0.0.1"
	}
	if o.plan.exchangeBytes == 0 {
		o.plan.exchangeBytes = defaultExchange
	}
	switch {
	case o.Size < 1 || o.Size > maxWorld:
		return o, fmt.Errorf("ring: Size is %d, want 1 to %d", o.Size, maxWorld)
	case o.Rank < 0 || o.Rank >= o.Size:
		return o, fmt.Errorf("ring: Rank is %d, want 0 to %d", o.Rank, o.Size-1)
	case o.Device == nil:
		return o, fmt.Errorf("ring: Device is nil")
	case o.Store == nil && o.Size > 1:
		return o, fmt.Errorf("ring: Store is nil, and %d ranks can't find one another without it", o.Size)
	case o.Timeout < 0 || o.Heartbeat < 0:
		return o, fmt.Errorf("ring: Timeout %v and Heartbeat %v must not be negative", o.Timeout, o.Heartbeat)
	case o.DeadAfter < 2*o.Heartbeat:
		return o, fmt.Errorf("ring: DeadAfter %v is less than two heartbeats of %v", o.DeadAfter, o.Heartbeat)
	case o.Transport != TransportAuto && o.Transport != TransportShm && o.Transport != TransportTCP:
		return o, fmt.Errorf("ring: Transport is %q, want %q, %q or %q", o.Transport, TransportAuto, TransportShm, TransportTCP)
	case o.Generation < 0:
		return o, fmt.Errorf("ring: Generation %d is negative", o.Generation)
	}
	return o, nil
}

// hostIPs are the addresses that Host stands for.
func (o *Options) hostIPs(lookup func(string) ([]net.IP, error)) ([]net.IP, error) {
	var ips []net.IP
	for host := range strings.SplitSeq(o.Host, ",") {
		host = strings.TrimSpace(host)
		if ip := net.ParseIP(host); ip != nil {
			ips = append(ips, ip)
			continue
		}
		more, err := lookup(host)
		if err != nil {
			return nil, fmt.Errorf("ring: look up Host %q of rank %d: %w", host, o.Rank, err)
		}
		ips = append(ips, more...)
	}
	for _, ip := range ips {
		if !ip.IsLoopback() && o.Secret == "" {
			return nil, fmt.Errorf("ring: rank %d would listen on %v: %w", o.Rank, ip, auth.ErrNoSecret)
		}
	}
	return ips, nil
}
