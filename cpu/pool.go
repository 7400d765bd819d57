package cpu

import (
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/internal/simd"
)

// parts is work cut into numbered pieces that may run at the same time. part
// runs piece i on compute thread t; what it writes must depend on i alone.
type parts interface{ part(t, i int) }

// pool is the compute threads of a device. One stream at a time holds it; its
// goroutine is thread 0 and the pool's own goroutines are the others.
//
// The pieces of a job are handed out by adding to one word that holds their
// number above and the next piece below. A claim is valid when both, taken by
// one atomic operation, say so; and a job doesn't end, nor its fields change,
// before every valid claim was worked off. So a thread that comes late finds
// either nothing to do or the next job, never half of each.
type pool struct {
	threads int
	ws      []*simd.Workspace // scratch of each thread

	lock fifo

	work   atomic.Uint64 // pieces<<32 | next piece
	job    parts
	left   atomic.Int64              // pieces not finished
	fault  atomic.Pointer[partPanic] // the first panic in the job
	asleep atomic.Int32              // workers that are, or are about to be, parked
	wake   chan struct{}
	joiner atomic.Bool // thread 0 is, or is about to be, parked
	joined chan struct{}
	quit   chan struct{}
	exited sync.WaitGroup
}

// partPanic carries a panic of a compute thread over to the stream.
type partPanic struct {
	value any
	stack []byte
}

// Threads yield their P every spinLoads looks. A worker looks for the next job
// for some 30 µs, which is longer than the pause between two kernels of a
// step; thread 0 as long for the others to finish.
const workerRounds = 150

const partMask = 1<<32 - 1

func newPool(threads int, k *simd.Kernels) *pool {
	p := &pool{
		threads: threads,
		wake:    make(chan struct{}, threads),
		joined:  make(chan struct{}, 1),
		quit:    make(chan struct{}),
	}
	for range threads {
		p.ws = append(p.ws, k.NewWorkspace())
	}
	p.exited.Add(threads - 1)
	for t := 1; t < threads; t++ {
		go p.worker(t)
	}
	return p
}

// close ends the workers; no job may be running.
func (p *pool) close() {
	close(p.quit)
	p.exited.Wait()
}

// acquire gives the pool to s, which then may call run.
func (p *pool) acquire(s *stream) { p.lock.acquire(s.prio, s.ready) }

func (p *pool) release() { p.lock.release() }

// run works off pieces 0 … n-1 of j and returns when all are done. A panic in
// one goes on here, with the stack of its thread, after the others have ended.
func (p *pool) run(n int, j parts) {
	if n == 1 || p.threads == 1 {
		for i := range n {
			j.part(0, i)
		}
		return
	}
	p.job = j
	p.left.Store(int64(n))
	p.work.Store(uint64(n) << 32)
	// A worker counts itself asleep and then looks for work; this offers work
	// and then looks for sleepers.
	for range min(int(p.asleep.Load()), n-1) {
		select {
		case p.wake <- struct{}{}:
		default: // enough tokens are on their way
		}
	}
	for p.step(0) {
	}
	p.join()
	p.job = nil
	if f := p.fault.Swap(nil); f != nil {
		panic(*f)
	}
}

// step claims and runs one piece as thread t, if there is one.
func (p *pool) step(t int) bool {
	if w := p.work.Load(); w&partMask >= w>>32 {
		return false
	}
	w := p.work.Add(1)
	i := w&partMask - 1
	if i >= w>>32 {
		return false
	}
	p.guarded(t, int(i))
	if p.left.Add(-1) == 0 && p.joiner.CompareAndSwap(true, false) {
		p.joined <- struct{}{}
	}
	return true
}

// guarded runs a piece and keeps its panic for thread 0.
func (p *pool) guarded(t, i int) {
	defer func() {
		if v := recover(); v != nil {
			p.fault.CompareAndSwap(nil, &partPanic{v, debug.Stack()})
		}
	}()
	p.job.part(t, i)
}

// join waits until no piece is left. A worker that was slow to look at joiner
// after the last piece of an earlier job may wake it early, so it looks again.
func (p *pool) join() {
	for p.left.Load() != 0 {
		if p.spinJoin() {
			return
		}
		p.joiner.Store(true)
		if p.left.Load() == 0 && p.joiner.CompareAndSwap(true, false) {
			return
		}
		<-p.joined
	}
}

// spinJoin reports whether the last piece was done within a short while.
func (p *pool) spinJoin() bool {
	for range workerRounds {
		for range spinLoads {
			if p.left.Load() == 0 {
				return true
			}
		}
		runtime.Gosched()
	}
	return false
}

// worker is compute thread t > 0.
func (p *pool) worker(t int) {
	defer p.exited.Done()
	for {
		for p.step(t) {
		}
		if p.spin() {
			continue
		}
		p.asleep.Add(1)
		if p.offered() {
			p.asleep.Add(-1)
			continue
		}
		select {
		case <-p.wake:
			p.asleep.Add(-1)
		case <-p.quit:
			return
		}
	}
}

// offered reports whether there is a piece to claim.
func (p *pool) offered() bool {
	w := p.work.Load()
	return w&partMask < w>>32
}

// spin reports whether work appeared within a short while.
func (p *pool) spin() bool {
	for range workerRounds {
		for range spinLoads {
			if p.offered() {
				return true
			}
		}
		runtime.Gosched()
	}
	return false
}

// fifo is a lock that is handed over in the order in which it was asked for,
// within each priority. A sync.Mutex lets whoever runs overtake who waits. Low
// gets it only while no stream of another priority has kernels coming: an update
// in the middle of a backward pass would only throw its data out of the caches.
type fifo struct {
	mu     sync.Mutex
	held   bool
	coming int // streams above Low that go on to a kernel without waiting for anything
	queue  [device.High + 1][]chan struct{}
}

// acquire takes the lock; ch, of capacity 1 and empty, is used to wait on.
func (f *fifo) acquire(p device.Priority, ch chan struct{}) {
	f.mu.Lock()
	if !f.held && (p > device.Low || f.coming == 0) {
		f.held = true
		f.mu.Unlock()
		return
	}
	f.queue[p] = append(f.queue[p], ch)
	f.mu.Unlock()
	<-ch
}

// release hands the lock to the next, of the highest priority first.
func (f *fifo) release() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.held = false
	f.grant()
}

// grant gives the lock, which is free, to whoever may have it.
func (f *fifo) grant() {
	for p := device.High; p >= device.Low; p-- {
		if q := f.queue[p]; len(q) > 0 && (p > device.Low || f.coming == 0) {
			f.held = true
			q[0] <- struct{}{}
			f.queue[p] = q[:copy(q, q[1:])]
			return
		}
	}
}

// come counts a stream that has kernels coming, or no longer has.
func (f *fifo) come(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.coming += n
	if !f.held {
		f.grant()
	}
}
