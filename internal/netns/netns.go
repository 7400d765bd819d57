// Package netns makes small test networks of Linux network namespaces, one
// host a rank, joined by a bridge whose ports are limited to a rate. It needs
// root, ip and tc (iproute2), and takes everything down again. Programs in it
// reach one another only: nothing leaves the namespaces.
package netns

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// ErrUnsupported says that this machine or user can't make namespaces.
var ErrUnsupported = errors.New("network namespaces are not available")

// Options describes a network. The zero values of the strings have defaults.
type Options struct {
	// Ranks is the number of hosts, 1 … 200.
	Ranks int
	// Rate of each host's link, in either direction, as tc writes it ("1gbit",
	// "200mbit"). Rates up to about 2gbit are kept on a small machine.
	Rate string
	// CongestionControl of the routes, default cubic.
	CongestionControl string
}

var rateForm = regexp.MustCompile(`^[1-9][0-9]*(\.[0-9]+)?(k|m|g)bit$`)

// Validate fills defaults in and names what is out of bounds. Up does it too; a
// program may want to complain before it starts anything.
func (o *Options) Validate() error {
	if o.Ranks < 1 || o.Ranks > 200 {
		return fmt.Errorf("netns: %d ranks; 1 to 200 are possible", o.Ranks)
	}
	if !rateForm.MatchString(o.Rate) {
		return fmt.Errorf("netns: rate %q is not of the form 200mbit, 1gbit or 2.5gbit", o.Rate)
	}
	if o.CongestionControl == "" {
		o.CongestionControl = "cubic"
	}
	return nil
}

// Net is a network that is up.
type Net struct {
	prefix string
	ranks  int
}

const prefixForm = "tandem-%d-"

// Up makes the network. On failure it removes what it had made.
func Up(ctx context.Context, o Options) (*Net, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if err := supported(); err != nil {
		return nil, err
	}
	removeStale(ctx)
	n := &Net{prefix: fmt.Sprintf(prefixForm, os.Getpid()), ranks: o.Ranks}
	if err := n.up(ctx, o); err != nil {
		return nil, errors.Join(err, n.Down())
	}
	return n, nil
}

func supported() error {
	if runtime.GOOS != "linux" {
		return fmt.Errorf("%w: they exist on Linux only", ErrUnsupported)
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("%w: run as root", ErrUnsupported)
	}
	for _, tool := range []string{"ip", "tc"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("%w: %s is missing (apt-get install iproute2)", ErrUnsupported, tool)
		}
	}
	return nil
}

func (n *Net) up(ctx context.Context, o Options) error {
	br := n.bridge()
	lines := []string{
		"ip netns add " + br,
		"ip -n " + br + " link add br0 type bridge",
		"ip -n " + br + " link set br0 up",
	}
	for i := range n.ranks {
		ns, port, addr := n.host(i), "p"+strconv.Itoa(i), n.Addr(i)
		lines = append(lines,
			"ip netns add "+ns,
			"ip -n "+ns+" link add eth0 type veth peer name "+port+" netns "+br,
			"ip -n "+br+" link set "+port+" master br0",
			"ip -n "+br+" link set "+port+" up",
			"ip -n "+ns+" addr add "+addr+"/24 dev eth0",
			"ip -n "+ns+" link set eth0 up",
			"ip -n "+ns+" link set lo up",
			"ip -n "+ns+" route change local 127.0.0.0/8 dev lo table local proto kernel scope host src 127.0.0.1 congctl "+o.CongestionControl,
			"ip -n "+ns+" route change local 127.0.0.1 dev lo table local proto kernel scope host src 127.0.0.1 congctl "+o.CongestionControl,
			// A namespace may not choose every algorithm by sysctl; a route may.
			"ip -n "+ns+" route replace 10.77.0.0/24 dev eth0 proto kernel scope link src "+addr+" congctl "+o.CongestionControl,
			limit(ns, "eth0", o.Rate), limit(br, port, o.Rate))
	}
	for _, l := range lines {
		if err := run(ctx, l); err != nil {
			return err
		}
	}
	return nil
}

// limit shapes one direction with a token bucket of one millisecond's bytes, at
// least 32 KiB: with less, a busy machine refills it too late to keep the rate
// in both directions at once. 50 ms of queue is a shallow switch buffer.
func limit(ns, dev, rate string) string {
	burst := max(32<<10, int(bytesPerSecond(rate)/1000))
	return fmt.Sprintf("ip netns exec %s tc qdisc add dev %s root tbf rate %s burst %d latency 50ms", ns, dev, rate, burst)
}

// bytesPerSecond reads a rate that rateForm has accepted.
func bytesPerSecond(rate string) float64 {
	number, unit := rate[:len(rate)-4], rate[len(rate)-4]
	x, _ := strconv.ParseFloat(number, 64) // rateForm admits numbers only
	return x / 8 * map[byte]float64{'k': 1e3, 'm': 1e6, 'g': 1e9}[unit]
}

// Down removes the network. Processes that still run in it keep their sockets
// until they end.
func (n *Net) Down() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	return remove(ctx, n.prefix)
}

// Command is argv to be run on host rank.
func (n *Net) Command(rank int, argv []string) []string {
	return append([]string{"ip", "netns", "exec", n.host(rank)}, argv...)
}

// Link takes host rank's link down, or up again.
func (n *Net) Link(ctx context.Context, rank int, up bool) error {
	state := "down"
	if up {
		state = "up"
	}
	return run(ctx, "ip -n "+n.host(rank)+" link set eth0 "+state)
}

// Addr is host rank's address.
func (n *Net) Addr(rank int) string { return "10.77.0." + strconv.Itoa(rank+1) }

func (n *Net) host(rank int) string { return n.prefix + strconv.Itoa(rank) }
func (n *Net) bridge() string       { return n.prefix + "br" }

func run(ctx context.Context, line string) error {
	f := strings.Fields(line)
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	if out, err := exec.CommandContext(ctx, f[0], f[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("netns: %s: %w: %s", line, err, bytes.TrimSpace(out))
	}
	return nil
}

// existing lists the namespaces of this machine.
func existing(ctx context.Context) ([]string, error) {
	out, err := exec.CommandContext(ctx, "ip", "netns", "list").Output()
	if err != nil {
		return nil, fmt.Errorf("netns: ip netns list: %w", err)
	}
	var names []string
	for l := range strings.Lines(string(out)) {
		if f := strings.Fields(l); len(f) > 0 {
			names = append(names, f[0])
		}
	}
	return names, nil
}

func remove(ctx context.Context, prefix string) error {
	names, err := existing(ctx)
	for _, name := range names {
		if strings.HasPrefix(name, prefix) {
			err = errors.Join(err, run(ctx, "ip netns del "+name))
		}
	}
	return err
}

// removeStale takes down what a killed process of ours left behind.
func removeStale(ctx context.Context) {
	names, err := existing(ctx)
	if err != nil {
		return
	}
	for _, name := range names {
		var pid int
		if _, err := fmt.Sscanf(name, prefixForm, &pid); err != nil {
			continue
		}
		if _, err := os.Stat("/proc/" + strconv.Itoa(pid)); errors.Is(err, os.ErrNotExist) {
			// Two starters may race to remove it; that one of them fails is fine.
			if err := run(ctx, "ip netns del "+name); err != nil {
				continue
			}
		}
	}
}
