package launch

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// environmentOf runs ranks that print their environment, and parses it.
func environmentOf(t *testing.T, o Options, out *buffer) []map[string]string {
	require.NoError(t, Launch(launchContext(t), o))
	env := make([]map[string]string, o.NProc)
	for line := range strings.Lines(out.String()) {
		var r int
		_, err := fmt.Sscanf(line, "%d: ", &r)
		require.NoError(t, err)
		_, kv, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
		k, v, _ := strings.Cut(kv, "=")
		if env[r] == nil {
			env[r] = map[string]string{}
		}
		env[r][k] = v
	}
	return env
}

// Without it a rank would lack a variable, or inherit one of another job.
func TestEnvironment(t *testing.T) {
	for _, kv := range []string{"OMPI_COMM_WORLD_RANK=9", "SLURM_PROCID=9", "TORCHELASTIC_RUN_ID=x", "TANDEM_INSIDE=1 x", "RANK=9", "NODE_RANK=9", "TANDEM_PORT=9", "TANDEM_HOST=h"} {
		k, v, _ := strings.Cut(kv, "=")
		t.Setenv(k, v)
	}
	t.Setenv("GOMAXPROCS", "")
	t.Setenv("TANDEM_THREADS", "")
	o, out, _ := options(t, 2, "*:env")
	o.Threads, o.JobID, o.Generation, o.Devices = 3, "j", 4, []string{"GPU-a", "GPU-b"}
	for r, e := range environmentOf(t, o, out) {
		for k, want := range map[string]string{
			"RANK": fmt.Sprint(r), "LOCAL_RANK": fmt.Sprint(r), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
			"MASTER_ADDR": "127.0.0.1", "TANDEM_JOB_ID": "j", "TANDEM_GENERATION": "4", "TANDEM_THREADS": "3", "GOMAXPROCS": "5",
			"CUDA_VISIBLE_DEVICES": o.Devices[r], "TANDEM_LAUNCHED": "1", "TANDEM_HOST": "h",
		} {
			require.Equal(t, want, e[k], k)
		}
		require.NotEmpty(t, e["MASTER_PORT"])
		require.True(t, strings.HasPrefix(e["TANDEM_STORE"], "tcp://127.0.0.1:"))
		require.NotEqual(t, "tcp://127.0.0.1:"+e["MASTER_PORT"], e["TANDEM_STORE"], "another program's store could not listen there")
		for _, k := range []string{"OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID", "TANDEM_INSIDE", "NODE_RANK", "TANDEM_PORT", "TANDEM_LIVENESS_FD"} {
			require.NotContains(t, e, k)
		}
	}

	t.Setenv("GOMAXPROCS", "7")
	t.Setenv("TANDEM_THREADS", "6")
	o, out, _ = options(t, 1, "*:env")
	e := environmentOf(t, o, out)[0]
	require.Equal(t, "7", e["GOMAXPROCS"])
	require.Equal(t, "6", e["TANDEM_THREADS"])
}

// Without it ranks behind another address could not reach the store, and
// those in a namespace would not be entered.
func TestWrapAndListener(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		t.Skip("no second loopback address:", err)
	}
	o, out, _ := options(t, 2, "*:env")
	o.Listener = ln
	o.Wrap = func(rank int, args []string) []string {
		return append([]string{"env", fmt.Sprint("WRAPPED=", rank)}, args...)
	}
	for r, e := range environmentOf(t, o, out) {
		require.Equal(t, fmt.Sprint(r), e["WRAPPED"])
		require.Equal(t, "tcp://"+ln.Addr().String(), e["TANDEM_STORE"])
		require.Equal(t, "127.0.0.2", e["MASTER_ADDR"])
	}
	_, err = ln.Accept()
	require.ErrorIs(t, err, net.ErrClosed)
	require.Equal(t, []string{os.Args[0]}, o.Args)
}

// Without it the job's secret could be read in a terminal or a log file.
func TestSecretIsRedactedInOutput(t *testing.T) {
	o, out, _ := options(t, 1, "*:env")
	require.Equal(t, "[redacted]", environmentOf(t, o, out)[0]["TANDEM_SECRET"])
	b, err := os.ReadFile(filepath.Join(o.Dir, "rank0.log"))
	require.NoError(t, err)
	require.Contains(t, string(b), "TANDEM_SECRET=[redacted]\n")
	for _, a := range o.Args {
		require.NotContains(t, a, "TANDEM_SECRET")
	}
}

// Without it bad options would start some ranks, or none without a word.
func TestRefusals(t *testing.T) {
	good, _, _ := options(t, 2, "*:exit=99")
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	for name, tc := range map[string]struct {
		change func(*Options)
		want   string
	}{
		"nproc":       {func(o *Options) { o.NProc = 0 }, "NProc 0"},
		"no command":  {func(o *Options) { o.Args = nil }, "no command"},
		"command":     {func(o *Options) { o.Args = []string{"no-such-command"} }, "no-such-command"},
		"path":        {func(o *Options) { o.Args = []string{"/no/such/command"} }, "/no/such/command"},
		"dir":         {func(o *Options) { o.Dir = filepath.Join(file, "x") }, file},
		"devices":     {func(o *Options) { o.Devices = []string{"0"} }, "1 devices for 2 ranks"},
		"rank filter": {func(o *Options) { o.Ranks = []int{2} }, "rank 2"},
		"identity":    {func(o *Options) { o.Env = []string{"RANK=1"} }, "RANK is set for each rank"},
		"entry":       {func(o *Options) { o.Env = []string{"X"} }, `"X"`},
		"grace":       {func(o *Options) { o.Grace = -1 }, "grace"},
	} {
		t.Run(name, func(t *testing.T) {
			o := good
			tc.change(&o)
			err := Launch(launchContext(t), o)
			require.ErrorContains(t, err, tc.want)
			require.Equal(t, 1, ExitCode(err))
		})
	}
}
