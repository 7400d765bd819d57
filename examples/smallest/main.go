// Command smallest is about the smallest data-parallel training loop: a stock
// gorgonia perceptron, trained by 2 processes that this one starts.
//
//	go run ./examples/smallest
//	torchrun --no-python --nproc-per-node 4 ./smallest
package main

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"os"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/ddp"
	"github.com/tandem-go/tandem/launch"
)

func main() {
	if err := tandem.Run(context.Background(), nil, train); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(launch.ExitCode(err))
	}
}

// train is one rank.
func train(ctx context.Context, g *tandem.Group) error {
	m := newModel(32)
	d, err := ddp.New(ctx, g.Comm, m.loss, m.params, &ddp.Options{Device: g.Device})
	if err != nil {
		return err
	}
	defer d.Close()
	solver := gorgonia.NewAdamSolver(gorgonia.WithLearnRate(0.01))
	for step := range 500 {
		if err := m.feed(step*g.WorldSize + g.Rank); err != nil { // this rank's own batch
			return err
		}
		if err := d.Step(ctx); err != nil { // forward, backward, average over all ranks
			return err
		}
		if err := solver.Step(d.ValueGrads()); err != nil { // the same update on each rank
			return err
		}
		if g.Rank == 0 && (step+1)%100 == 0 {
			fmt.Printf("step %d: loss %.4f\n", step+1, d.Stats().Loss)
		}
	}
	return nil
}

// model learns whether a point lies within a circle.
type model struct {
	x, y, loss *gorgonia.Node
	params     gorgonia.Nodes
}

func newModel(batch int) *model {
	g := gorgonia.NewGraph()
	node := func(name string, rows, cols int, opts ...gorgonia.NodeConsOpt) *gorgonia.Node {
		return gorgonia.NewMatrix(g, tensor.Float32, append([]gorgonia.NodeConsOpt{gorgonia.WithShape(rows, cols), gorgonia.WithName(name)}, opts...)...)
	}
	glorot := gorgonia.WithInit(gorgonia.GlorotN(1)) // differs between ranks: ddp.New gives all those of rank 0
	m := &model{x: node("x", batch, 3), y: node("y", batch, 1)}
	m.params = gorgonia.Nodes{node("w0", 3, 16, glorot), node("w1", 16, 1, glorot)}
	hidden := gorgonia.Must(gorgonia.Tanh(gorgonia.Must(gorgonia.Mul(m.x, m.params[0]))))
	out := gorgonia.Must(gorgonia.Sigmoid(gorgonia.Must(gorgonia.Mul(hidden, m.params[1]))))
	m.loss = gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(gorgonia.Must(gorgonia.Sub(out, m.y))))))
	return m
}

// feed binds batch i, which is the same whoever asks for it.
func (m *model) feed(i int) error {
	r := rand.New(rand.NewPCG(1, uint64(i)))
	n := m.y.Shape()[0]
	x, y := make([]float32, 0, 3*n), make([]float32, n)
	for k := range y {
		a, b := 2*r.Float64()-1, 2*r.Float64()-1
		x = append(x, float32(a), float32(b), 1)
		if math.Hypot(a, b) < 0.7 {
			y[k] = 1
		}
	}
	if err := gorgonia.Let(m.x, tensor.New(tensor.WithShape(n, 3), tensor.WithBacking(x))); err != nil {
		return err
	}
	return gorgonia.Let(m.y, tensor.New(tensor.WithShape(n, 1), tensor.WithBacking(y)))
}
