package ring

import (
	"errors"
	"net"
	"testing"

	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/internal/auth"
)

// Without this a host with several addresses, of both families, would be known
// under one of them only, or a name that leads off the host be served without a
// secret.
func TestHostAddresses(t *testing.T) {
	lookup := func(name string) ([]net.IP, error) {
		if name == "two" {
			return []net.IP{net.ParseIP("10.0.0.1"), net.ParseIP("2001:db8::1")}, nil
		}
		return nil, errors.New("no such host")
	}
	o := Options{Host: "127.0.0.1, ::1,two", Secret: "s"}
	ips, err := o.hostIPs(lookup)
	if err != nil || len(ips) != 4 || ips[3].String() != "2001:db8::1" {
		t.Errorf("%v, %v", ips, err)
	}
	o.Secret = ""
	if _, err = o.hostIPs(lookup); !errors.Is(err, auth.ErrNoSecret) {
		t.Error(err)
	}
	o.Host = "127.0.0.1,absent"
	if _, err = o.hostIPs(lookup); err == nil {
		t.Error("an unknown name was accepted")
	}
}

// Without this ranks could not meet over both families at once.
func TestDualStack(t *testing.T) {
	if l, err := net.Listen("tcp", "[::1]:0"); err != nil {
		t.Skip("no IPv6 here: ", err)
	} else {
		_ = l.Close()
	}
	dev, err := cpu.New(&cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	all := start(t, 2, Options{Device: dev, Host: "::1,127.0.0.1", Transport: TransportTCP})
	if n := len(all[0].(*group).n.cards[1].Addrs); n != 2 {
		t.Errorf("%d addresses", n)
	}
	if err := errors.Join(exchangeMessages(dev, all)...); err != nil {
		t.Error(err)
	}
	for _, c := range all {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}
