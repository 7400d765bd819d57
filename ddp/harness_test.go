package ddp

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/comm/inmem"
	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/rendezvous"
	"github.com/tandem-go/tandem/ring"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Sizes of the test model: a perceptron whose second weight is used twice, with
// odd sizes so that buckets have padding.
const (
	batch   = 4 // rows a rank
	inputs  = 7
	hidden  = 9
	outputs = 3
)

// model is one rank's graph. Rank r starts from its own random weights.
type model struct {
	x, y   *gorgonia.Node
	loss   *gorgonia.Node
	params gorgonia.Nodes
}

// buildModel is mean((tanh(tanh(x·w0)·w1)·w1 ·w2 · s − y)²) with a scalar s.
func buildModel(rows int, seed uint64) *model {
	g := gorgonia.NewGraph()
	rng := rand.New(rand.NewPCG(seed, 7))
	weight := func(name string, shape ...int) *gorgonia.Node {
		return gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(shape...), gorgonia.WithName(name),
			gorgonia.WithValue(tensor.New(tensor.WithShape(shape...), tensor.WithBacking(normal(rng, shape[0]*shape[1])))))
	}
	m := &model{
		x: gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(rows, inputs), gorgonia.WithName("x")),
		y: gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(rows, outputs), gorgonia.WithName("y")),
	}
	w0, w1, w2 := weight("w0", inputs, hidden), weight("w1", hidden, hidden), weight("w2", hidden, outputs)
	s := gorgonia.NewScalar(g, tensor.Float32, gorgonia.WithName("s"), gorgonia.WithValue(float32(1+rng.Float64())))
	m.params = gorgonia.Nodes{w0, w1, w2, s}
	h := gorgonia.Must(gorgonia.Tanh(gorgonia.Must(gorgonia.Mul(m.x, w0))))
	h = gorgonia.Must(gorgonia.Tanh(gorgonia.Must(gorgonia.Mul(h, w1))))
	h = gorgonia.Must(gorgonia.Mul(gorgonia.Must(gorgonia.Mul(h, w1)), w2))
	d := gorgonia.Must(gorgonia.Sub(gorgonia.Must(gorgonia.HadamardProd(h, s)), m.y))
	m.loss = gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(d))))
	return m
}

func normal(rng *rand.Rand, n int) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(rng.NormFloat64() / 2)
	}
	return v
}

// feed binds rows [from, from+rows) of the global batch of a step.
func (m *model) feed(step, from int) error {
	rows := m.x.Shape()[0]
	x, y := make([]float32, 0, rows*inputs), make([]float32, 0, rows*outputs)
	for r := from; r < from+rows; r++ {
		rng := rand.New(rand.NewPCG(uint64(step), uint64(r)))
		x = append(x, normal(rng, inputs)...)
		y = append(y, normal(rng, outputs)...)
	}
	return errors.Join(
		gorgonia.Let(m.x, tensor.New(tensor.WithShape(rows, inputs), tensor.WithBacking(x))),
		gorgonia.Let(m.y, tensor.New(tensor.WithShape(rows, outputs), tensor.WithBacking(y))))
}

// snapshot copies values, so that later steps can't change them.
func snapshot(values []gorgonia.ValueGrad) [][]float32 {
	var all [][]float32
	for _, v := range values {
		all = append(all, floats(v.Value()))
	}
	return all
}

func gradients(d *DDP) [][]float32 {
	var all [][]float32
	for _, v := range d.ValueGrads() {
		g, _ := v.Grad()
		all = append(all, floats(g))
	}
	return all
}

func floats(v gorgonia.Value) []float32 {
	switch x := v.(type) {
	case *gorgonia.F32:
		return []float32{float32(*x)}
	case *tensor.Dense:
		return append([]float32(nil), x.Float32s()...)
	}
	panic(fmt.Sprintf("a value of %T", v))
}

// slow is a device whose first stream of normal priority, on which the passes
// run, takes its time before each kernel. So a collective, or an update, that
// does not wait for what it should wait for comes too early for certain.
type slow struct {
	*cpu.Device
	delay   time.Duration
	mu      sync.Mutex
	compute bool // handed out
}

func (s *slow) NewStream(p device.Priority) (device.Stream, error) {
	st, err := s.Device.NewStream(p)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil || p != device.Normal || s.compute || s.delay == 0 {
		return st, err
	}
	s.compute = true
	return &slowStream{st, func() error { time.Sleep(s.delay); return nil }}, nil
}

type slowStream struct {
	device.Stream
	pause func() error
}

func (s *slowStream) Launch(k device.Kernel, args []device.Buffer) error {
	if err := s.HostFunc(s.pause); err != nil {
		return err
	}
	return s.Stream.Launch(k, args)
}

// group is how a test runs its ranks.
type group struct {
	ranks int
	slow  time.Duration // before each kernel of the passes
	delay time.Duration // at most, before each collective on each rank
	seed  uint64        // of the delays
	ring  bool          // over TCP, without delays, instead of in memory
	opts  Options
	wrap  func(rank int, c comm.Communicator) comm.Communicator
}

// run runs f on all ranks at once, each with a device of its own and rank r's
// communicator, and returns their errors.
func (g group) run(t testing.TB, f func(ctx context.Context, rank int, c comm.Communicator, o *Options) error) []error {
	t.Helper()
	shared, err := cpu.New(&cpu.Options{Threads: 1})
	require.NoError(t, err)
	var delays sync.Mutex
	rng := rand.New(rand.NewPCG(g.seed, 3))
	o := &inmem.Options{Timeout: 10 * time.Second, Delay: func(int, uint64, comm.Tag) {
		if g.delay > 0 {
			delays.Lock()
			d := time.Duration(rng.Int64N(int64(g.delay)))
			delays.Unlock()
			time.Sleep(d)
		}
	}}
	world, err := inmem.New(shared, g.ranks, o)
	require.NoError(t, err)
	if g.ring {
		world = overTCP(t, shared, g.ranks)
	}
	errs := make([]error, g.ranks)
	var wg sync.WaitGroup
	for r := range g.ranks {
		wg.Go(func() {
			dev, err := cpu.New(&cpu.Options{Threads: 1})
			if err != nil {
				errs[r] = err
				return
			}
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			defer cancel()
			opts := g.opts
			opts.Device = &slow{Device: dev, delay: g.slow}
			c := world[r]
			if g.wrap != nil {
				c = g.wrap(r, c)
			}
			errs[r] = f(ctx, r, c, &opts)
			errs[r] = errors.Join(errs[r], world[r].Close(), dev.Close())
		})
	}
	wg.Wait()
	require.NoError(t, shared.Close())
	return errs
}

// must is run for tests in which no rank fails.
func (g group) must(t testing.TB, f func(ctx context.Context, rank int, c comm.Communicator, o *Options) error) {
	t.Helper()
	for r, err := range g.run(t, f) {
		require.NoError(t, err, "rank %d", r)
	}
}

// train runs steps synchronised steps of a fresh model on every rank and returns
// each rank's parameters. apply is called after each step; nil with a built-in
// optimizer.
func (g group) train(t *testing.T, steps int, apply func(d *DDP) func() error) [][][]float32 {
	t.Helper()
	all := make([][][]float32, g.ranks)
	g.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m := buildModel(batch, uint64(rank))
		d, err := New(ctx, c, m.loss, m.params, o)
		if err != nil {
			return err
		}
		defer d.Close()
		after := func() error { return nil }
		if apply != nil {
			after = apply(d)
		}
		for s := range steps {
			if err := errors.Join(m.feed(s, rank*batch), d.Step(ctx), after()); err != nil {
				return err
			}
		}
		if err := d.Sync(ctx); err != nil {
			return err
		}
		all[rank] = snapshot(d.ValueGrads())
		return d.Close()
	})
	return all
}

// vanilla applies gorgonia's plain gradient descent.
func vanilla(d *DDP) func() error {
	solver := gorgonia.NewVanillaSolver(gorgonia.WithLearnRate(0.1))
	return func() error { return solver.Step(d.ValueGrads()) }
}

// vanilla3 is vanilla with the learning rate of a mean over micro-steps.
func vanilla3(d *DDP, micro int) func() error {
	solver := gorgonia.NewVanillaSolver(gorgonia.WithLearnRate(0.1 / float64(micro)))
	return func() error { return solver.Step(d.ValueGrads()) }
}

// counter counts the collectives of a communicator and of its children.
type counter struct {
	comm.Communicator
	calls *int
}

func (c *counter) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	child, err := c.Communicator.Split(ctx, color, key)
	return &counter{child, c.calls}, err
}

func (c *counter) AllReduce(s device.Stream, dst, src device.Buffer, t dtype.Type, op comm.Op, tag comm.Tag) error {
	*c.calls++
	return c.Communicator.AllReduce(s, dst, src, t, op, tag)
}

func (c *counter) AllGather(s device.Stream, dst, src device.Buffer, t dtype.Type, tag comm.Tag) error {
	*c.calls++
	return c.Communicator.AllGather(s, dst, src, t, tag)
}

// deviceBuffer shortens signatures.
type deviceBuffer = device.Buffer

// newDevice is a device that ends with the test.
func newDevice(t *testing.T) *cpu.Device {
	dev, err := cpu.New(&cpu.Options{Threads: 1})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dev.Close()) })
	return dev
}

// overTCP makes a ring whose ranks are goroutines of this process.
func overTCP(t testing.TB, dev device.Device, n int) []comm.Communicator {
	store := rendezvous.NewMem()
	defer store.Close()
	world, errs := make([]comm.Communicator, n), make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() {
			world[r], errs[r] = ring.New(context.Background(), ring.Options{
				Rank: r, Size: n, Store: store, Device: dev, Secret: "of this test", Timeout: 20 * time.Second,
			})
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	return world
}
