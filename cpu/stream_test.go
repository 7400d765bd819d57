package cpu

import (
	"errors"
	"math"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/internal/simd"
)

func newStreamOf(t testing.TB, d *Device) device.Stream {
	t.Helper()
	s, err := d.NewStream(device.Normal)
	require.NoError(t, err)
	return s
}

func compile(t testing.TB, d *Device, op device.Op) device.Kernel {
	t.Helper()
	k, err := d.Compile(op)
	require.NoError(t, err)
	return k
}

func vector(n int) device.Tensor { return device.Tensor{Shape: []int{n}, Type: dtype.Float32} }

// program that does what a test wants, as thread 0 or in parts.
type testProgram struct {
	n int
	f func(t, i int)
}

func (p *testProgram) run(pool *pool, _ [][]byte) error { pool.run(p.n, p); return nil }
func (p *testProgram) part(t, i int)                    { p.f(t, i) }

func testKernel(d *Device, n int, f func(t, i int)) *kernel {
	return &kernel{dev: d, name: "test kernel", prog: &testProgram{n, f}}
}

// Without it a piece of a kernel could be lost or run twice, or two kernels
// share the compute threads.
func TestPool(t *testing.T) {
	for _, threads := range []int{1, 2, 5} {
		d := open(t, &Options{Threads: threads})
		var inside atomic.Int32
		for range 3 {
			s := newStreamOf(t, d)
			for n := range 300 {
				counts := make([]int32, n)
				var first atomic.Bool
				require.NoError(t, s.Launch(testKernel(d, n, func(thread, i int) {
					if first.CompareAndSwap(false, true) && inside.Add(1) != 1 {
						panic("two kernels at once")
					}
					if thread < 0 || thread >= threads {
						panic("no such thread")
					}
					if atomic.AddInt32(&counts[i], 1); i == n-1 {
						inside.Add(-1)
					}
				}), nil))
				require.NoError(t, s.HostFunc(func() error {
					if slices.ContainsFunc(counts, func(c int32) bool { return c != 1 }) {
						return errors.New("a piece did not run once")
					}
					return nil
				}))
			}
			require.NoError(t, s.Sync(t.Context()))
		}
	}
}

// Without it a bug in a kernel would take the process with it, or the pool.
func TestKernelPanic(t *testing.T) {
	d := open(t, &Options{Threads: 3})
	for _, n := range []int{1, 50} {
		s := newStreamOf(t, d)
		require.NoError(t, s.Launch(testKernel(d, n, func(_, i int) {
			if i == n/2 {
				panic("planted")
			}
		}), nil))
		require.ErrorContains(t, s.Sync(t.Context()), "test kernel panicked: planted")
	}
	ran := false
	s := newStreamOf(t, d)
	require.NoError(t, s.Launch(testKernel(d, 1, func(_, _ int) { ran = true }), nil))
	require.NoError(t, s.Sync(t.Context()))
	require.True(t, ran)
}

// Without it waiting kernels could overtake one another, or high priority not matter.
func TestFIFO(t *testing.T) {
	var f fifo
	hold := make(chan struct{}, 1)
	f.acquire(device.Normal, hold)
	var order []int
	turns := make([]chan struct{}, 6)
	for i := range turns {
		turns[i] = make(chan struct{}, 1)
		p := device.Normal
		if i == 5 {
			p = device.High
		}
		f.queue[p] = append(f.queue[p], turns[i])
	}
	for range turns {
		f.release()
		for i, ch := range turns {
			select {
			case <-ch:
				order = append(order, i)
			default:
			}
		}
	}
	f.release()
	require.Equal(t, []int{5, 0, 1, 2, 3, 4}, order)
	require.False(t, f.held)
}

// Without it updates would interrupt the backward pass and throw its data out of
// the caches, or never run where the pass waits for them.
func TestLowPriorityWaitsForKernelsThatCome(t *testing.T) {
	d := open(t, &Options{Threads: 1})
	low, err := d.NewStream(device.Low)
	require.NoError(t, err)
	s := newStreamOf(t, d)
	var order []string // kernels exclude one another
	note := func(what string) *kernel {
		return testKernel(d, 1, func(_, _ int) { order = append(order, what) })
	}
	updated, err := d.NewEvent()
	require.NoError(t, err)
	gate, entered := make(chan struct{}), make(chan struct{})
	first := testKernel(d, 1, func(_, _ int) { close(entered); <-gate })
	require.NoError(t, s.Launch(first, nil))
	<-entered
	require.NoError(t, low.Launch(note("low"), nil))
	require.NoError(t, low.Record(updated))
	require.NoError(t, s.Launch(note("a"), nil))
	require.NoError(t, s.Record(new(event)))
	require.NoError(t, s.Launch(note("b"), nil))
	require.NoError(t, s.Wait(updated))
	require.NoError(t, s.Launch(note("c"), nil))
	require.Eventually(t, func() bool {
		l := &d.pool.lock
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.queue[device.Low]) == 1
	}, time.Minute, time.Millisecond, "the stream of low priority never asked for the pool")
	close(gate)
	require.NoError(t, s.Sync(t.Context()))
	require.Equal(t, []string{"a", "b", "low", "c"}, order)

	// Between two kernels the pool is free, but not for low priority.
	var f fifo
	f.come(1)
	ch := make(chan struct{}, 1)
	got := make(chan struct{})
	go func() { f.acquire(device.Low, ch); close(got) }()
	require.Eventually(t, func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.held || len(f.queue[device.Low]) == 1
	}, time.Minute, time.Millisecond)
	require.False(t, f.held)
	f.come(-1)
	<-got
	require.True(t, f.held)

	// A stream that is idle, has failed or was stopped holds nobody up.
	require.NoError(t, low.Launch(note("idle"), nil))
	require.NoError(t, low.Sync(t.Context()))
	require.NoError(t, s.Launch(testKernel(d, 1, func(_, _ int) { panic("on purpose") }), nil))
	require.ErrorContains(t, s.Sync(t.Context()), "on purpose")
	require.NoError(t, low.Launch(note("after a failure"), nil))
	require.NoError(t, low.Sync(t.Context()))
}

// Without it training would feed the garbage collector in every step.
func TestSteadyStateAllocatesNothing(t *testing.T) {
	for _, threads := range []int{1, 3} {
		d := open(t, &Options{Threads: threads})
		a, b := newStreamOf(t, d), newStreamOf(t, d)
		e, err := d.NewEvent()
		require.NoError(t, err)
		const n = 3 * chunkElems
		x, err := d.Alloc(4 * n)
		require.NoError(t, err)
		y, err := d.Alloc(4 * n)
		require.NoError(t, err)
		k := compile(t, d, device.Op{Kind: device.GELU, In: []device.Tensor{vector(n)}, Out: []device.Tensor{vector(n)}})
		args := []device.Buffer{x, y}
		nop := func() error { return nil }
		ctx := t.Context()
		step := func() {
			for range 20 {
				err = errors.Join(err, a.Launch(k, args), a.Record(e), b.Wait(e), b.HostFunc(nop), b.Copy(x, y),
					b.Record(e), a.Wait(e))
				e.Reset()
			}
			err = errors.Join(err, a.Sync(ctx), b.Sync(ctx))
		}
		step()
		require.Zero(t, testing.AllocsPerRun(50, step))
		require.NoError(t, err)
	}
}

// Without it a kernel could allocate in every launch.
func TestKernelsAllocateNothing(t *testing.T) {
	for _, threads := range []int{1, 3} {
		d := open(t, &Options{Threads: threads})
		s := newStreamOf(t, d)
		for name, c := range layer(t, 256, 96, 3, 64, 65) {
			k, args, ctx := compile(t, d, c.op()), c.buffers(t, d), t.Context()
			var err error
			require.Zero(t, testing.AllocsPerRun(20, func() {
				err = errors.Join(err, s.Launch(k, args), s.Sync(ctx))
			}), name)
			require.NoError(t, err, name)
		}
	}
}

// Without it a token or target of the wrong vocabulary would read other memory.
func TestIndexOutOfRange(t *testing.T) {
	d := open(t, &Options{Threads: 2})
	f := func(shape ...int) arg { return floats(make([]float32, device.Tensor{Shape: shape}.Elems()), shape...) }
	bad := ints([]int64{0, 1, 70, 2}, 4)
	seq := device.Attr{Seq: 4}
	for _, c := range []call{
		{kind: device.Embedding, attr: seq, in: []arg{f(65, 8), f(4, 8), bad}, out: []arg{f(4, 8)}},
		{kind: device.EmbeddingGradToken, in: []arg{bad, f(4, 8)}, out: []arg{f(65, 8)}},
		{kind: device.CrossEntropy, in: []arg{f(4, 65), bad}, state: []arg{f(4), f(1)}, out: []arg{f()}},
		{kind: device.CrossEntropyGrad, in: []arg{f(4, 65), bad, f()}, state: []arg{f(4), f(1)}, out: []arg{f(4, 65)}},
	} {
		s := newStreamOf(t, d)
		require.NoError(t, s.Launch(compile(t, d, c.op()), c.buffers(t, d)))
		err := s.Sync(t.Context())
		require.ErrorContains(t, err, " 70 at position 2 is outside [")
		require.ErrorContains(t, err, string(c.kind))
	}
}

// Without it the engine could take a mistake for a gap and hide it behind a
// fallback, or the reverse.
func TestCompileErrors(t *testing.T) {
	d := open(t, &Options{Threads: 1})
	m := func(shape ...int) device.Tensor { return device.Tensor{Shape: shape, Type: dtype.Float32} }
	list := func(t ...device.Tensor) []device.Tensor { return t }
	double := device.Tensor{Shape: []int{4}, Type: dtype.Float64}
	for name, c := range map[string]struct {
		op          device.Op
		unsupported bool
	}{
		"float64":        {device.Op{Kind: device.GELU, In: list(double), Out: list(double)}, true},
		"function":       {device.Op{Kind: device.Unary, Attr: device.Attr{Func: "sin"}, In: list(m(4)), Out: list(m(4))}, true},
		"accumulate":     {device.Op{Kind: device.GELU, Attr: device.Attr{Accumulate: true}, In: list(m(4)), Out: list(m(4))}, true},
		"kind":           {device.Op{Kind: "fft"}, true},
		"inputs":         {device.Op{Kind: device.GELU, Out: list(m(4))}, false},
		"inner":          {device.Op{Kind: device.MatMul, In: list(m(2, 3), m(4, 5)), Out: list(m(2, 5))}, false},
		"outer":          {device.Op{Kind: device.MatMul, In: list(m(2, 3), m(3, 5)), Out: list(m(5, 2))}, false},
		"missing bias":   {device.Op{Kind: device.MatMul, Attr: device.Attr{Bias: true}, In: list(m(2, 3), m(3, 5)), Out: list(m(2, 5))}, false},
		"batch":          {device.Op{Kind: device.BatchedMatMul, In: list(m(2, 2, 3), m(1, 3, 5)), Out: list(m(2, 2, 5))}, false},
		"broadcast":      {device.Op{Kind: device.Binary, Attr: device.Attr{Func: device.Add}, In: list(m(4), m(2)), Out: list(m(4))}, false},
		"two scalars":    {device.Op{Kind: device.Binary, Attr: device.Attr{Func: device.Add}, In: list(m(), m()), Out: list(m(4))}, false},
		"copy":           {device.Op{Kind: device.Copy, In: list(m(4)), Out: list(m(5))}, false},
		"negative shape": {device.Op{Kind: device.Fill, Out: list(m(-1, -4))}, false},
		"states":         {device.Op{Kind: device.LayerNorm, In: list(m(2, 3), m(3), m(3)), Out: list(m(2, 3))}, false},
		"probability":    {device.Op{Kind: device.Dropout, Attr: device.Attr{P: 1, Seq: 1}, In: list(m(4, 1), device.Tensor{Shape: []int{3}, Type: dtype.Int64}), Out: list(m(4, 1))}, false},
	} {
		_, err := d.Compile(c.op)
		require.Error(t, err, name)
		require.Equal(t, c.unsupported, errors.Is(err, device.ErrUnsupported), "%s: %v", name, err)
		require.ErrorContains(t, err, string(c.op.Kind))
	}
}

// Without it a fill could write another value, or another type's bits.
func TestFill(t *testing.T) {
	d := open(t, &Options{Threads: 2})
	s := newStreamOf(t, d)
	for _, n := range []int{0, 1, 7, moveChunk + 3} {
		for _, typ := range dtype.All() {
			for _, alpha := range []float32{0, 3, -2.5} {
				y := device.Tensor{Shape: []int{n}, Type: typ}
				buf, err := d.Alloc(y.Bytes())
				require.NoError(t, err)
				k := compile(t, d, device.Op{Kind: device.Fill, Attr: device.Attr{Alpha: alpha}, Out: []device.Tensor{y}})
				require.NoError(t, s.Launch(k, []device.Buffer{buf}))
				require.NoError(t, s.Sync(t.Context()))
				b, _ := buf.HostBytes()
				for i := range n {
					e := b[i*typ.Size():]
					var got float64
					switch typ {
					case dtype.Float32:
						got = float64(view[float32](e)[0])
					case dtype.Float64:
						got = view[float64](e)[0]
					case dtype.Float16: // 3 = 0x4200, −2.5 = 0xc100
						got = map[uint16]float64{0: 0, 0x4200: 3, 0xc100: -2.5}[view[uint16](e)[0]]
					case dtype.BFloat16:
						got = float64(math.Float32frombits(uint32(view[uint16](e)[0]) << 16))
					case dtype.Int32:
						got = float64(view[int32](e)[0])
					case dtype.Int64:
						got = float64(view[int64](e)[0])
					case dtype.Uint8:
						got = float64(e[0])
					}
					want := float64(alpha)
					switch {
					case typ == dtype.Uint8:
						want = max(0, want)
					case !typ.Float():
						want = math.Trunc(want)
					}
					require.Equal(t, want, got, "%v, element %d of %d", typ, i, n)
				}
			}
		}
	}
}

// Without it memory bound to a tensor could not take part, or misaligned
// memory would be read at half speed or not at all.
func TestWrap(t *testing.T) {
	d := open(t, &Options{Threads: 1})
	s := newStreamOf(t, d)
	mem := make([]float32, 9)
	b := raw(mem)
	k := compile(t, d, device.Op{Kind: device.Fill, Attr: device.Attr{Alpha: 1}, Out: []device.Tensor{vector(8)}})
	require.ErrorContains(t, s.Launch(k, []device.Buffer{Wrap(b[1:33])}), "not aligned")
	require.NoError(t, s.Launch(k, []device.Buffer{Wrap(b[4:])}))
	require.NoError(t, s.Sync(t.Context()))
	require.Equal(t, []float32{0, 1, 1, 1, 1, 1, 1, 1, 1}, mem)
	other := open(t, &Options{Threads: 1})
	require.ErrorContains(t, newStreamOf(t, other).Launch(k, []device.Buffer{Wrap(b[4:])}), "not compiled by this device")
}

// Without it a launcher could start ranks whose collectives wait for kernels.
func TestThreadAdvice(t *testing.T) {
	require.Equal(t, 4, GOMAXPROCS(2))
	require.LessOrEqual(t, AllowedCores(), runtime.NumCPU())
	require.Positive(t, AllowedCores())
	require.Contains(t, simd.Supported(), open(t, nil).isa)
}
