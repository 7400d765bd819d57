package nn

import (
	"fmt"
	"math"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// Ignore is the target of a row that takes no part in the loss.
const Ignore = -1

// CrossEntropyOptions says how rows become one loss. Nil and the zero value
// mean the mean.
type CrossEntropyOptions struct {
	// Sum adds the rows' losses up. By default their sum is divided by the
	// number of rows that count (a loss of 0 when there are none).
	Sum bool
}

// SoftmaxCrossEntropy is the cross entropy (in nats) of the softmax of logits
// (N, V) against targets (N), a scalar. Rows whose target is Ignore don't
// count. A target outside [−1, V) is an error when it runs.
func SoftmaxCrossEntropy(logits, targets *gorgonia.Node, o *CrossEntropyOptions) (*gorgonia.Node, error) {
	if o == nil {
		o = &CrossEntropyOptions{}
	}
	c := &checker{layer: "cross-entropy"}
	ls, n := c.floats("logits", logits, 2), c.ints("targets", targets)
	c.must(ls.Shape[0] == n, "logits have %d rows and targets %d elements: one target a row", ls.Shape[0], n)
	if c.err != nil {
		return nil, c.err
	}
	attr := device.Attr{Mean: !o.Sum}
	state := []*device.State{
		{Name: "cross-entropy.lse", Tensor: device.Tensor{Shape: []int{n}, Type: ls.Type}},
		{Name: "cross-entropy.count", Tensor: device.Tensor{Shape: []int{1}, Type: dtype.Float32}},
	}
	ce := &op{ref: reference{crossEntropy[float32], crossEntropy[float64]}}
	ce.desc = device.Op{Kind: device.CrossEntropy, Attr: attr, State: state, Out: []device.Tensor{{Type: ls.Type}}}
	ce.diff = []bool{true, false}
	ce.grad = func(in gorgonia.Nodes, _, dloss *gorgonia.Node) (gorgonia.Nodes, error) {
		g := gradientsOf(2)
		dl := &op{ref: reference{crossEntropyGrad[float32], crossEntropyGrad[float64]}}
		dl.desc = device.Op{Kind: device.CrossEntropyGrad, Attr: attr, State: state, Out: []device.Tensor{ls}}
		g.add(0, dl, in[0], in[1], dloss)
		return g.done()
	}
	return apply(ce, logits, targets)
}

// TargetCount is the number of targets (N) that aren't Ignore, as a scalar of
// dt, which is Float32 or Float64. With the summed loss it gives the mean over
// several batches.
func TargetCount(targets *gorgonia.Node, dt tensor.Dtype) (*gorgonia.Node, error) {
	c := &checker{layer: "target-count"}
	c.ints("targets", targets)
	t := dtypeOf(dt)
	c.must(t.Float(), "dtype is %v, want float32 or float64", dt)
	if c.err != nil {
		return nil, c.err
	}
	o := &op{ref: reference{targetCount[float32], targetCount[float64]}}
	o.desc = device.Op{Kind: device.TargetCount, Out: []device.Tensor{{Type: t}}}
	return apply(o, targets)
}

func targetCount[F float](a args[F]) error {
	a.out[0] = F(counted(a.i[0]))
	return nil
}

func counted(targets []int) (n int) {
	for _, t := range targets {
		if t != Ignore {
			n++
		}
	}
	return n
}

// logSumExp is log Σ exp(x).
func logSumExp[F float](x []F) float64 {
	most, sum := math.Inf(-1), 0.0
	for _, v := range x {
		most = max(most, float64(v))
	}
	for _, v := range x {
		sum += math.Exp(float64(v) - most)
	}
	return most + math.Log(sum)
}

func checkTarget(n, target, classes int) error {
	if target < Ignore || target >= classes {
		return fmt.Errorf("target %d at row %d lies outside [%d, %d)", target, n, Ignore, classes)
	}
	return nil
}

func crossEntropy[F float](a args[F]) error {
	classes, loss := a.desc.In[0].Shape[1], 0.0
	for n, target := range a.i[1] {
		if err := checkTarget(n, target, classes); err != nil {
			return err
		}
		if target != Ignore {
			row := a.f[0][n*classes:][:classes]
			loss += logSumExp(row) - float64(row[target])
		}
	}
	a.out[0] = F(loss / divisor(a.op, a.i[1]))
	return nil
}

// divisor is what a sum over rows is divided by.
func divisor(o *op, targets []int) float64 {
	if !o.desc.Attr.Mean {
		return 1
	}
	return float64(max(1, counted(targets)))
}

func crossEntropyGrad[F float](a args[F]) error {
	classes, scale := a.desc.In[0].Shape[1], float64(a.f[2][0])/divisor(a.op, a.i[1])
	for n, target := range a.i[1] {
		if err := checkTarget(n, target, classes); err != nil {
			return err
		}
		row, dst := a.f[0][n*classes:][:classes], a.out[n*classes:][:classes]
		if target == Ignore {
			clear(dst)
			continue
		}
		lse := logSumExp(row)
		for j, v := range row {
			p := math.Exp(float64(v) - lse)
			if j == target {
				p--
			}
			dst[j] = F(scale * p)
		}
	}
	return nil
}
