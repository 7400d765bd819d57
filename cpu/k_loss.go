package cpu

import (
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/internal/simd"
)

// crossEntropyProgram is CrossEntropy. Threads take rows; the losses of the
// rows are added in order, in float64.
type crossEntropyProgram struct {
	simd    *simd.Kernels
	rows, v int
	mean    bool
	targets []int64
	logits  []float32
	lse     []float32
	losses  []float64 // of each row
}

// crossEntropyShapes checks what both kinds have in common.
func crossEntropyShapes(op device.Op) (rows, v int, err error) {
	rows, v, err = matrix("logits", op.In[0])
	if err != nil {
		return 0, 0, err
	}
	return rows, v, firstError(
		elements("targets", op.In[1], rows),
		elements("lse", op.State[0].Tensor, rows),
		elements("count", op.State[1].Tensor, 1))
}

func compileCrossEntropy(d *Device, op device.Op) (program, error) {
	rows, v, err := crossEntropyShapes(op)
	if err != nil {
		return nil, err
	}
	c := &crossEntropyProgram{simd: d.simd, rows: rows, v: v, mean: op.Attr.Mean, losses: make([]float64, rows)}
	return c, elements("loss", op.Out[0], 1)
}

func (c *crossEntropyProgram) run(p *pool, a [][]byte) error {
	c.logits, c.targets, c.lse = view[float32](a[0]), view[int64](a[1]), view[float32](a[2])
	count, loss := view[float32](a[3]), view[float32](a[4])
	if err := inRange("target", c.targets, -1, c.v); err != nil {
		return err
	}
	p.run(pieces(c.rows, rowsPerPiece(c.v)), c)
	n, sum := 0, 0.0
	for r, t := range c.targets {
		if t >= 0 {
			n++
			sum += c.losses[r]
		}
	}
	if c.mean && n > 0 {
		sum /= float64(n)
	}
	count[0], loss[0] = float32(n), float32(sum)
	return nil
}

func (c *crossEntropyProgram) part(_, i int) {
	lo, hi := piece(i, c.rows, rowsPerPiece(c.v))
	for r := lo; r < hi; r++ {
		t := c.targets[r]
		if t < 0 {
			c.lse[r] = 0
			continue
		}
		row := c.logits[r*c.v : (r+1)*c.v]
		c.lse[r] = c.simd.CrossEntropyRow(row)
		c.losses[r] = float64(c.lse[r]) - float64(row[t])
	}
}

// crossEntropyGradProgram is CrossEntropyGrad. Threads take rows.
type crossEntropyGradProgram struct {
	simd        *simd.Kernels
	rows, v     int
	mean        bool
	scale       float32
	targets     []int64
	logits, lse []float32
	dlogits     []float32
}

func compileCrossEntropyGrad(d *Device, op device.Op) (program, error) {
	rows, v, err := crossEntropyShapes(op)
	if err != nil {
		return nil, err
	}
	return &crossEntropyGradProgram{simd: d.simd, rows: rows, v: v, mean: op.Attr.Mean}, firstError(
		elements("dloss", op.In[2], 1),
		sameShape("dlogits", op.Out[0], "logits", op.In[0]))
}

func (c *crossEntropyGradProgram) run(p *pool, a [][]byte) error {
	c.logits, c.targets = view[float32](a[0]), view[int64](a[1])
	c.lse, c.dlogits = view[float32](a[3]), view[float32](a[5])
	if err := inRange("target", c.targets, -1, c.v); err != nil {
		return err
	}
	c.scale = view[float32](a[2])[0]
	if n := view[float32](a[4])[0]; c.mean && n > 0 {
		c.scale /= n
	}
	p.run(pieces(c.rows, rowsPerPiece(c.v)), c)
	return nil
}

func (c *crossEntropyGradProgram) part(_, i int) {
	lo, hi := piece(i, c.rows, rowsPerPiece(c.v))
	for r := lo; r < hi; r++ {
		o := r * c.v
		c.simd.CrossEntropyGradRow(c.dlogits[o:o+c.v], c.logits[o:o+c.v], c.lse[r], c.scale, int(c.targets[r]))
	}
}
