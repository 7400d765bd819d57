package rendezvous

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// machine is a made-up list of interfaces.
func machine() []Interface {
	ip := func(s ...string) (a []netip.Addr) {
		for _, x := range s {
			a = append(a, netip.MustParseAddr(x))
		}
		return a
	}
	return []Interface{
		{"lo", true, true, ip("127.0.0.1", "::1")},
		{"eth0", true, false, ip("10.0.0.7", "fe80::1", "2001:db8::7")},
		{"eth1", true, false, ip("10.1.0.7", "10.1.0.8")},
		{"eth10", false, false, ip("10.2.0.7")},
		{"ib0", true, false, ip("fd00::7")},
		{"docker0", true, false, ip("172.17.0.1")},
		{"wlan0", true, false, ip("fe80::2")},
	}
}

// Without it NCCL's grammar, which users bring along, could mean something else here.
func TestChosenAddrs(t *testing.T) {
	for _, c := range []struct{ vars, want string }{
		{"", ""},
		{"TANDEM_SOCKET_IFNAME=eth", "10.0.0.7 2001:db8::7 10.1.0.7 10.1.0.8"},
		{"TANDEM_SOCKET_IFNAME=eth1", "10.1.0.7 10.1.0.8"},
		{"TANDEM_SOCKET_IFNAME=ib,eth1", "fd00::7 10.1.0.7 10.1.0.8"},
		{"TANDEM_SOCKET_IFNAME==eth1,ib0", "10.1.0.7 10.1.0.8 fd00::7"},
		{"TANDEM_SOCKET_IFNAME=^docker,lo,eth", "fd00::7"},
		{"TANDEM_SOCKET_IFNAME=^=eth1,docker0", "10.0.0.7 2001:db8::7 fd00::7"},
		{"TANDEM_SOCKET_IFNAME=lo,ib0", "fd00::7"},
		{"NCCL_SOCKET_IFNAME=ib TANDEM_SOCKET_IFNAME=eth1", "10.1.0.7 10.1.0.8"},
		{"NCCL_SOCKET_IFNAME==ib0 GLOO_SOCKET_IFNAME=eth1", "fd00::7"},
		{"GLOO_SOCKET_IFNAME=eth1", "10.1.0.7 10.1.0.8"},
		{"GLOO_SOCKET_IFNAME=ib0,eth1", "fd00::7 10.1.0.7 10.1.0.8"},
		{"TANDEM_SOCKET_IFNAME=lo", "error: loopback"},
		{"TANDEM_SOCKET_IFNAME==eth10", "error: eth10 is down"},
		{"TANDEM_SOCKET_IFNAME=wlan", "error: wlan0 has no address"},
		{"TANDEM_SOCKET_IFNAME==eth", "error: matches none of lo, eth0"},
		{"GLOO_SOCKET_IFNAME=eth", "error: matches none of lo, eth0"},
		{"TANDEM_SOCKET_IFNAME=^", "error: names no interface"},
		{"TANDEM_SOCKET_IFNAME=^lo,eth,ib,docker,wlan", "error: matches none"},
	} {
		t.Run(c.vars, func(t *testing.T) {
			vars := map[string]string{}
			for _, kv := range strings.Fields(c.vars) {
				k, v, _ := strings.Cut(kv, "=")
				vars[k] = v
			}
			addrs, err := ChosenAddrs(func(k string) (string, bool) { v, ok := vars[k]; return v, ok }, machine())
			if want, bad := strings.CutPrefix(c.want, "error: "); bad {
				require.ErrorContains(t, err, want)
				if want == "loopback" {
					require.ErrorIs(t, err, ErrLoopback)
				} else {
					require.ErrorIs(t, err, ErrInterface)
				}
				return
			}
			require.NoError(t, err)
			var got []string
			for _, a := range addrs {
				got = append(got, a.String())
			}
			require.Equal(t, c.want, strings.Join(got, " "))
		})
	}
}

// Without it a machine whose own name means loopback could publish an address
// of its container bridge, or none.
func TestDefaultAddrs(t *testing.T) {
	addrs, err := DefaultAddrs(machine())
	require.NoError(t, err)
	require.Equal(t, "[10.0.0.7 2001:db8::7 10.1.0.7 10.1.0.8 fd00::7]", strings.TrimSpace(sprint(addrs)))
	_, err = DefaultAddrs(machine()[:1])
	require.ErrorIs(t, err, ErrInterface)
}

func sprint(addrs []netip.Addr) string {
	var s []string
	for _, a := range addrs {
		s = append(s, a.String())
	}
	return "[" + strings.Join(s, " ") + "]"
}

// Without it some choice could return an address that no other machine can
// reach, or one twice.
func TestChosenAddrsAreUsable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		spec := rapid.StringMatching(`\^?=?(eth[0-9]?|lo|ib0?|docker|wlan0|x)(,(eth[0-9]?|lo|ib0?|docker0|))*`).Draw(t, "spec")
		addrs, err := ChosenAddrs(func(k string) (string, bool) { return spec, k == envIfname }, machine())
		if err != nil {
			require.Empty(t, addrs)
			return
		}
		seen := map[netip.Addr]bool{}
		for _, a := range addrs {
			require.False(t, a.IsLoopback() || a.IsLinkLocalUnicast() || seen[a], "%s: %v", spec, addrs)
			seen[a] = true
		}
		require.NotEmpty(t, addrs)
	})
}

// Without it the list that the system gives could be read wrongly.
func TestSystemInterfaces(t *testing.T) {
	all, err := SystemInterfaces()
	require.NoError(t, err)
	for _, i := range all {
		if i.Loopback && i.Up {
			require.NotEmpty(t, i.Addrs)
			require.True(t, i.Addrs[0].IsLoopback(), "%+v", i)
			return
		}
	}
	t.Skip("no loopback interface here")
}
