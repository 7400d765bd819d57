package ring

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/rendezvous"
)

// workerEnv makes this test binary a rank: the value is a job in JSON.
const workerEnv = "TANDEM_RING_TEST_WORKER"

// job is what a worker process is told.
type job struct {
	Rank, Size int
	Store      string        // address
	Elems      int           // of each allreduce
	Ops        int           // how many, 0 for no end
	DeadAfter  time.Duration // Options
	Timeout    time.Duration
	Transport  string
}

// report is what it says at its end, as one line.
type report struct {
	Rank, Culprit int
	Seq           uint64
	Bucket        int
	Op, Err       string
	Lost, Timeout bool
	Took          time.Duration // the failing call
}

func TestMain(m *testing.M) {
	if v := os.Getenv(workerEnv); v != "" {
		var j job
		if err := json.Unmarshal([]byte(v), &j); err != nil {
			panic(err)
		}
		if err := work(j, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// work runs allreduces until one fails and reports that.
func work(j job, out *os.File) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	st, err := rendezvous.Dial(ctx, rendezvous.ClientOptions{Addr: j.Store, Rank: j.Rank})
	if err != nil {
		return err
	}
	defer st.Close()
	dev, err := cpu.New(&cpu.Options{Threads: 1})
	if err != nil {
		return err
	}
	c, err := New(ctx, Options{Rank: j.Rank, Size: j.Size, Store: st, Device: dev,
		Timeout: j.Timeout, DeadAfter: j.DeadAfter, Heartbeat: j.DeadAfter / 10, Transport: j.Transport})
	if err != nil {
		return err
	}
	defer c.Close()
	s, err := dev.NewStream(device.High)
	if err != nil {
		return err
	}
	buf, err := c.Alloc(4 * j.Elems)
	if err != nil {
		return err
	}
	for k := 0; j.Ops == 0 || k < j.Ops; k++ {
		start := time.Now()
		err := c.AllReduce(s, buf, buf, dtype.Float32, comm.Sum, comm.Tag{Name: "bucket", Bucket: k % 7})
		if err == nil {
			err = s.Sync(ctx)
		}
		if err != nil {
			return json.NewEncoder(out).Encode(describe(j.Rank, err, time.Since(start)))
		}
		if k == 0 {
			fmt.Fprintln(out, "running")
		}
	}
	return nil
}

func describe(rank int, err error, took time.Duration) report {
	r := report{Rank: rank, Culprit: -2, Err: err.Error(), Took: took,
		Lost: errors.Is(err, comm.ErrLost), Timeout: errors.Is(err, context.DeadlineExceeded)}
	var e *comm.OpError
	if errors.As(err, &e) {
		r.Culprit, r.Seq, r.Bucket, r.Op = e.Culprit, e.Seq, e.Tag.Bucket, e.Op
	}
	return r
}

// processes are ranks in processes of their own.
type processes struct {
	t   testing.TB
	cmd []*exec.Cmd
	out []*bufio.Reader
}

// startProcesses starts ranks first … size−1 and returns once they have run
// one operation each, unless this process is a rank too.
func startProcesses(t testing.TB, j job, first int) (*processes, string) {
	t.Helper()
	ln, err := rendezvous.Listen(context.Background(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := rendezvous.Serve(ln, rendezvous.ServerOptions{})
	t.Cleanup(func() { _ = srv.Close() })
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &processes{t: t}
	for r := first; r < j.Size; r++ {
		j.Rank, j.Store = r, srv.Addr().String()
		v, err := json.Marshal(j)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(self)
		cmd.Env = append(os.Environ(), workerEnv+"="+string(v))
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		p.cmd, p.out = append(p.cmd, cmd), append(p.out, bufio.NewReader(out))
	}
	if first == 0 {
		for i := range p.out {
			if line, err := p.out[i].ReadString('\n'); err != nil || line != "running\n" {
				t.Fatalf("rank %d: %q, %v", i, line, err)
			}
		}
	}
	return p, srv.Addr().String()
}

// reports collects what the ranks other than except say at their end.
func (p *processes) reports(except int) []report {
	p.t.Helper()
	var all []report
	for i, out := range p.out {
		if i == except {
			continue
		}
		timer := time.AfterFunc(30*time.Second, func() { _ = p.cmd[i].Process.Kill() })
		line, err := out.ReadString('\n')
		if !timer.Stop() || err != nil {
			p.t.Fatalf("rank %d hangs or died: %q, %v", i, line, err)
		}
		var r report
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			p.t.Fatalf("rank %d: %q: %v", i, line, err)
		}
		all = append(all, r)
	}
	return all
}

func agreed(t *testing.T, all []report, culprit int) {
	t.Helper()
	for _, r := range all {
		if r.Culprit != culprit || r.Seq != all[0].Seq || r.Bucket != all[0].Bucket || r.Op != all[0].Op {
			t.Errorf("ranks disagree, or blame another than rank %d: %+v / %+v", culprit, all[0], r)
		}
	}
}

// Without this the death of a process in mid-allreduce could hang the others
// until the arrival deadline, or leave them asleep on a word that nobody writes, or they would blame one another.
func TestKill(t *testing.T) {
	for _, transport := range transports(t) {
		for _, size := range []int{2, 4} {
			for _, elems := range []int{10, 3_000_000} {
				for _, victim := range []int{0, 1, size - 1} {
					t.Run(fmt.Sprintf("%s, %d of %d, %d", transport, victim, size, elems), func(t *testing.T) {
						kill(t, job{Size: size, Elems: elems, Transport: transport}, victim)
					})
				}
			}
		}
	}
}

func kill(t *testing.T, j job, victim int) {
	p, _ := startProcesses(t, j, 0)
	if err := p.cmd[victim].Process.Kill(); err != nil {
		t.Fatal(err)
	}
	all := p.reports(victim)
	agreed(t, all, victim)
	for _, r := range all {
		if !r.Lost || r.Op != "allreduce" {
			t.Errorf("want ErrLost in an allreduce: %+v", r)
		}
	}
}

// transports are those that processes of this host can use.
func transports(t *testing.T) []string {
	if why := noShared(t); why != "" {
		t.Log("no shared memory here: ", why)
		return []string{TransportTCP}
	}
	return []string{TransportTCP, TransportShm}
}

// Without this a stopped process, whose connections stay open, would hang the
// others.
func TestStop(t *testing.T) {
	for _, transport := range transports(t) {
		for _, victim := range []int{0, 2} {
			t.Run(fmt.Sprint(transport, " ", victim), func(t *testing.T) {
				p, _ := startProcesses(t, job{Size: 3, Elems: 1000, DeadAfter: time.Second, Transport: transport}, 0)
				if err := p.cmd[victim].Process.Signal(syscall.SIGSTOP); err != nil {
					t.Fatal(err)
				}
				all := p.reports(victim)
				agreed(t, all, victim)
			})
		}
	}
}

// Without this somebody who speaks something else, holds another secret or
// belongs to another job or generation could disturb a running job.
func TestStrangers(t *testing.T) {
	dev, err := cpu.New(&cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	all := start(t, 2, Options{Device: dev, Secret: "right", JobID: "job", Generation: 3, Transport: TransportTCP})
	g := all[1].(*group)
	addr := g.n.cards[1].Addrs[0]
	for i := range 2 * maxStrangers {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if i%2 == 0 {
			_, _ = c.Write([]byte(strings.Repeat("GET / HTTP/1.1\r\n", 100)))
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	for _, o := range []Options{
		{Secret: "wrong", JobID: "job", Generation: 3},
		{Secret: "right", JobID: "another", Generation: 3},
		{Secret: "right", JobID: "job", Generation: 2},
		{JobID: "job", Generation: 3},
	} {
		self := g.n.self
		self.Rank, self.JobID, self.Generation = 0, o.JobID, o.Generation
		c, err := dial(ctx, []string{addr}, &o, self, connKey{connDirect, g.id, 0}, 1)
		if err == nil {
			c.Close()
			t.Errorf("%q generation %d was let in", o.JobID, o.Generation)
		}
	}
	// The job goes on, including new connections.
	if errs := exchangeMessages(dev, all); errors.Join(errs...) != nil {
		t.Error(errs)
	}
	for _, c := range all {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

// exchangeMessages sums, and sends from rank 0 to rank 1.
func exchangeMessages(dev device.Device, all []comm.Communicator) []error {
	errs := make(chan error, len(all))
	for i, c := range all {
		go func() {
			errs <- func() error {
				s, err := dev.NewStream(device.High)
				if err != nil {
					return err
				}
				buf, err := c.Alloc(4000)
				if err != nil {
					return err
				}
				if err := c.AllReduce(s, buf, buf, dtype.Float32, comm.Sum, comm.Tag{}); err != nil {
					return err
				}
				if i == 0 {
					err = c.Send(s, buf, dtype.Float32, 1, comm.Tag{})
				} else {
					err = c.Recv(s, buf, dtype.Float32, 0, comm.Tag{})
				}
				return errors.Join(err, s.Sync(context.Background()))
			}()
		}()
	}
	var out []error
	for range all {
		out = append(out, <-errs)
	}
	return out
}
