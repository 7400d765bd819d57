package ddp

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/optim"
)

// conditional is a model of two branches, a graph each, that share w and have
// a weight of their own; dead is reached by neither.
type conditional struct {
	x      [2]*gorgonia.Node
	loss   [2]*gorgonia.Node
	params [2]gorgonia.Nodes
}

const branchRows = 4

// buildConditional starts from weights that differ between seeds and branches;
// those of branch 0 count where it has them. dead adds the parameter.
func buildConditional(seed uint64, dead bool) *conditional {
	m := &conditional{}
	for i := range 2 {
		g := gorgonia.NewGraph()
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		weight := func(name string, r, c int) *gorgonia.Node {
			return gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(r, c), gorgonia.WithName(name),
				gorgonia.WithValue(tensor.New(tensor.WithShape(r, c), tensor.WithBacking(normal(rng, r*c)))))
		}
		m.x[i] = gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(branchRows, 5), gorgonia.WithName("x"))
		w, own := weight("w", 5, 7), weight([]string{"left", "right"}[i], 7, 3+i)
		m.params[i] = gorgonia.Nodes{w, own}
		if dead {
			m.params[i] = gorgonia.Nodes{w, weight("dead", 3, 3), own}
		}
		h := gorgonia.Must(gorgonia.Tanh(gorgonia.Must(gorgonia.Mul(m.x[i], w))))
		m.loss[i] = gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(gorgonia.Must(gorgonia.Mul(h, own))))))
	}
	return m
}

func (m *conditional) feed(graph, step, rank int) error {
	rng := rand.New(rand.NewPCG(uint64(step), uint64(rank)))
	return gorgonia.Let(m.x[graph], tensor.New(tensor.WithShape(branchRows, 5), tensor.WithBacking(normal(rng, branchRows*5))))
}

func wrapConditional(ctx context.Context, c comm.Communicator, o *Options, dead bool) (*conditional, *DDP, error) {
	m := buildConditional(uint64(c.Rank()), dead)
	o.Graphs = []Graph{{Loss: m.loss[1], Params: m.params[1]}}
	o.FindUnused = dead
	d, err := New(ctx, c, m.loss[0], m.params[0], o)
	return m, d, err
}

// ownGradients are those of one rank's batch on one graph, by name, at the
// weights that all ranks start from.
func ownGradients(t *testing.T, graph, step, rank int) map[string][]float32 {
	got := map[string][]float32{}
	group{ranks: 1}.must(t, func(ctx context.Context, _ int, c comm.Communicator, o *Options) error {
		m, d, err := wrapConditional(ctx, c, o, false)
		if err != nil {
			return err
		}
		defer d.Close()
		if err := errors.Join(m.feed(graph, step, rank), d.StepGraph(ctx, graph)); err != nil {
			return err
		}
		for p, g := range gradients(d) {
			if !d.Unused(p) {
				got[d.Layout().Params[p].Name] = g
			}
		}
		return nil
	})
	return got
}

// average adds up the gradients of parts and divides by ranks.
func average(ranks int, parts ...map[string][]float32) map[string][]float32 {
	sum := map[string][]float32{}
	for _, part := range parts {
		for name, g := range part {
			if sum[name] == nil {
				sum[name] = make([]float32, len(g))
			}
			for i, v := range g {
				sum[name][i] += v / float32(ranks)
			}
		}
	}
	return sum
}

// Without it ranks that take different branches would hang, or average what a
// rank had left over from another step; and a parameter that nobody used would
// lose its gradient.
func TestBranchesPerRank(t *testing.T) {
	for name, caps := range map[string]bucket.Caps{"each": bucket.Each(), "one": bucket.One()} {
		for _, ring := range []bool{false, true} {
			for _, ranks := range []int{1, 2, 3, 4} {
				choice := func(rank int) int { return rank % 2 }
				var parts []map[string][]float32
				for r := range ranks {
					parts = append(parts, ownGradients(t, choice(r), 0, r))
				}
				want := average(ranks, parts...)
				o := Options{Caps: caps}
				group{ranks: ranks, ring: ring, slow: 50 * time.Microsecond, opts: o}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
					m, d, err := wrapConditional(ctx, c, o, false)
					if err != nil {
						return err
					}
					defer d.Close()
					if err := errors.Join(m.feed(choice(rank), 0, rank), d.StepGraph(ctx, choice(rank))); err != nil {
						return err
					}
					first := gradients(d)
					for p, q := range d.Layout().Params {
						require.Equal(t, ranks == 1 && q.Name == "right", d.Unused(p), "%s, %s of %d", name, q.Name, ranks)
						if !d.Unused(p) {
							require.InDeltaSlice(t, want[q.Name], first[p], 1e-6, "%s of %d ranks", q.Name, ranks)
						}
					}
					// Nobody takes the right branch now: its gradient stays, to the bit.
					if err := errors.Join(m.feed(0, 1, rank), d.Step(ctx)); err != nil {
						return err
					}
					require.True(t, d.Unused(2))
					require.Equal(t, first[2], gradients(d)[2])
					require.NotEqual(t, first[0], gradients(d)[0])
					return nil
				})
			}
		}
	}
}

// Without it an accumulation that takes several branches would lose, or never
// reduce, the gradients that only an earlier micro-step has.
func TestBranchesPerMicroStep(t *testing.T) {
	var parts []map[string][]float32
	for r := range 3 {
		parts = append(parts, ownGradients(t, 1, 0, r), ownGradients(t, 0, 1, r))
	}
	want := average(3, parts...)
	group{ranks: 3}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m, d, err := wrapConditional(ctx, c, o, false)
		if err != nil {
			return err
		}
		defer d.Close()
		for range 2 { // the second time over old gradients
			err = d.NoSync(func() error { return errors.Join(m.feed(1, 0, rank), d.StepGraph(ctx, 1)) })
			if err = errors.Join(err, m.feed(0, 1, rank), d.Step(ctx)); err != nil {
				return err
			}
			for p, g := range gradients(d) {
				require.False(t, d.Unused(p))
				require.InDeltaSlice(t, want[d.Layout().Params[p].Name], g, 1e-6)
			}
		}
		return nil
	})
}

// Without it the optimizer would decay, or move by old moments, what no rank
// used, or clip by a norm that counts it.
func TestOptimizerSkipsWhatNobodyUsed(t *testing.T) {
	for _, caps := range []bucket.Caps{bucket.Each(), bucket.One()} {
		for _, clip := range []float64{0, 1e-3} {
			o := Options{Optimizer: optim.AdamW{LR: 0.1, WeightDecay: 0.1}, Caps: caps, MaxNorm: clip, Norm: true, CheckParams: 1}
			group{ranks: 2, opts: o}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
				m, d, err := wrapConditional(ctx, c, o, true)
				if err != nil {
					return err
				}
				defer d.Close()
				state := func() (values [][]float32, moments [][]byte) {
					require.NoError(t, d.Sync(ctx))
					for _, s := range d.Optimizer().States() {
						if b, ok := s.Buffer.HostBytes(); ok && d.Layout().Params[s.Param].Name == "right" {
							moments = append(moments, append([]byte(nil), b...))
						}
					}
					return snapshot(d.ValueGrads()), moments
				}
				start, _ := state()
				if err := errors.Join(m.feed(rank, 0, rank), d.StepGraph(ctx, rank)); err != nil {
					return err
				}
				before, moments := state()
				require.NotEqual(t, start[3], before[3])
				if err := errors.Join(m.feed(0, 1, rank), d.Step(ctx)); err != nil {
					return err
				}
				after, same := state()
				require.Equal(t, []string{"w", "dead", "left", "right"}, names(d))
				require.Equal(t, moments, same)
				require.Equal(t, before[3], after[3])
				require.Equal(t, start[1], after[1], "dead moved")
				require.NotEqual(t, before[0], after[0])
				sum := 0.0
				for p, g := range gradients(d) {
					for _, v := range g {
						if !d.Unused(p) {
							sum += float64(v) * float64(v)
						}
					}
				}
				require.InEpsilon(t, sum, d.Stats().Norm*d.Stats().Norm, 1e-5)
				if err := errors.Join(m.feed(rank, 2, rank), d.StepGraph(ctx, rank)); err != nil {
					return err
				}
				again, _ := state()
				require.NotEqual(t, after[3], again[3])
				return nil
			})
		}
	}
}

func names(d *DDP) []string {
	var all []string
	for _, p := range d.Layout().Params {
		all = append(all, p.Name)
	}
	return all
}

// Without it a rank without data would leave old gradients, or its bitmap, in
// the steps of others.
func TestBranchesWithinJoin(t *testing.T) {
	o := Options{Optimizer: optim.SGD{}, CheckParams: 1, Norm: true}
	group{ranks: 3, opts: o}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m, d, err := wrapConditional(ctx, c, o, true)
		if err != nil {
			return err
		}
		defer d.Close()
		if err := errors.Join(m.feed(1, 0, rank), d.StepGraph(ctx, 1)); err != nil {
			return err
		}
		kept := gradients(d)[3]
		s := 0
		err = d.Join(ctx, func() (bool, error) { s++; return s <= 1+rank, m.feed(0, s, rank) })
		require.Equal(t, kept, gradients(d)[3])
		require.True(t, d.Unused(1) && d.Unused(3) && !d.Unused(0))
		return err
	})
}

// Without it a parameter that the loss forgot would train as if it were there,
// or ranks with other branches would agree.
func TestUnusedAndUnlikeGraphsAreRefused(t *testing.T) {
	for want, change := range map[string]func(m *conditional, o *Options, rank int){
		`does not depend differentiably on "dead"`: func(m *conditional, o *Options, _ int) { o.FindUnused = false },
		"set of graphs of rank 1 differs from that of rank 0": func(m *conditional, o *Options, rank int) {
			if rank == 1 {
				o.Graphs = nil
			}
		},
		"graph 1: no parameter to train":                   func(m *conditional, o *Options, _ int) { o.Graphs[0].Params = nil },
		"graph 1: the loss reaches none of the parameters": func(m *conditional, o *Options, _ int) { o.Graphs[0].Params = m.params[1][1:2] },
	} {
		errs := group{ranks: 2}.run(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
			m := buildConditional(0, true)
			o.Graphs = []Graph{{Loss: m.loss[1], Params: m.params[1]}}
			o.FindUnused = true
			change(m, o, rank)
			_, err := New(ctx, c, m.loss[0], m.params[0], o)
			return err
		})
		for rank, err := range errs {
			require.ErrorContains(t, err, want, "rank %d", rank)
		}
	}
}
