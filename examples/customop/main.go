// Command customop trains with an operation of one's own between layers of
// package nn: any gorgonia.Op works, and any gorgonia.SDOp can be trained
// through. On the CPU tandem runs its Do; there is nothing to register.
//
//	go run ./examples/customop
package main

import (
	"context"
	"fmt"
	"hash"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"os"

	"github.com/chewxy/hm"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/ddp"
	"github.com/tandem-go/tandem/launch"
	"github.com/tandem-go/tandem/nn"
	"github.com/tandem-go/tandem/optim"
)

// swish is x·σ(x) for each element of a float32 tensor, or, with grad, the
// gradient dy·(σ(x) + x·σ(x)·(1−σ(x))) of inputs x and dy.
type swish struct{ grad bool }

var _ gorgonia.SDOp = swish{}

// Swish adds the operation to the graph.
func Swish(x *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.ApplyOp(swish{}, x) }

// Do computes. It must not keep or change its inputs.
func (s swish) Do(in ...gorgonia.Value) (gorgonia.Value, error) {
	x := in[0].(*tensor.Dense)
	y := tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(x.Shape().Clone()...))
	out := y.Float32s()
	for i, v := range x.Float32s() {
		sigma := 1 / (1 + float32(math.Exp(-float64(v))))
		if s.grad {
			out[i] = in[1].(*tensor.Dense).Float32s()[i] * (sigma + v*sigma*(1-sigma))
		} else {
			out[i] = v * sigma
		}
	}
	return y, nil
}

// SymDiff is the gradient, as nodes of the graph.
func (s swish) SymDiff(in gorgonia.Nodes, _, dy *gorgonia.Node) (gorgonia.Nodes, error) {
	dx, err := gorgonia.ApplyOp(swish{grad: true}, in[0], dy)
	return gorgonia.Nodes{dx}, err
}

// DiffWRT says which inputs have a gradient: x; the gradient itself has none.
func (s swish) DiffWRT(inputs int) []bool {
	which := make([]bool, inputs)
	which[0] = !s.grad
	return which
}

// The rest tells gorgonia shapes and types.

func (s swish) Arity() int {
	if s.grad {
		return 2
	}
	return 1
}

func (s swish) Type() hm.Type {
	a := hm.TypeVariable('a')
	if s.grad {
		return hm.NewFnType(a, a, a)
	}
	return hm.NewFnType(a, a)
}

func (s swish) InferShape(in ...gorgonia.DimSizer) (tensor.Shape, error) {
	return in[0].(tensor.Shape).Clone(), nil
}
func (s swish) ReturnsPtr() bool      { return false }
func (s swish) CallsExtern() bool     { return false }
func (s swish) OverwritesInput() int  { return -1 }
func (s swish) WriteHash(h hash.Hash) { fmt.Fprint(h, s.String()) }
func (s swish) String() string        { return fmt.Sprintf("swish{grad: %v}", s.grad) }
func (s swish) Hashcode() uint32 {
	h := fnv.New32a()
	s.WriteHash(h)
	return h.Sum32()
}

func main() {
	if err := tandem.Run(context.Background(), nil, train); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(launch.ExitCode(err))
	}
}

const batch, width = 32, 32

// train is one rank. The optimizer is built in, so updates run behind the
// backward pass.
func train(ctx context.Context, g *tandem.Group) error {
	m, err := newModel()
	if err != nil {
		return err
	}
	d, err := ddp.New(ctx, g.Comm, m.loss, m.params, &ddp.Options{Device: g.Device, Optimizer: optim.AdamW{LR: 1e-2}})
	if err != nil {
		return err
	}
	defer d.Close()
	for step := range 300 {
		if err := m.feed(step*g.WorldSize + g.Rank); err != nil {
			return err
		}
		if err := d.Step(ctx); err != nil {
			return err
		}
		if g.Rank == 0 && (step+1)%100 == 0 {
			fmt.Printf("step %d: loss %.4f\n", step+1, d.Stats().Loss)
		}
	}
	return d.Sync(ctx)
}

// model learns sin(3·x).
type model struct {
	x, y, loss *gorgonia.Node
	params     gorgonia.Nodes
}

func newModel() (*model, error) {
	g := gorgonia.NewGraph()
	m := &model{
		x: gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(batch, 1), gorgonia.WithName("x")),
		y: gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(batch, 1), gorgonia.WithName("y")),
	}
	last := m.x
	for i, out := range []int{width, width, 1} {
		w := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(last.Shape()[1], out), gorgonia.WithName(fmt.Sprintf("w%d", i)), gorgonia.WithInit(gorgonia.GlorotN(1)))
		b := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(out), gorgonia.WithName(fmt.Sprintf("b%d", i)), gorgonia.WithInit(gorgonia.Zeroes()))
		m.params = append(m.params, w, b)
		var err error
		if last, err = nn.Linear(last, w, b); err != nil {
			return nil, err
		}
		if out > 1 {
			if last, err = Swish(last); err != nil {
				return nil, err
			}
		}
	}
	diff := gorgonia.Must(gorgonia.Sub(last, m.y))
	m.loss = gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(diff))))
	return m, nil
}

func (m *model) feed(i int) error {
	r := rand.New(rand.NewPCG(3, uint64(i)))
	x, y := make([]float32, batch), make([]float32, batch)
	for k := range x {
		v := 2*r.Float64() - 1
		x[k], y[k] = float32(v), float32(math.Sin(3*v))
	}
	if err := gorgonia.Let(m.x, tensor.New(tensor.WithShape(batch, 1), tensor.WithBacking(x))); err != nil {
		return err
	}
	return gorgonia.Let(m.y, tensor.New(tensor.WithShape(batch, 1), tensor.WithBacking(y)))
}
