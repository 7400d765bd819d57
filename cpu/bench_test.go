package cpu

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/internal/simd"
)

func nop() error { return nil }

// Time from enqueuing on an idle stream to the caller knowing that it has run.
func BenchmarkHostFuncRoundTrip(b *testing.B) {
	s := newStreamOf(b, open(b, &Options{Threads: 1}))
	for b.Loop() {
		_ = s.HostFunc(nop)
		_ = s.Sync(b.Context())
	}
}

// As above where the stream's goroutine has gone to sleep before.
func BenchmarkHostFuncColdRoundTrip(b *testing.B) {
	s := newStreamOf(b, open(b, &Options{Threads: 1}))
	var total time.Duration
	for b.Loop() {
		time.Sleep(200 * time.Microsecond)
		t := time.Now()
		_ = s.HostFunc(nop)
		_ = s.Sync(b.Context())
		total += time.Since(t)
	}
	b.ReportMetric(float64(total.Nanoseconds())/float64(b.N), "ns/trip")
}

// Cost of one item in a long queue.
func BenchmarkHostFuncQueued(b *testing.B) {
	s := newStreamOf(b, open(b, &Options{Threads: 1}))
	n := 0
	for b.Loop() {
		_ = s.HostFunc(nop)
		if n++; n%256 == 0 {
			_ = s.Sync(b.Context())
		}
	}
}

// One hop between two streams: record on one, wait on the other.
func BenchmarkEventHop(b *testing.B) {
	d := open(b, &Options{Threads: 1})
	x, y := newStreamOf(b, d), newStreamOf(b, d)
	e, err := d.NewEvent()
	require.NoError(b, err)
	n := 0
	for b.Loop() {
		_ = x.HostFunc(nop)
		_ = x.Record(e)
		_ = y.Wait(e)
		_ = y.HostFunc(nop)
		_ = y.Record(e)
		_ = x.Wait(e)
		if n++; n%64 == 0 {
			_ = x.Sync(b.Context())
		}
	}
	_ = x.Sync(b.Context())
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(2*b.N), "ns/hop")
}

// A host function beside another stream's kernels: what a collective waits.
func BenchmarkHostFuncBesideKernels(b *testing.B) {
	d := open(b, &Options{Threads: 1})
	compute, host := newStreamOf(b, d), newStreamOf(b, d)
	c := matmul(b, 256, 256, 256)
	k, args := compile(b, d, c.op()), c.buffers(b, d)
	stop := false
	var again func() error
	again = func() error {
		if stop {
			return nil
		}
		_ = compute.Launch(k, args)
		return compute.HostFunc(again)
	}
	_ = compute.HostFunc(again)
	for b.Loop() {
		_ = host.HostFunc(nop)
		_ = host.Sync(b.Context())
	}
	_ = compute.HostFunc(func() error { stop = true; return nil })
	_ = compute.Sync(b.Context())
}

// An empty kernel of two pieces: fork and join.
func BenchmarkForkJoin(b *testing.B) {
	for _, threads := range []int{1, 2, 4} {
		b.Run(fmt.Sprint(threads), func(b *testing.B) {
			d := open(b, &Options{Threads: threads})
			s := newStreamOf(b, d)
			k := testKernel(d, threads, func(int, int) {})
			n := 0
			for b.Loop() {
				_ = s.Launch(k, nil)
				if n++; n%256 == 0 {
					_ = s.Sync(b.Context())
				}
			}
			_ = s.Sync(b.Context())
		})
	}
}

func matmul(t testing.TB, m, n, k int) call {
	a, x := make([]float32, m*k), make([]float32, k*n)
	for i := range a {
		a[i] = float32(i%7) - 3
	}
	return call{kind: device.MatMul, in: []arg{floats(a, m, k), floats(x, k, n)}, out: []arg{garbage(m, n)}}
}

// layer is every kind of kernel that a training step has, with N rows of D
// features in sequences of T, H heads and V classes.
func layer(t testing.TB, n, d, h, seq, v int) map[string]call {
	f := func(shape ...int) arg {
		x := make([]float32, device.Tensor{Shape: shape}.Elems())
		for i := range x {
			x[i] = float32(i%13)/13 - 0.4
		}
		return floats(x, shape...)
	}
	at := device.Attr{Heads: h, Seq: seq, Eps: 1e-5, Mean: true, P: 0.1}
	tokens := make([]int64, n)
	for i := range tokens {
		tokens[i] = int64(i * 7 % v)
	}
	idx := ints(tokens, n)
	return map[string]call{
		"matmul":             matmul(t, n, 4*d, d),
		"matmul-grad-w":      {kind: device.MatMul, attr: device.Attr{TransA: true}, in: []arg{f(n, d), f(n, 4*d)}, out: []arg{f(d, 4*d)}},
		"matmul-grad-x":      {kind: device.MatMul, attr: device.Attr{TransB: true}, in: []arg{f(n, 4*d), f(d, 4*d)}, out: []arg{f(n, d)}},
		"col-sum":            {kind: device.ColSum, in: []arg{f(n, 4*d)}, out: []arg{f(4 * d)}},
		"gelu":               {kind: device.GELU, in: []arg{f(n, 4*d)}, out: []arg{f(n, 4*d)}},
		"gelu-grad":          {kind: device.GELUGrad, in: []arg{f(n, 4*d), f(n, 4*d)}, out: []arg{f(n, 4*d)}},
		"layer-norm":         {kind: device.LayerNorm, attr: at, in: []arg{f(n, d), f(d), f(d)}, state: []arg{f(n), f(n)}, out: []arg{f(n, d)}},
		"layer-norm-dx":      {kind: device.LayerNormGradInput, in: []arg{f(n, d), f(d), f(n, d)}, state: []arg{f(n), f(n)}, out: []arg{f(n, d)}},
		"layer-norm-dgb":     {kind: device.LayerNormGradGamma, in: []arg{f(n, d), f(n, d)}, state: []arg{f(n), f(n), f(d)}, out: []arg{f(d)}},
		"attention":          {kind: device.Attention, attr: at, in: []arg{f(n, 3*d)}, state: []arg{f(n * h)}, out: []arg{f(n, d)}},
		"attention-grad":     {kind: device.AttentionGrad, attr: at, in: []arg{f(n, 3*d), f(n, d), f(n, d)}, state: []arg{f(n * h)}, out: []arg{f(n, 3*d)}},
		"embedding":          {kind: device.Embedding, attr: at, in: []arg{f(v, d), f(seq, d), idx}, out: []arg{f(n, d)}},
		"embedding-grad":     {kind: device.EmbeddingGradToken, in: []arg{idx, f(n, d)}, out: []arg{f(v, d)}},
		"cross-entropy":      {kind: device.CrossEntropy, attr: at, in: []arg{f(n, v), idx}, state: []arg{f(n), f(1)}, out: []arg{f()}},
		"dropout":            {kind: device.Dropout, attr: at, in: []arg{f(n, d), ints([]int64{1, 2, 3}, 3)}, out: []arg{f(n, d)}},
		"add":                {kind: device.Binary, attr: device.Attr{Func: device.Add}, in: []arg{f(n, d), f(n, d)}, out: []arg{f(n, d)}},
		"adamw":              {kind: device.AdamW, in: []arg{f(1 << 20), floats(hyper(), device.HyperLen)}, out: []arg{f(1 << 20), f(1 << 20), f(1 << 20)}},
		"cross-entropy-grad": {kind: device.CrossEntropyGrad, attr: at, in: []arg{f(n, v), idx, f()}, state: []arg{f(n), f(1)}, out: []arg{f(n, v)}},
		"position-grad":      {kind: device.EmbeddingGradPosition, attr: at, in: []arg{f(n, d)}, out: []arg{f(seq, d)}},
		"sgd":                {kind: device.SGD, in: []arg{f(1 << 20), floats(hyper(), device.HyperLen)}, out: []arg{f(1 << 20), f(1 << 20)}},
		"clip-scale":         {kind: device.ClipScale, in: []arg{doubles(make([]float64, 9), 9), floats(hyper(), device.HyperLen)}, out: []arg{f(device.HyperLen)}},
		"scale":              {kind: device.Scale, in: []arg{f(n, d), f(1)}, out: []arg{f(n, d)}},
		"batched-matmul":     {kind: device.BatchedMatMul, in: []arg{f(h, seq, 64), f(h, 64, seq)}, out: []arg{f(h, seq, seq)}},
		"strided":            {kind: device.Strided, attr: device.Attr{Strides: []int{1, d}}, in: []arg{f(n, d)}, out: []arg{f(d, n)}},
		"strided-grad":       {kind: device.StridedGrad, attr: device.Attr{Strides: []int{d, 1}, Offset: 1}, in: []arg{f(n, d/2)}, out: []arg{f(n, d)}},
		"concat":             {kind: device.Concat, attr: device.Attr{Axes: []int{1}}, in: []arg{f(n, d), f(n, d)}, out: []arg{f(n, 2*d)}},
		"gather":             {kind: device.Gather, in: []arg{f(v, d), idx}, out: []arg{f(n, d)}},
		"reduce-rows":        {kind: device.Reduce, attr: device.Attr{Func: device.Add, Axes: []int{1}}, in: []arg{f(n, d)}, out: []arg{f(n)}},
		"softmax":            {kind: device.Softmax, attr: device.Attr{Axes: []int{1}}, in: []arg{f(n, d)}, out: []arg{f(n, d)}},
		"softmax-grad":       {kind: device.SoftmaxGrad, attr: device.Attr{Axes: []int{1}}, in: []arg{f(n, d), f(n, d)}, out: []arg{f(n, d)}},
		"log-softmax":        {kind: device.LogSoftmax, attr: device.Attr{Axes: []int{1}}, in: []arg{f(n, d)}, out: []arg{f(n, d)}},
		"log-softmax-grad":   {kind: device.LogSoftmaxGrad, attr: device.Attr{Axes: []int{1}}, in: []arg{f(n, d), f(n, d)}, out: []arg{f(n, d)}},
		"greater":            {kind: device.Binary, attr: device.Attr{Func: device.Greater}, in: []arg{f(n, d), f(n, d)}, out: []arg{f(n, d)}},
		"tanh":               {kind: device.Unary, attr: device.Attr{Func: device.Tanh}, in: []arg{f(n, d)}, out: []arg{f(n, d)}},
		"sum-squares":        {kind: device.SumSquares, in: []arg{f(1 << 20)}, out: []arg{doubles([]float64{0}, 1)}},
	}
}

// The kernels of the preset «small» (N = 512, D = 384, H = 6, T = 128), on each
// instruction set of this machine and with one and two threads.
func BenchmarkKernels(b *testing.B) {
	for name, c := range layer(b, 512, 384, 6, 128, 65) {
		for _, isa := range simd.Supported() {
			for _, threads := range []int{1, 2} {
				b.Run(fmt.Sprintf("%s/%v/%d", name, isa, threads), func(b *testing.B) {
					benchmarkKernel(b, &Options{Threads: threads, ISA: isa.String()}, c)
				})
			}
		}
	}
}

func benchmarkKernel(b *testing.B, o *Options, c call) {
	dev := open(b, o)
	s := newStreamOf(b, dev)
	k := compile(b, dev, c.op())
	args := c.buffers(b, dev)
	flops, bytes := device.Cost(c.op())
	for b.Loop() {
		_ = s.Launch(k, args)
		_ = s.Sync(b.Context())
	}
	sec := b.Elapsed().Seconds() / float64(b.N)
	b.ReportMetric(float64(flops)/sec/1e9, "GFLOP/s")
	b.ReportMetric(float64(bytes)/sec/1e9, "GB/s")
}
