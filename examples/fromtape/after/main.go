// Command after trains the perceptron of command before, next to it, on tandem,
// in as many processes as there are ranks.
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

const (
	batch = 64 // rows a step, of all ranks
	steps = 200
)

func main() {
	if err := tandem.Run(context.Background(), nil, train); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(launch.ExitCode(err))
	}
}

func train(ctx context.Context, g *tandem.Group) error {
	m := newModel(batch / g.WorldSize)
	d, err := ddp.New(ctx, g.Comm, m.loss, m.params, &ddp.Options{Device: g.Device})
	if err != nil {
		return err
	}
	defer d.Close()
	solver := gorgonia.NewVanillaSolver(gorgonia.WithLearnRate(0.1))
	for step := range steps {
		if err := m.feed(step, g.Rank*batch/g.WorldSize); err != nil {
			return err
		}
		if err := d.Step(ctx); err != nil {
			return err
		}
		if err := solver.Step(d.ValueGrads()); err != nil {
			return err
		}
		if g.Rank == 0 && (step+1)%50 == 0 {
			fmt.Printf("step %d: loss %.5f\n", step+1, d.Stats().Loss)
		}
	}
	return nil
}

// model is sin(a)·b, to be learned.
type model struct {
	graph      *gorgonia.ExprGraph
	x, y, loss *gorgonia.Node
	params     gorgonia.Nodes
}

func newModel(rows int) *model {
	g := gorgonia.NewGraph()
	m := &model{
		graph: g,
		x:     gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(rows, 3), gorgonia.WithName("x")),
		y:     gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(rows, 1), gorgonia.WithName("y")),
	}
	r := rand.New(rand.NewPCG(7, 7))
	last := m.x
	for i, shape := range [][2]int{{3, 24}, {24, 24}, {24, 1}} {
		values := make([]float32, shape[0]*shape[1])
		for k := range values {
			values[k] = float32(r.NormFloat64() / math.Sqrt(float64(shape[0])))
		}
		w := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(shape[0], shape[1]), gorgonia.WithName(fmt.Sprintf("w%d", i)),
			gorgonia.WithValue(tensor.New(tensor.WithShape(shape[0], shape[1]), tensor.WithBacking(values))))
		m.params = append(m.params, w)
		if i > 0 {
			last = gorgonia.Must(gorgonia.Tanh(last))
		}
		last = gorgonia.Must(gorgonia.Mul(last, w))
	}
	m.loss = gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(gorgonia.Must(gorgonia.Sub(last, m.y))))))
	return m
}

// feed binds rows first … of a step's batch.
func (m *model) feed(step, first int) error {
	n := m.y.Shape()[0]
	x, y := make([]float32, 0, 3*n), make([]float32, 0, n)
	for row := first; row < first+n; row++ {
		r := rand.New(rand.NewPCG(uint64(step), uint64(row)))
		a, b := 4*r.Float64()-2, 2*r.Float64()-1
		x = append(x, float32(a), float32(b), 1)
		y = append(y, float32(math.Sin(a)*b))
	}
	if err := gorgonia.Let(m.x, tensor.New(tensor.WithShape(n, 3), tensor.WithBacking(x))); err != nil {
		return err
	}
	return gorgonia.Let(m.y, tensor.New(tensor.WithShape(n, 1), tensor.WithBacking(y)))
}
