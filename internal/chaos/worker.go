package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"syscall"
	"time"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/internal/auth"
	"github.com/tandem-go/tandem/rendezvous"
	"github.com/tandem-go/tandem/ring"
)

// workerEnv makes this executable a rank; the value is a task in JSON.
const workerEnv = "TANDEM_CHAOS_WORKER"

// task is what a rank is told.
type task struct {
	Round      round
	Rank       int
	Store      string
	Secret     string
	Generation int
	Host       string
}

// report is what a rank says at its end, in one line.
type report struct {
	Rank    int
	Done    bool // all steps
	Culprit int  // -2 when the error names none
	Seq     uint64
	Bucket  int
	Op, Err string
	Wrong   int // elements
	// Left are goroutines and descriptors that remain after everything is closed.
	Left string
}

// jobID is that of every round.
const jobID = "chaos"

// work is a rank's life. What it says goes to out.
func work(v string, out io.Writer) error {
	var t task
	if err := json.Unmarshal([]byte(v), &t); err != nil {
		return err
	}
	warm()
	goroutines, descriptors := runtime.NumGoroutine(), openFiles()
	w := &worker{task: t, out: out}
	err := w.live()
	r := report{Rank: t.Rank, Done: err == nil, Culprit: -2, Wrong: w.wrong}
	if err != nil {
		r.Err = err.Error()
		var e *comm.OpError
		if errors.As(err, &e) {
			r.Culprit, r.Seq, r.Bucket, r.Op = e.Culprit, e.Seq, e.Tag.Bucket, e.Op
		}
	}
	w.buf = nil
	r.Left = leftBehind(goroutines, descriptors)
	return json.NewEncoder(out).Encode(r)
}

// warm opens what the runtime keeps, so that it isn't taken for a leak.
func warm() {
	r, w, err := os.Pipe()
	if err == nil {
		_, _ = r.Close(), w.Close()
	}
	if n, err := cpu.New(&cpu.Options{Threads: 1}); err == nil {
		_ = n.Close()
	}
}

func openFiles() int {
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(d)
}

// leftBehind waits a moment for what is ending.
func leftBehind(goroutines, descriptors int) string {
	for range 200 {
		runtime.GC() // finalizers unmap memory
		if runtime.NumGoroutine() <= goroutines && openFiles() <= descriptors {
			return ""
		}
		time.Sleep(10 * time.Millisecond)
	}
	stacks := make([]byte, 8<<10)
	stacks = stacks[:runtime.Stack(stacks, true)]
	return fmt.Sprintf("%d goroutines (%d before), %d descriptors (%d before)\n%s",
		runtime.NumGoroutine(), goroutines, openFiles(), descriptors, stacks)
}

// worker is one rank.
type worker struct {
	task
	out   io.Writer
	dev   *cpu.Device
	c     comm.Communicator
	s     device.Stream
	buf   []device.Buffer // of each bucket
	wrong int
}

func (w *worker) live() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	st, err := rendezvous.Dial(ctx, rendezvous.ClientOptions{Addr: w.Store, Rank: w.Rank, Secret: auth.Secret(w.Secret),
		JobID: jobID, Generation: w.Generation})
	if err != nil {
		return err
	}
	defer st.Close()
	if w.dev, err = cpu.New(&cpu.Options{Threads: 1}); err != nil {
		return err
	}
	defer w.dev.Close()
	fmt.Fprintln(w.out, "joining")
	w.c, err = ring.New(ctx, ring.Options{Rank: w.Rank, Size: w.Round.Size, Store: st, Device: w.dev, Secret: auth.Secret(w.Secret),
		JobID: jobID, Generation: w.Generation, Heartbeat: w.Round.Heartbeat, DeadAfter: w.Round.DeadAfter,
		Timeout: w.Round.Timeout, Transport: w.Round.Transport, Host: w.Host})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.c.Close()) }()
	if w.s, err = w.dev.NewStream(device.High); err != nil {
		return err
	}
	for _, n := range w.Round.Buckets {
		b, err := w.c.Alloc(4 * n)
		if err != nil {
			return err
		}
		w.buf = append(w.buf, b)
	}
	for step := range w.Round.Steps {
		if err := w.step(ctx, step); err != nil {
			return err
		}
		if step == 0 {
			fmt.Fprintln(w.out, "running")
		}
	}
	return w.c.Barrier(ctx)
}

// step sums every bucket, all in flight at once, and checks the sums.
func (w *worker) step(ctx context.Context, step int) error {
	w.s.Sync(ctx) // its error comes again
	for b := range w.buf {
		w.fill(step, b)
	}
	for b, buf := range w.buf {
		mine := w.acts(step, b)
		if mine && w.Round.Phase == beforeQueue {
			w.act(ctx)
		}
		if mine && w.Round.What == mismatch {
			buf = buf.Slice(0, 0)
		}
		if err := w.c.AllReduce(w.s, buf, buf, dtype.Float32, comm.Sum, comm.Tag{Name: "bucket", Bucket: b}); err != nil {
			return err
		}
		if mine && w.Round.Phase == afterQueue {
			w.act(ctx)
		}
		if mine && w.Round.Phase == inFlight {
			time.Sleep(w.Round.Delay)
			w.act(ctx)
		}
	}
	if err := w.s.Sync(ctx); err != nil {
		return err
	}
	if w.acts(step, w.Round.Bucket) && w.Round.Phase == afterStep {
		w.act(ctx)
	}
	for b := range w.buf {
		w.check(step, b)
	}
	time.Sleep(2 * time.Millisecond) // what a step computes
	return nil
}

func (w *worker) acts(step, bucket int) bool {
	return w.Round.victim(w.Rank) && step == w.Round.Step && bucket == w.Round.Bucket
}

// act does what this rank does to itself; pauses come from outside.
func (w *worker) act(ctx context.Context) {
	switch w.Round.What {
	case kill, killTwo:
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // dead in an instant
	case skip: // until the others' verdict comes
		for w.c.Err() == nil && ctx.Err() == nil {
			time.Sleep(5 * time.Millisecond)
		}
	case abort:
		w.c.Abort(errors.New("this rank has had enough"))
	case leave:
		_ = w.c.Close()
	}
}

// value is element i of a rank's bucket; sums are exact.
func value(rank, step, bucket, i int) float32 { return float32(rank + 1 + (step+bucket+i)%5) }

func (w *worker) fill(step, bucket int) {
	mem, _ := w.buf[bucket].HostBytes()
	for i := range len(mem) / 4 {
		binary.LittleEndian.PutUint32(mem[4*i:], math.Float32bits(value(w.Rank, step, bucket, i)))
	}
}

func (w *worker) check(step, bucket int) {
	mem, _ := w.buf[bucket].HostBytes()
	n := w.Round.Size
	for i := range len(mem) / 4 {
		want := float32(n*(n+1)/2 + n*((step+bucket+i)%5))
		if math.Float32frombits(binary.LittleEndian.Uint32(mem[4*i:])) != want {
			w.wrong++
		}
	}
}
