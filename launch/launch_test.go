package launch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tandem-go/tandem/rendezvous"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// TestMain is also the program that the tests start: TEST_DO says what each
// rank does, as "rank:what" separated by blanks, "*" for all others.
func TestMain(m *testing.M) {
	do := os.Getenv("TEST_DO")
	if do == "" {
		code := m.Run()
		if err := goleak.Find(); code == 0 && err != nil {
			fmt.Fprintln(os.Stderr, "goroutines are left:", err)
			code = 1
		}
		os.Exit(code)
	}
	Guard()
	other := ""
	for f := range strings.FieldsSeq(do) {
		r, what, _ := strings.Cut(f, ":")
		if r == os.Getenv("RANK") {
			act(what)
			os.Exit(0)
		}
		if r == "*" {
			other = what
		}
	}
	act(other)
	os.Exit(0)
}

// act is what a rank of the tests does.
func act(what string) {
	verb, arg, _ := strings.Cut(what, "=")
	switch verb {
	case "":
	case "exit":
		n, _ := strconv.Atoi(arg)
		fmt.Fprintf(os.Stderr, "about to exit with %d\n", n)
		os.Exit(n)
	case "die": // by a signal
		n, _ := strconv.Atoi(arg)
		_ = unix.Kill(os.Getpid(), syscall.Signal(n))
		select {}
	case "hang":
		fmt.Println("hanging")
		time.Sleep(time.Minute)
	case "deaf": // hang, and ignore SIGTERM; write the process's number to arg
		signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGPIPE)
		fmt.Println("hanging")
		if arg != "" {
			_ = os.WriteFile(arg, []byte(strconv.Itoa(os.Getpid())), 0o600)
		}
		time.Sleep(time.Minute)
	case "child": // hang with a child that ignores SIGTERM and names itself in arg
		c := exec.Command(os.Args[0])
		c.Env = append(os.Environ(), "TEST_DO=*:deaf="+filepath.Join(arg, "child"+os.Getenv("RANK")))
		c.Stdout, c.Stderr = os.Stdout, os.Stderr
		if err := c.Start(); err != nil {
			panic(err)
		}
		time.Sleep(time.Minute)
	case "slow": // end well, a while after SIGTERM
		c := make(chan os.Signal, 1)
		signal.Notify(c, syscall.SIGTERM)
		fmt.Println("ready")
		<-c
		d, _ := time.ParseDuration(arg)
		time.Sleep(d)
		fmt.Println("saved")
	case "signals": // tell which signals come, end well on SIGTERM or SIGINT
		c := make(chan os.Signal, 8)
		signal.Notify(c, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGUSR2)
		fmt.Println("ready")
		for s := range c {
			fmt.Println("got", unix.SignalName(s.(syscall.Signal)))
			if s == syscall.SIGTERM || s == syscall.SIGINT || s == syscall.SIGHUP {
				return
			}
		}
	case "env":
		for _, e := range os.Environ() {
			fmt.Println(e)
		}
	case "stdin":
		b, err := io.ReadAll(os.Stdin)
		fmt.Printf("%d bytes, %v\n", len(b), err)
	case "lines":
		n, _ := strconv.Atoi(arg)
		for i := range n {
			fmt.Printf("line %d\n", i)
			fmt.Fprintf(os.Stderr, "problem %d\n", i)
		}
		fmt.Print("no newline")
	case "bar":
		fmt.Print("10 %\r50 %\r\r\n100 %\r\nä\n")
	case "join":
		join()
	case "launch": // a launcher to be killed; its ranks write their numbers to arg
		o := Options{NProc: 2, Args: []string{os.Args[0]}, Env: []string{"TEST_DO=*:child=" + arg}, Stdout: io.Discard, Stderr: io.Discard}
		_ = os.Unsetenv("TEST_DO")
		fmt.Println(Launch(context.Background(), o))
	default:
		panic(what)
	}
}

// join does what tandem.Init does with the environment.
func join() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	e, err := rendezvous.FromEnv(os.LookupEnv)
	if err == nil {
		var c *rendezvous.Conn
		if c, err = rendezvous.Connect(ctx, e, nil); err == nil {
			err = errors.Join(rendezvous.Barrier(ctx, c.Store, "b", e.Rank, e.WorldSize), c.Close())
		}
	}
	fmt.Println("joined", err)
	if err != nil {
		os.Exit(1)
	}
}

// buffer is a destination that several goroutines may read and write.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// options start n ranks of the test program.
func options(t *testing.T, n int, do string) (Options, *buffer, *buffer) {
	out, errs := &buffer{}, &buffer{}
	return Options{
		NProc: n, Args: []string{os.Args[0]}, Env: []string{"TEST_DO=" + do}, Dir: t.TempDir(),
		Stdout: out, Stderr: errs, Grace: 5 * time.Second, KeepSignals: true,
	}, out, errs
}

func launchContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// gone says whether a process has ended (a zombie has).
func gone(pid int) bool {
	if unix.Kill(pid, 0) != nil {
		return true
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return err != nil && os.IsNotExist(err) && dirExists("/proc/self")
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return strings.HasPrefix(rest, "Z")
}

func dirExists(p string) bool { _, err := os.Stat(p); return err == nil }

// childPIDs waits for the files of "child" and reads them.
func childPIDs(t *testing.T, dir string, ranks ...int) []int {
	var pids []int
	for _, r := range ranks {
		require.Eventually(t, func() bool {
			b, _ := os.ReadFile(filepath.Join(dir, "child"+strconv.Itoa(r)))
			pid, err := strconv.Atoi(string(b))
			if err == nil {
				pids = append(pids, pid)
			}
			return err == nil
		}, 30*time.Second, 5*time.Millisecond)
	}
	return pids
}

// Without it ranks would not find one another, with the launcher as the host
// of the store.
func TestRanksJoin(t *testing.T) {
	o, out, errs := options(t, 3, "*:join")
	require.NoError(t, Launch(launchContext(t), o), errs)
	for r := range 3 {
		require.Contains(t, out.String(), fmt.Sprintf("%d: joined <nil>\n", r))
	}
}

// Without it a failure would be reported as success, or as somebody else's.
func TestFirstFailure(t *testing.T) {
	o, _, errs := options(t, 3, "1:exit=7 *:hang")
	err := Launch(launchContext(t), o)
	var r *RankError
	require.ErrorAs(t, err, &r)
	require.Equal(t, 1, r.Rank)
	require.Equal(t, 7, r.ExitCode)
	require.Equal(t, 7, ExitCode(fmt.Errorf("wrapped: %w", err)))
	require.Equal(t, []string{"about to exit with 7"}, r.Stderr)
	require.Contains(t, errs.String(), "1: about to exit with 7\n")
	require.Len(t, r.Hurt, 2)
	for _, h := range r.Hurt {
		require.Equal(t, "SIGTERM", h.Signal)
		require.True(t, h.ByUs)
	}
	require.ErrorContains(t, err, "rank 1 (pid ")
	require.ErrorContains(t, err, "about to exit with 7")

	b, err := os.ReadFile(filepath.Join(o.Dir, "error.json"))
	require.NoError(t, err)
	var j struct {
		Rank     int      `json:"rank"`
		ExitCode int      `json:"exit_code"`
		Stderr   []string `json:"stderr"`
		Log      string   `json:"log"`
		Hurt     []any    `json:"hurt"`
	}
	require.NoError(t, json.Unmarshal(b, &j))
	require.Equal(t, 1, j.Rank)
	require.Equal(t, 7, j.ExitCode)
	require.Equal(t, r.Stderr, j.Stderr)
	require.Equal(t, filepath.Join(o.Dir, "rank1.log"), j.Log)
	require.Len(t, j.Hurt, 2)

	o.Env = []string{"TEST_DO=*:lines=1"}
	require.NoError(t, Launch(launchContext(t), o))
	require.NoFileExists(t, filepath.Join(o.Dir, "error.json"), "of an earlier job")
}

// Without it the rank that was killed would be hidden behind those that it
// took down.
func TestKilledRankIsTheCause(t *testing.T) {
	o, _, _ := options(t, 3, "0:exit=1 2:die=9 *:hang")
	err := Launch(launchContext(t), o)
	var r *RankError
	require.ErrorAs(t, err, &r)
	require.Equal(t, 2, r.Rank)
	require.Equal(t, "SIGKILL", r.Signal)
	require.Contains(t, r.Hint, "out of memory")
	require.Equal(t, 137, ExitCode(err))
	require.ErrorContains(t, err, "SIGKILL: ")
	require.ErrorContains(t, err, "rank 0 exited with code 1")
}

// Without it a rank that ignores SIGTERM would keep the job alive.
func TestGrace(t *testing.T) {
	o, _, _ := options(t, 2, "0:exit=1 1:deaf")
	o.Grace = 100 * time.Millisecond
	err := Launch(launchContext(t), o)
	var r *RankError
	require.ErrorAs(t, err, &r)
	require.Equal(t, 0, r.Rank)
	require.Equal(t, "SIGKILL", r.Hurt[0].Signal)
	require.True(t, r.Hurt[0].ByUs)
}

// Without it what ranks start would outlive the job: here after a failure, and
// after an end by cancellation.
func TestGrandchildrenDie(t *testing.T) {
	dir := t.TempDir()
	o, out, _ := options(t, 2, "*:child="+dir)
	ctx, cancel := context.WithCancelCause(launchContext(t))
	why := errors.New("enough")
	var pids []int
	go func() {
		defer cancel(why)
		pids = childPIDs(t, dir, 0, 1)
		require.Eventually(t, func() bool { return strings.Count(out.String(), "hanging") == 2 }, 30*time.Second, time.Millisecond)
	}()
	require.ErrorIs(t, Launch(ctx, o), why)
	require.Len(t, pids, 2)
	for _, p := range pids {
		require.Eventually(t, func() bool { return gone(p) }, 10*time.Second, time.Millisecond, "grandchild %d", p)
	}
	for r := range 2 {
		b, err := os.ReadFile(filepath.Join(o.Dir, fmt.Sprintf("rank%d.log", r)))
		require.NoError(t, err)
		require.Contains(t, string(b), "hanging", "the grandchild's output belongs to the rank's log")
	}
}

// Without it ranks, and what they started, would outlive a launcher that was
// killed.
func TestNoOrphans(t *testing.T) {
	dir := t.TempDir()
	launcher := exec.Command(os.Args[0])
	launcher.Env = append(os.Environ(), "TEST_DO=*:launch="+dir)
	require.NoError(t, launcher.Start())
	pids := childPIDs(t, dir, 0, 1)
	for _, p := range pids {
		require.False(t, gone(p))
	}
	require.NoError(t, launcher.Process.Kill())
	_ = launcher.Wait()
	for _, p := range pids {
		require.Eventually(t, func() bool { return gone(p) }, 10*time.Second, time.Millisecond, "grandchild %d", p)
	}
}

// Without it Ctrl-C, a scheduler's SIGTERM or a request for a checkpoint would
// not reach the ranks.
func TestSignalsAreForwarded(t *testing.T) {
	o, out, _ := options(t, 2, "*:signals")
	o.KeepSignals = false
	done := make(chan error, 1)
	go func() { done <- Launch(launchContext(t), o) }()
	saw := func(s string) {
		require.Eventually(t, func() bool {
			return strings.Contains(out.String(), "0: "+s+"\n") && strings.Contains(out.String(), "1: "+s+"\n")
		}, 30*time.Second, time.Millisecond, s)
	}
	saw("ready")
	for _, s := range []syscall.Signal{syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGTERM} {
		require.NoError(t, unix.Kill(os.Getpid(), s))
		saw("got " + unix.SignalName(s))
	}
	require.NoError(t, <-done, "both ended well")

	o, out, _ = options(t, 2, "*:hang")
	o.KeepSignals = false
	go func() { done <- Launch(launchContext(t), o) }()
	saw("hanging")
	require.NoError(t, unix.Kill(os.Getpid(), syscall.SIGINT))
	err := <-done
	var s *SignalError
	require.ErrorAs(t, err, &s)
	require.Equal(t, 130, ExitCode(err))
}

// Without it a program that also turns signals into the end of a context would
// have its ranks killed by the first Ctrl-C, without the time to save.
func TestSignalAndContext(t *testing.T) {
	o, out, _ := options(t, 2, "*:signals")
	o.KeepSignals = false
	ctx, stop := signal.NotifyContext(launchContext(t), syscall.SIGTERM)
	defer stop()
	go func() {
		for strings.Count(out.String(), "ready") < 2 {
			time.Sleep(time.Millisecond)
		}
		_ = unix.Kill(os.Getpid(), syscall.SIGTERM)
	}()
	err := Launch(ctx, o)
	require.Equal(t, 2, strings.Count(out.String(), "got SIGTERM"), "both ended well: %s", out)
	if err != nil { // the end of ctx may be all that was seen
		require.ErrorIs(t, err, context.Canceled)
	}

	j := &job{o: &o, stopping: true, stopped: context.Canceled}
	j.forward(syscall.SIGTERM)
	require.Equal(t, &SignalError{syscall.SIGTERM}, j.stopped)
	require.Nil(t, j.deadline, "nothing is sent, and the grace goes on")
}

// Without it one stream of a rank could land within a line of the other, in the
// log that they share: a held-back byte that may begin the secret did that.
func TestLogKeepsLinesWhole(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "log"))
	require.NoError(t, err)
	out := &logWriter{to: f, failed: func(err error) { t.Error(err) }}
	errs := &logWriter{to: f, failed: func(err error) { t.Error(err) }}
	out.write([]byte("one\nno newlin"))
	errs.write([]byte("problem\n"))
	out.write([]byte("e"))
	errs.write([]byte("10 %\r50"))
	out.flush()
	errs.flush()
	require.NoError(t, f.Close())
	b, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.Equal(t, "one\nproblem\n10 %\rno newline50", string(b))
}

// Without it logs would miss lines, or output would come unmarked.
func TestOutput(t *testing.T) {
	const n = 2000
	o, out, errs := options(t, 2, "0:lines=2000 1:bar")
	require.NoError(t, Launch(launchContext(t), o))
	b, err := os.ReadFile(filepath.Join(o.Dir, "rank0.log"))
	require.NoError(t, err)
	require.Equal(t, n, strings.Count(string(b), "line "))
	require.Equal(t, n, strings.Count(string(b), "problem "))
	require.Contains(t, string(b), "no newline")
	require.Equal(t, n, strings.Count(out.String(), "0: line "))
	require.Equal(t, n, strings.Count(errs.String(), "0: problem "))
	require.True(t, strings.HasSuffix(errs.String(), "0: problem 1999\n"))
	require.Contains(t, out.String(), "0: no newline\n")
	b, err = os.ReadFile(filepath.Join(o.Dir, "rank1.log"))
	require.NoError(t, err)
	require.Equal(t, "10 %\r50 %\r\r\n100 %\r\nä\n", string(b))
	for _, want := range []string{"1: 10 %\n", "1: 50 %\n", "1: 100 %\n", "1: ä\n"} {
		require.Contains(t, out.String(), want)
	}

	o, out, _ = options(t, 2, "0:bar 1:lines=3")
	o.Passthrough, o.Ranks = true, []int{0}
	require.NoError(t, Launch(launchContext(t), o))
	require.Equal(t, "10 %\r50 %\r\r\n100 %\r\nä\n", out.String())

	o, out, _ = options(t, 2, "*:lines=1")
	o.Ranks, o.Prefix = []int{1}, "host:"
	require.NoError(t, Launch(launchContext(t), o))
	require.Equal(t, "host:1: line 0\nhost:1: no newline\n", out.String())
}

// Without it a rank would read the launcher's input, as a JSON-RPC server's.
func TestStdinIsEmpty(t *testing.T) {
	o, out, _ := options(t, 1, "*:stdin")
	require.NoError(t, Launch(launchContext(t), o))
	require.Equal(t, "0: 0 bytes, <nil>\n", out.String())
}
