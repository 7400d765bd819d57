package engine

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/device"
)

// recorder writes down what is enqueued between hooks.
type recorder struct {
	device.Stream
	log []string
}

func (r *recorder) Launch(k device.Kernel, args []device.Buffer) error {
	r.log = append(r.log, string(k.Op().Kind))
	return r.Stream.Launch(k, args)
}

func (r *recorder) HostFunc(f func() error) error {
	r.log = append(r.log, "do")
	return r.Stream.HostFunc(f)
}

func (r *recorder) Copy(dst, src device.Buffer) error {
	r.log = append(r.log, "copy")
	return r.Stream.Copy(dst, src)
}

func (r *recorder) Record(e device.Event) error {
	r.log = append(r.log, "record")
	return r.Stream.Record(e)
}

func (r *recorder) hooks(p *Plan) Hooks {
	note := func(what string) func(int) error {
		return func(i int) error {
			r.log = append(r.log, what+" "+p.params[i].Name)
			return nil
		}
	}
	return Hooks{Read: note("read"), Write: note("write"), LastRead: note("last")}
}

func (r *recorder) ready(p *Plan) func(int) error {
	return func(i int) error {
		r.log = append(r.log, "ready "+p.params[i].Name)
		return nil
	}
}

// twoLayers is a perceptron without biases, made of kernels only.
func twoLayers(p *problem) {
	h := must(G.Tanh(must(G.Mul(p.input("x", 4, 3), p.param("w1", 3, 5)))))
	y := must(G.Mul(must(G.Mul(h, p.param("w2", 5, 6))), p.input("to one", 6, 1)))
	p.loss = must(G.Slice(must(G.Mul(p.input("rows", 1, 4), y)), G.S(0), G.S(0)))
}

func bindBuffers(t testing.TB, d device.Device, p *Plan) (params, grads []device.Buffer) {
	t.Helper()
	for _, q := range p.Params() {
		a, err := d.Alloc(q.Bytes())
		require.NoError(t, err)
		b, err := d.Alloc(q.Bytes())
		require.NoError(t, err)
		params, grads = append(params, a), append(grads, b)
	}
	require.NoError(t, p.BindParams(params))
	require.NoError(t, p.BindGrads(grads))
	return params, grads
}

// Without it a bucket could start before its last gradient was enqueued, an
// update before the last reader of its parameter (here dX = dY·Wᵀ), or a run
// before the update that it must wait for.
func TestHooksLieAroundTheWorkTheyAreAbout(t *testing.T) {
	d := newDevice(t)
	p := newProblem(tensor.Float32)
	twoLayers(p)
	r := compile(t, d, p, nil)
	bindBuffers(t, d, r.Plan)
	rec := &recorder{Stream: r.s}
	r.BindHooks(rec.hooks(r.Plan))
	require.NoError(t, r.Run(rec, rec.ready(r.Plan)))
	await(t, r.s)
	require.Equal(t, strings.Fields(`
		copy copy copy record
		read_w1 matmul last_w1 unary
		read_w2 matmul
		matmul matmul strided strided record
		record strided-grad strided-grad matmul matmul
		matmul last_w2 write_w2 matmul ready_w2
		binary binary binary write_w1 matmul ready_w1`), underscored(rec.log), r.Explain())
	require.Equal(t, []int{1, 0}, r.Order())
}

func underscored(log []string) []string {
	r := slices.Clone(log)
	for i := range r {
		r[i] = strings.ReplaceAll(r[i], " ", "_")
	}
	return r
}

// Without it Order, which fixes the buckets, could differ from what happens, a
// gradient be announced twice or never, or a parameter be updated while read.
func TestHooksOnEveryGraph(t *testing.T) {
	d := newDevice(t)
	everyGraph(func(name string, build func(p *problem)) {
		t.Run(name, func(t *testing.T) {
			p := newProblem(tensor.Float32)
			build(p)
			r := compile(t, d, p, nil)
			bindBuffers(t, d, r.Plan)
			rec := &recorder{Stream: r.s}
			r.BindHooks(rec.hooks(r.Plan))
			for range 2 {
				rec.log = nil
				require.NoError(t, r.Run(rec, rec.ready(r.Plan)))
				await(t, r.s)
				var order []string
				for _, i := range r.Order() {
					order = append(order, "ready "+r.Params()[i].Name)
				}
				require.Equal(t, order, keep(rec.log, "ready "))
				for _, q := range r.Params() {
					at := func(what string) int {
						require.Len(t, keep(rec.log, what+" "+q.Name+"$"), 1, "%s %s", what, q.Name)
						return slices.Index(rec.log, what+" "+q.Name)
					}
					require.Less(t, at("read"), at("last"))
					require.Less(t, at("write"), at("ready"))
				}
			}
		})
	})
}

// keep are the entries that begin with prefix, or are it when it ends in $.
func keep(log []string, prefix string) []string {
	var r []string
	for _, s := range log {
		if s+"$" == prefix || !strings.HasSuffix(prefix, "$") && strings.HasPrefix(s, prefix) {
			r = append(r, s)
		}
	}
	return r
}

// Without it a parameter that an evaluation doesn't read would keep its
// bucket's update waiting for ever.
func TestLastReadOfAParameterThatNothingReads(t *testing.T) {
	d := newDevice(t)
	p := newProblem(tensor.Float32)
	used := p.param("used", 3, 2)
	p.param("idle", 2, 2)
	p.loss = must(G.Mul(p.input("x", 2, 3), used))
	r := compile(t, d, p, &Options{ForwardOnly: true})
	rec := &recorder{Stream: r.s}
	r.BindHooks(rec.hooks(r.Plan))
	require.NoError(t, r.Run(rec, nil))
	await(t, r.s)
	require.Equal(t, "last idle", rec.log[0])
	require.Len(t, keep(rec.log, "last "), 2)
}

// Without it the error of a collective or a full bucket would be lost.
func TestErrorsOfHooksEndTheRun(t *testing.T) {
	d := newDevice(t)
	boom := errors.New("boom")
	for _, which := range []string{"read", "write", "last", "ready"} {
		p := newProblem(tensor.Float32)
		twoLayers(p)
		r := compile(t, d, p, nil)
		fail := func(int) error { return boom }
		var h Hooks
		var ready func(int) error
		switch which {
		case "read":
			h.Read = fail
		case "write":
			h.Write = fail
		case "last":
			h.LastRead = fail
		case "ready":
			ready = fail
		}
		r.BindHooks(h)
		require.ErrorIs(t, r.Run(r.s, ready), boom, which)
	}
}

// Without it timings of forward and backward would be of something else, or an
// event that a trainer waits for never come.
func TestEventsBracketForwardAndBackward(t *testing.T) {
	d := newDevice(t)
	for name, build := range graphs {
		p := newProblem(tensor.Float32)
		build(p)
		r := compile(t, d, p, nil)
		r.run()
		gap, err := r.BackwardStart().Since(r.ForwardDone())
		require.NoError(t, err, name)
		require.GreaterOrEqual(t, gap.Nanoseconds(), int64(0), name)
		require.LessOrEqual(t, r.forward, r.backward, name)
	}
}

// Without it two processes could lay their buckets out differently.
func TestPlansOfOneGraphAreTheSame(t *testing.T) {
	d := newDevice(t)
	everyGraph(func(name string, build func(p *problem)) {
		var plans []string
		for range 2 {
			p := newProblem(tensor.Float32)
			build(p)
			r := compile(t, d, p, nil)
			plans = append(plans, fmt.Sprint(r.Order(), r.Params(), r.Explain()))
		}
		require.Equal(t, plans[0], plans[1], name)
	})
}
