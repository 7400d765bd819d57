package rendezvous

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
)

// ErrInterface is in the chain when the network interfaces that a variable
// names can't be used.
var ErrInterface = errors.New("rendezvous: no usable network interface")

// Interface is a network interface of this machine.
type Interface struct {
	Name         string
	Up, Loopback bool
	Addrs        []netip.Addr
}

// SystemInterfaces lists this machine's.
func SystemInterfaces() ([]Interface, error) {
	sys, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("rendezvous: %w", err)
	}
	all := make([]Interface, 0, len(sys))
	for _, s := range sys {
		i := Interface{Name: s.Name, Up: s.Flags&net.FlagUp != 0, Loopback: s.Flags&net.FlagLoopback != 0}
		addrs, err := s.Addrs()
		if err != nil {
			return nil, fmt.Errorf("rendezvous: addresses of %s: %w", s.Name, err)
		}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				i.Addrs = append(i.Addrs, p.Addr().Unmap())
			}
		}
		all = append(all, i)
	}
	return all, nil
}

// The variables that choose interfaces; the first that is set counts.
const (
	envIfname     = "TANDEM_SOCKET_IFNAME"
	envNCCLIfname = "NCCL_SOCKET_IFNAME"
	envGlooIfname = "GLOO_SOCKET_IFNAME"
)

// ChosenAddrs are the addresses under which other machines are to reach this
// one, as TANDEM_SOCKET_IFNAME says, or else NCCL_SOCKET_IFNAME or
// GLOO_SOCKET_IFNAME; nil when none is set. The first two have NCCL's grammar:
//
//	eth,ib     all interfaces whose names begin with eth or ib
//	=eth0,ib0  eth0 and ib0
//	^docker,lo all but those whose names begin with docker or lo
//	^=docker0  all but docker0
//
// Gloo's lists exact names. Interfaces come in the order of the list; all
// their IPv4 and IPv6 addresses count but for link-local ones. Interfaces that
// are down, and loopback ones, are no use to other machines: when nothing else
// is chosen the error, which wraps ErrInterface, or ErrLoopback, says why.
func ChosenAddrs(lookup func(string) (string, bool), all []Interface) ([]netip.Addr, error) {
	v := environ{lookup}
	for _, name := range []string{envIfname, envNCCLIfname, envGlooIfname} {
		if spec := v.get(name); spec != "" {
			c, err := parseIfname(spec, name == envGlooIfname)
			if err != nil {
				return nil, fmt.Errorf("%w: %s=%s: %w", ErrInterface, name, spec, err)
			}
			return usable(name+"="+spec, c.choose(all), all)
		}
	}
	return nil, nil
}

// DefaultAddrs are the addresses of all interfaces that are up, lead off this
// machine and don't look like a bridge for containers.
func DefaultAddrs(all []Interface) ([]netip.Addr, error) {
	c := ifname{names: []string{"docker", "lo", "virbr"}, exclude: true}
	return usable("without "+envIfname, c.choose(all), all)
}

// ifname is a parsed choice.
type ifname struct {
	names          []string
	exact, exclude bool
}

func parseIfname(spec string, exact bool) (c ifname, err error) {
	c.exact = exact
	if !exact {
		spec, c.exclude = strings.CutPrefix(spec, "^")
		spec, c.exact = strings.CutPrefix(spec, "=")
	}
	for n := range strings.SplitSeq(spec, ",") {
		if n = strings.TrimSpace(n); n != "" {
			c.names = append(c.names, n)
		}
	}
	if len(c.names) == 0 {
		err = errors.New("it names no interface")
	}
	return c, err
}

// choose returns interfaces in the order of the list, or the system's.
func (c *ifname) choose(all []Interface) (chosen []Interface) {
	if c.exclude {
		for _, i := range all {
			if !slices.ContainsFunc(c.names, func(n string) bool { return c.matches(n, i.Name) }) {
				chosen = append(chosen, i)
			}
		}
		return chosen
	}
	seen := map[string]bool{}
	for _, n := range c.names {
		for _, i := range all {
			if c.matches(n, i.Name) && !seen[i.Name] {
				seen[i.Name] = true
				chosen = append(chosen, i)
			}
		}
	}
	return chosen
}

func (c *ifname) matches(pattern, name string) bool {
	return pattern == name || !c.exact && strings.HasPrefix(name, pattern)
}

// usable collects the addresses of what was chosen, or says why there is none.
func usable(choice string, chosen, all []Interface) (addrs []netip.Addr, err error) {
	if len(chosen) == 0 {
		return nil, fmt.Errorf("%w: %s matches none of %s", ErrInterface, choice, names(all))
	}
	loopback, why := 0, []string{}
	for _, i := range chosen {
		n := len(addrs)
		switch {
		case i.Loopback:
			loopback++
		case !i.Up:
			why = append(why, i.Name+" is down")
		default:
			for _, a := range i.Addrs {
				if !a.IsLinkLocalUnicast() && !a.IsLoopback() && !slices.Contains(addrs, a) {
					addrs = append(addrs, a)
				}
			}
			if len(addrs) == n {
				why = append(why, i.Name+" has no address that other machines can use")
			}
		}
	}
	switch {
	case len(addrs) > 0:
		return addrs, nil
	case loopback == len(chosen):
		return nil, fmt.Errorf("%w: %s chooses %s, which means this machine on each of them; the job has ranks on other machines: choose one of %s",
			ErrLoopback, choice, names(chosen), names(slices.DeleteFunc(slices.Clone(all),
				func(i Interface) bool { return i.Loopback || !i.Up || len(i.Addrs) == 0 })))
	}
	return nil, fmt.Errorf("%w: %s: %s", ErrInterface, choice, strings.Join(why, ", "))
}

func names(all []Interface) string {
	var s []string
	for _, i := range all {
		s = append(s, i.Name)
	}
	if len(s) == 0 {
		return "no interface"
	}
	return strings.Join(s, ", ")
}
