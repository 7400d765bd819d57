package launch

import (
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Without it a rank that saves its state for longer than the grace would be
// killed with it unsaved; or one that hangs could not be ended.
func TestOrderlyStopHasTheTimeItTakes(t *testing.T) {
	o, out, _ := options(t, 2, "*:slow=1s")
	o.KeepSignals, o.Grace, o.Orderly = false, 50*time.Millisecond, true
	done := make(chan error, 1)
	run := func(o Options) { done <- Launch(launchContext(t), o) }
	go run(o)
	both := func(out *buffer, s string) {
		require.Eventually(t, func() bool { return strings.Count(out.String(), s) == 2 }, 30*time.Second, time.Millisecond, s)
	}
	both(out, "ready")
	require.NoError(t, unix.Kill(os.Getpid(), syscall.SIGTERM))
	require.NoError(t, <-done)
	both(out, "saved")

	// One fails meanwhile: the others get the grace, no more.
	o, out, _ = options(t, 2, "0:exit=3 1:deaf")
	o.Grace, o.Orderly = 50*time.Millisecond, true
	go run(o)
	var r *RankError
	require.ErrorAs(t, <-done, &r)
	require.Equal(t, 0, r.Rank)

	o, out, _ = options(t, 2, "*:deaf")
	o.KeepSignals, o.Orderly = false, true
	go run(o)
	both(out, "hanging")
	late := make(chan os.Signal, 1) // for one that comes after the job
	signal.Notify(late, syscall.SIGTERM)
	defer signal.Stop(late)
	for ended := false; !ended; {
		require.NoError(t, unix.Kill(os.Getpid(), syscall.SIGTERM))
		select {
		case err := <-done:
			require.Equal(t, 143, ExitCode(err), "the second signal kills")
			ended = true
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// Without it a job that goes on would lose what its earlier life has said.
func TestAppend(t *testing.T) {
	o, _, _ := options(t, 1, "*:exit=3")
	require.Error(t, Launch(launchContext(t), o))
	o.Append, o.Env = true, []string{"TEST_DO=*:lines=1"}
	require.NoError(t, Launch(launchContext(t), o))
	b, err := os.ReadFile(filepath.Join(o.Dir, "rank0.log"))
	require.NoError(t, err)
	require.Contains(t, string(b), "about to exit with 3\n")
	require.Contains(t, string(b), "line 0\n")
	require.FileExists(t, filepath.Join(o.Dir, "error.json.1"))
}

// Without it a suspended rank would not hear that it should stop.
func TestSuspendedRankHears(t *testing.T) {
	o, _, _ := options(t, 2, "0:exit=3 1:die=19")
	o.Grace = 30 * time.Second
	err := Launch(launchContext(t), o)
	var r *RankError
	require.ErrorAs(t, err, &r)
	require.Equal(t, 0, r.Rank)
	require.Equal(t, "SIGTERM", r.Hurt[0].Signal)
}
