package tandem

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/tandem-go/tandem/rendezvous"
)

// host is how other machines reach this one, "" when all ranks are here. It
// refuses what means "this machine" on each of several machines.
func (o *Options) host(e rendezvous.Env) (string, error) {
	return o.hostAmong(e, rendezvous.SystemInterfaces)
}

func (o *Options) hostAmong(e rendezvous.Env, interfaces func() ([]rendezvous.Interface, error)) (string, error) {
	for _, given := range []struct{ what, host string }{{"Options.Host", o.Host}, {"TANDEM_HOST", os.Getenv("TANDEM_HOST")}} {
		if given.host == "" {
			continue
		}
		if e.MultiHost() && loopbackOnly(given.host) {
			return "", fmt.Errorf("tandem: %s is %s: %w; the job has ranks on other machines, which need an address that leads here",
				given.what, given.host, rendezvous.ErrLoopback)
		}
		return given.host, nil
	}
	if !e.MultiHost() {
		return "", nil
	}
	all, err := interfaces()
	if err != nil {
		return "", err
	}
	addrs, err := rendezvous.ChosenAddrs(os.LookupEnv, all)
	if err != nil {
		return "", fmt.Errorf("tandem: which address leads here: %w", err)
	}
	if addrs != nil {
		return joinAddrs(addrs), nil
	}
	// Connecting a datagram socket sends nothing: it asks for the route.
	c, err := net.Dial("udp", e.Addr())
	if err != nil {
		return "", fmt.Errorf("tandem: which address of this machine leads to the store at %s: %w; set TANDEM_HOST or TANDEM_SOCKET_IFNAME", e.Addr(), err)
	}
	defer c.Close()
	ip := c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap()
	if !ip.IsLoopback() {
		return ip.WithZone("").String(), nil
	}
	// The store is here, under a name that means loopback here.
	addrs, err = rendezvous.DefaultAddrs(all)
	if err != nil {
		return "", fmt.Errorf("tandem: which address leads here: %w", errors.Join(rendezvous.ErrLoopback, err))
	}
	return joinAddrs(addrs), nil
}

// loopbackOnly says that a list of addresses leads nowhere but here. Names are
// left to who looks them up, apart from the one that is never another machine's.
func loopbackOnly(hosts string) bool {
	for h := range strings.SplitSeq(hosts, ",") {
		h = strings.TrimSpace(h)
		ip, err := netip.ParseAddr(h)
		if h != "localhost" && (err != nil || !ip.IsLoopback()) {
			return false
		}
	}
	return true
}

func joinAddrs(addrs []netip.Addr) string {
	s := make([]string, len(addrs))
	for i, a := range addrs {
		s[i] = a.String()
	}
	return strings.Join(s, ",")
}
