package netns

import (
	"context"
	"errors"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Without it a mistyped rate would surface as tc's usage text.
func TestValidate(t *testing.T) {
	for rate, ok := range map[string]bool{"1gbit": true, "200mbit": true, "2.5gbit": true, "1": false, "fast": false, "": false, "1gbit; reboot": false} {
		o := Options{Ranks: 2, Rate: rate}
		require.Equal(t, ok, o.Validate() == nil, rate)
	}
	require.Error(t, (&Options{Rate: "1gbit"}).Validate())
	require.Error(t, (&Options{Ranks: 201, Rate: "1gbit"}).Validate())
}

// Without it a bucket could be too small for its rate, and links slower than they claim.
func TestLimit(t *testing.T) {
	require.Equal(t, 1e9/8, bytesPerSecond("1gbit"))
	require.Equal(t, 2.5e6/8, bytesPerSecond("2.5mbit"))
	require.Contains(t, limit("n", "d", "2gbit"), "burst 250000 ")
	require.Contains(t, limit("n", "d", "10mbit"), "burst 32768 ")
}

// Without it hosts might not reach one another, or namespaces would be left behind.
func TestUpAndDown(t *testing.T) {
	ctx := context.Background()
	n, err := Up(ctx, Options{Ranks: 2, Rate: "100mbit"})
	if errors.Is(err, ErrUnsupported) || err != nil && strings.Contains(err.Error(), "not permitted") {
		t.Skipf("skipped: %v", err)
	}
	require.NoError(t, err)
	argv := n.Command(0, []string{"ip", "-o", "route", "get", n.Addr(1)})
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "dev eth0")
	require.NoError(t, n.Down())
	names, err := existing(ctx)
	require.NoError(t, err)
	for _, name := range names {
		require.False(t, strings.HasPrefix(name, n.prefix), name)
	}
}
