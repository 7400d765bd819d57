package tandem

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/launch"
	"github.com/tandem-go/tandem/rendezvous"
	"go.uber.org/goleak"
)

// TestMain is also the program that the tests start: with TEST_PROGRAM it calls
// Run, as a user's program does.
func TestMain(m *testing.M) {
	what := os.Getenv("TEST_PROGRAM")
	if what == "" {
		code := m.Run()
		if err := goleak.Find(); code == 0 && err != nil {
			fmt.Fprintln(os.Stderr, "goroutines are left:", err)
			code = 1
		}
		os.Exit(code)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	o := &Options{
		NProc: 2, Threads: 1, JoinTimeout: 20 * time.Second, Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		Launch: launch.Options{Env: []string{"TEST_PROGRAM=" + what}},
	}
	err := Run(ctx, o, func(ctx context.Context, g *Group) error { return program(ctx, g, what) })
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(launch.ExitCode(err))
}

// program is what a rank does.
func program(ctx context.Context, g *Group, what string) error {
	switch what {
	case "sum":
		sum, err := sumOfRanks(ctx, g)
		fmt.Printf("rank %d of %d (%s, %s): sum %v, procs %v\n", g.Rank, g.WorldSize, g.Source, g.Backend, sum,
			runtime.GOMAXPROCS(0) >= g.Threads+2)
		return err
	case "fail":
		if g.Rank == 1 {
			os.Exit(42)
		}
		return g.Comm.Barrier(ctx)
	case "tool": // a rank that starts a program which asks who it is
		if g.Rank == 0 {
			c := exec.CommandContext(ctx, os.Args[0])
			c.Env = append(os.Environ(), "TEST_PROGRAM=inner")
			out, err := c.CombinedOutput()
			fmt.Printf("%s%v\n", out, err)
		}
		return g.Comm.Barrier(ctx)
	case "inner":
		fmt.Printf("inner rank %d of %d\n", g.Rank, g.WorldSize)
		return nil
	}
	return errors.New("unknown program " + what)
}

// sumOfRanks is 1 + 2 + … over all ranks, by the communicator.
func sumOfRanks(ctx context.Context, g *Group) (float32, error) {
	buf, err := g.Comm.Alloc(4)
	if err != nil {
		return 0, err
	}
	b, _ := buf.HostBytes()
	binary.NativeEndian.PutUint32(b, math.Float32bits(float32(g.Rank+1)))
	s, err := g.Device.NewStream(device.High)
	if err != nil {
		return 0, err
	}
	if err := g.Comm.AllReduce(s, buf, buf, dtype.Float32, comm.Sum, comm.Tag{Name: "test", Bucket: -1}); err != nil {
		return 0, err
	}
	err = s.Sync(ctx)
	return math.Float32frombits(binary.NativeEndian.Uint32(b)), err
}

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// start runs the test program with these variables on top of a clean
// environment.
func start(t *testing.T, what string, vars ...string) *exec.Cmd {
	c := exec.CommandContext(testContext(t), os.Args[0])
	for _, kv := range os.Environ() {
		if name, _, _ := strings.Cut(kv, "="); !rendezvous.IsIdentity(name) && !strings.HasPrefix(name, "TANDEM_") {
			c.Env = append(c.Env, kv)
		}
	}
	c.Env = append(append(c.Env, "TEST_PROGRAM="+what), vars...)
	return c
}

func freePort(t *testing.T) int {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	return ln.Addr().(*net.TCPAddr).Port
}

// Without it a program started by hand would not become two ranks.
func TestRunStartsRanks(t *testing.T) {
	out, err := start(t, "sum").CombinedOutput()
	require.NoError(t, err, "%s", out)
	for r := range 2 {
		require.Contains(t, string(out), fmt.Sprintf("%d: rank %d of 2 (torch, ring): sum 3, procs true\n", r, r))
	}
	require.Equal(t, 1, strings.Count(string(out), "using the CPU"), "said once, by the parent: %s", out)
}

// Without it a failing rank's exit code would be lost, or its name.
func TestRunReportsFailure(t *testing.T) {
	out, err := start(t, "fail").CombinedOutput()
	var e *exec.ExitError
	require.ErrorAs(t, err, &e)
	require.Equal(t, 42, e.ExitCode())
	require.Contains(t, string(out), "rank 1 (pid ")
	require.Contains(t, string(out), "exit code 42")
}

// Without it ranks that torchrun or mpirun start would not find one another:
// rank 0 serves the store here.
func TestRanksOfAnotherLauncher(t *testing.T) {
	for name, tc := range map[string]struct {
		source string
		vars   func(rank int) []string
	}{
		"torchrun": {"torch", func(r int) []string {
			return []string{fmt.Sprint("RANK=", r), "WORLD_SIZE=3", fmt.Sprint("LOCAL_RANK=", r), "LOCAL_WORLD_SIZE=3"}
		}},
		"mpirun": {"open mpi", func(r int) []string {
			return []string{fmt.Sprint("OMPI_COMM_WORLD_RANK=", r), "OMPI_COMM_WORLD_SIZE=3",
				fmt.Sprint("OMPI_COMM_WORLD_LOCAL_RANK=", r), "OMPI_COMM_WORLD_LOCAL_SIZE=3"}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			port := freePort(t)
			var wg sync.WaitGroup
			for r := range 3 {
				wg.Go(func() {
					c := start(t, "sum", append(tc.vars(r), "MASTER_ADDR=localhost", fmt.Sprint("MASTER_PORT=", port))...)
					out, err := c.CombinedOutput()
					if err != nil || !strings.Contains(string(out), fmt.Sprintf("rank %d of 3 (%s, ring): sum 6", r, tc.source)) {
						t.Errorf("%v: %s", err, out)
					}
				})
			}
			wg.Wait()
		})
	}
}

// Without it a program that a rank starts would pose as that rank.
func TestToolInsideARank(t *testing.T) {
	out, err := start(t, "tool").CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "are ignored")
	require.Contains(t, string(out), "inner rank 0 of 2")
	require.Contains(t, string(out), "inner rank 1 of 2")
}

// clean removes what an enclosing job would say of this process.
func clean(t *testing.T) {
	for _, kv := range os.Environ() {
		if name, _, _ := strings.Cut(kv, "="); rendezvous.IsIdentity(name) || strings.HasPrefix(name, "TANDEM_") {
			t.Setenv(name, "")
		}
	}
}

// Without it a program without a launcher could not run at all, or would leave
// goroutines and sockets behind.
func TestInitAlone(t *testing.T) {
	clean(t)
	var log bytes.Buffer
	before := runtime.GOMAXPROCS(0)
	defer runtime.GOMAXPROCS(before)
	g, err := Init(testContext(t), &Options{Threads: before + 3, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	require.Equal(t, 1, g.WorldSize)
	require.Equal(t, before+5, runtime.GOMAXPROCS(0))
	require.Contains(t, log.String(), "using the CPU")
	sum, err := sumOfRanks(testContext(t), g)
	require.NoError(t, err)
	require.Equal(t, float32(1), sum)
	require.NoError(t, g.Store.Set(testContext(t), "k", nil))
	require.NoError(t, g.Close())
	require.NoError(t, g.Close())

	ran := false
	require.NoError(t, Run(testContext(t), &Options{NProc: 1, Threads: 1}, func(_ context.Context, g *Group) error {
		ran = g.WorldSize == 1
		return nil
	}))
	require.True(t, ran)
	why := errors.New("why")
	require.ErrorIs(t, Run(testContext(t), &Options{NProc: 1, Threads: 1}, func(context.Context, *Group) error { return why }), why)
}

// Without it half an environment would be a silent world of one, or a missing
// rank and a taken port would be mysteries.
func TestInitErrors(t *testing.T) {
	clean(t)
	ctx := testContext(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	for name, tc := range map[string]struct {
		env  string
		o    Options
		want string
		is   error
	}{
		"RANK alone":  {"RANK=0", Options{}, "WORLD_SIZE", rendezvous.ErrPartial},
		"backend":     {"", Options{Backend: "gloo"}, `unknown backend "gloo"`, nil},
		"nccl":        {"", Options{Backend: NCCL}, "use --backend ring", ErrNoNCCL},
		"nproc":       {"", Options{NProc: -1}, "nproc -1", nil},
		"threads":     {"", Options{Threads: -1}, "threads -1", nil},
		"threads env": {"TANDEM_THREADS=x", Options{}, `TANDEM_THREADS="x"`, nil},
		"timeout":     {"", Options{Timeout: -1}, "must not be negative", nil},
		"store":       {"", Options{Store: "file:///x"}, "tcp://host:port", nil},
		"port taken":  {"", Options{WorldSize: 2, LocalWorldSize: 2, Store: "tcp://" + ln.Addr().String()}, ln.Addr().String(), syscall.EADDRINUSE},
		"absent": {"", Options{WorldSize: 2, LocalWorldSize: 2, Store: fmt.Sprint("tcp://127.0.0.1:", freePort(t)), JoinTimeout: 200 * time.Millisecond},
			"rank 1 of 2", context.DeadlineExceeded},
		"no secret": {"", Options{WorldSize: 2, Store: "tcp://10.0.0.1:1"}, "TANDEM_SECRET", rendezvous.ErrNoSecret},
	} {
		t.Run(name, func(t *testing.T) {
			if k, v, ok := strings.Cut(tc.env, "="); ok {
				t.Setenv(k, v)
			}
			g, err := Init(ctx, &tc.o)
			require.Nil(t, g)
			require.ErrorContains(t, err, tc.want)
			if tc.is != nil {
				require.ErrorIs(t, err, tc.is)
			}
			err = Run(ctx, &tc.o, func(context.Context, *Group) error { t.Error("ran"); return nil })
			require.ErrorContains(t, err, tc.want)
		})
	}
}

// Without it a machine with GPUs would silently train on its CPU.
func TestChoose(t *testing.T) {
	for _, tc := range []struct {
		m    machine
		wish string
		line string
		loud bool
		err  string
	}{
		{machine{nil, true}, Auto, "no NVIDIA GPU found (/dev/nvidia0): using the CPU", false, ""},
		{machine{nil, true}, Ring, "", false, ""},
		{machine{nil, true}, NCCL, "", false, "no NVIDIA GPU found"},
		{machine{[]string{"/dev/nvidia0"}, false}, Auto, "CGO_ENABLED=1", true, ""},
		{machine{[]string{"/dev/nvidia0"}, false}, NCCL, "", false, "built without cgo"},
		{machine{[]string{"/dev/nvidia0"}, true}, Auto, "no GPU backend", true, ""},
		{machine{[]string{"/dev/nvidia0"}, false}, Ring, "", false, ""},
	} {
		backend, line, loud, err := tc.m.choose(tc.wish)
		if tc.err != "" {
			require.ErrorIs(t, err, ErrNoNCCL)
			require.ErrorContains(t, err, tc.err)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, Ring, backend)
		require.Contains(t, line, tc.line)
		require.Equal(t, tc.loud, loud)
		require.NotContains(t, line, "\n")
	}
}

// Without it other machines would be told an address that only this one knows.
func TestHost(t *testing.T) {
	clean(t)
	e := rendezvous.Env{WorldSize: 2, LocalWorldSize: 2, MasterAddr: "127.0.0.1", MasterPort: 9}
	h, err := (&Options{}).host(e)
	require.NoError(t, err)
	require.Empty(t, h, "all ranks are here")
	e.LocalWorldSize = 1
	here := []rendezvous.Interface{{Name: "lo", Up: true, Loopback: true, Addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}},
		{Name: "eth0", Up: true, Addrs: []netip.Addr{netip.MustParseAddr("10.0.0.7"), netip.MustParseAddr("2001:db8::7")}},
		{Name: "ib0", Up: true, Addrs: []netip.Addr{netip.MustParseAddr("10.1.0.7")}}}
	interfaces := func() ([]rendezvous.Interface, error) { return here, nil }
	t.Setenv("NCCL_SOCKET_IFNAME", "ib")
	h, err = (&Options{}).hostAmong(e, interfaces)
	require.NoError(t, err)
	require.Equal(t, "10.1.0.7", h)
	t.Setenv("TANDEM_SOCKET_IFNAME", "lo")
	_, err = (&Options{}).hostAmong(e, interfaces)
	require.ErrorIs(t, err, rendezvous.ErrLoopback)
	t.Setenv("TANDEM_SOCKET_IFNAME", "")
	t.Setenv("NCCL_SOCKET_IFNAME", "")
	h, err = (&Options{}).hostAmong(e, interfaces)
	require.NoError(t, err)
	require.Equal(t, "10.0.0.7,2001:db8::7,10.1.0.7", h)
	_, err = (&Options{}).hostAmong(e, func() ([]rendezvous.Interface, error) { return here[:1], nil })
	require.ErrorIs(t, err, rendezvous.ErrLoopback)
	require.NotContains(t, h, "127.0.0.1", "the store's name means this machine")
	t.Setenv("TANDEM_HOST", "127.0.0.1, ::1")
	_, err = (&Options{}).host(e)
	require.ErrorIs(t, err, rendezvous.ErrLoopback)
	_, err = (&Options{Host: "localhost"}).host(e)
	require.ErrorIs(t, err, rendezvous.ErrLoopback)
	t.Setenv("TANDEM_HOST", "name")
	h, err = (&Options{}).host(e)
	require.NoError(t, err)
	require.Equal(t, "name", h)
	h, err = (&Options{Host: "flag"}).host(e)
	require.NoError(t, err)
	require.Equal(t, "flag", h)
}

// reported is an error that tells whose fault it is, as ddp's do.
type reported int

func (e reported) Error() string { return fmt.Sprintf("rank %d did it", int(e)) }
func (e reported) Culprit() int  { return int(e) }

// Without it the launcher would name the rank that ended because of another's
// fault, whenever that fault isn't a collective's.
func TestCulprit(t *testing.T) {
	op := &comm.OpError{Op: "allreduce", Rank: 0, Culprit: 2, Err: comm.ErrClosed}
	for _, c := range []struct {
		err  error
		want int
	}{
		{nil, -1},
		{errors.New("disk full"), -1},
		{fmt.Errorf("step 3: %w", op), 2},
		{fmt.Errorf("step 3: %w", reported(1)), 1},
		{errors.Join(op, reported(1)), 1},
		{errors.Join(reported(-1), op), 2},
		{reported(-1), -1},
	} {
		require.Equal(t, c.want, culprit(c.err), "%v", c.err)
	}
}
