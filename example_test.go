package tandem_test

import (
	"context"
	"fmt"
	"math/rand/v2"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/ddp"
)

// A training loop that runs on any number of ranks. With NProc 2 it starts
// itself twice; under torchrun, mpirun or srun it is one of their ranks.
func Example() {
	err := tandem.Run(context.Background(), &tandem.Options{NProc: 1}, func(ctx context.Context, g *tandem.Group) error {
		m := newLine() // a gorgonia graph, as on one machine
		d, err := ddp.New(ctx, g.Comm, m.loss, gorgonia.Nodes{m.w}, &ddp.Options{Device: g.Device})
		if err != nil {
			return err
		}
		defer d.Close()
		solver := gorgonia.NewVanillaSolver(gorgonia.WithLearnRate(0.5))
		for step := range 300 {
			if err := m.feed(step*g.WorldSize + g.Rank); err != nil { // this rank's own batch
				return err
			}
			if err := d.Step(ctx); err != nil { // forward, backward, average over all ranks
				return err
			}
			if err := solver.Step(d.ValueGrads()); err != nil {
				return err
			}
		}
		if g.Rank == 0 {
			fmt.Printf("w = %.2f\n", m.w.Value().Data())
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: w = [2.00 -1.00]
}

// line is y = x·w, to be learned from samples.
type line struct{ x, y, w, loss *gorgonia.Node }

const batch = 16

func newLine() *line {
	g := gorgonia.NewGraph()
	m := &line{
		x: gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(batch, 2), gorgonia.WithName("x")),
		y: gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(batch, 1), gorgonia.WithName("y")),
		w: gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(2, 1), gorgonia.WithName("w"), gorgonia.WithInit(gorgonia.Zeroes())),
	}
	diff := gorgonia.Must(gorgonia.Sub(gorgonia.Must(gorgonia.Mul(m.x, m.w)), m.y))
	m.loss = gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(diff))))
	return m
}

// feed binds batch i, which is the same whoever asks for it.
func (m *line) feed(i int) error {
	r := rand.New(rand.NewPCG(1, uint64(i)))
	x, y := make([]float32, 2*batch), make([]float32, batch)
	for k := range y {
		x[2*k], x[2*k+1] = r.Float32(), r.Float32()
		y[k] = 2*x[2*k] - x[2*k+1]
	}
	if err := gorgonia.Let(m.x, tensor.New(tensor.WithShape(batch, 2), tensor.WithBacking(x))); err != nil {
		return err
	}
	return gorgonia.Let(m.y, tensor.New(tensor.WithShape(batch, 1), tensor.WithBacking(y)))
}
