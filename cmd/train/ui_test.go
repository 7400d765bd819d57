package main

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/trainer"
)

// occupied is a port of 127.0.0.1 that something listens on.
func occupied(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	_, port, err := net.SplitHostPort(l.Addr().String())
	require.NoError(t, err)
	return port
}

// Without it a progress bar could swallow or tear lines.
func TestBarPassesLinesOn(t *testing.T) {
	var out bytes.Buffer
	w := newBarWriter(&out)
	for _, part := range []string{"hello\nstep 1/", "4  loss 2\nst", "ep 4/4  loss 1\nlast"} {
		n, err := w.Write([]byte(part))
		require.NoError(t, err)
		require.Equal(t, len(part), n)
	}
	require.NoError(t, w.Close())
	for _, line := range []string{"hello\n", "step 1/4  loss 2\n", "step 4/4  loss 1\n", "last"} {
		require.Contains(t, out.String(), line)
	}
}

// Without it the first step, evaluations or the end could go unreported.
func TestReporterLines(t *testing.T) {
	var out bytes.Buffer
	r := &reporter{out: &out, every: 10, total: 25}
	for step := 1; step <= 25; step++ {
		m := &trainer.Metrics{Step: step, Loss: 1.5, TokensPerS: 12345, CommMS: 4, ExposedCommMS: 1}
		if step == 25 {
			v := 1.25
			m.ValLoss = &v
		}
		r.observe(m)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	require.Len(t, lines, 4)
	require.Equal(t, "step 1/25  loss 1.5000  12.3 k tokens/s  0.0 ms   75 % of comm hidden", lines[0])
	require.True(t, strings.HasPrefix(lines[3], "step 25/25 ") && strings.HasSuffix(lines[3], "val_loss 1.2500"))
}

// Without it a typo in a list of caps would silently be another list.
func TestParseCaps(t *testing.T) {
	caps, err := parseCaps("--bucket-cap-mb", "1, 4,25")
	require.NoError(t, err)
	require.Equal(t, []float64{1, 4, 25}, caps)
	for _, bad := range []string{"0", "-1", "1,,2", "nan", "x"} {
		_, err := parseCaps("--bucket-cap-mb", bad)
		require.Error(t, err, bad)
	}
}

// Without it the last lines would be lost on a terminal that has no size, as
// those are that mpirun gives its processes.
func TestTerminalWithoutSize(t *testing.T) {
	script, err := exec.LookPath("script")
	if err != nil {
		t.Skip("needs script, of util-linux")
	}
	args := tiny(text(t), t.TempDir(), "--steps", "10", "--batch", "2", "--nproc", "1")
	cmd := exec.Command(script, "-qec", binary+" "+strings.Join(args, " "), os.DevNull)
	cmd.Env = append(os.Environ(), "TERM=xterm")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "done: loss")
}
