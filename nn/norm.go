package nn

import (
	"math"

	"gorgonia.org/gorgonia"

	"github.com/tandem-go/tandem/device"
)

// LayerNorm brings each row of x (N, D) to mean 0 and variance 1, then
// multiplies by gamma (D) and adds beta (D). eps (above 0; GPT-2 has 1e-5) is
// added to the variance. After Ba, Kiros and Hinton, arXiv:1607.06450.
func LayerNorm(x, gamma, beta *gorgonia.Node, eps float64) (*gorgonia.Node, error) {
	c := &checker{layer: "layer-norm"}
	xs, gs, bs := c.floats("x", x, 2), c.floats("gamma", gamma, 1), c.floats("beta", beta, 1)
	c.must(xs.Shape[1] == gs.Shape[0] && xs.Shape[1] == bs.Shape[0],
		"x has shape %v, gamma %v and beta %v: gamma and beta need an element for each column of x", xs.Shape, gs.Shape, bs.Shape)
	c.must(float32(eps) > 0 && !math.IsInf(eps, 1), "eps is %v, want a positive number", eps)
	if c.err != nil {
		return nil, c.err
	}
	row := device.Tensor{Shape: xs.Shape[:1], Type: xs.Type}
	mean, rstd := &device.State{Name: "layer-norm.mean", Tensor: row}, &device.State{Name: "layer-norm.rstd", Tensor: row}
	o := &op{eps: eps, ref: reference{layerNorm[float32], layerNorm[float64]}}
	o.desc = device.Op{
		Kind: device.LayerNorm, Attr: device.Attr{Eps: float32(eps)},
		State: []*device.State{mean, rstd}, Out: []device.Tensor{xs},
	}
	o.diff = []bool{true, true, true}
	o.grad = func(in gorgonia.Nodes, _, dy *gorgonia.Node) (gorgonia.Nodes, error) {
		return layerNormGrad(in, dy, eps, mean, rstd)
	}
	return apply(o, x, gamma, beta)
}

func layerNormGrad(in gorgonia.Nodes, dy *gorgonia.Node, eps float64, mean, rstd *device.State) (gorgonia.Nodes, error) {
	x, gamma, beta := tensorOf(in[0]), tensorOf(in[1]), tensorOf(in[2])
	dbeta := &device.State{Name: "layer-norm.dbeta", Tensor: beta}
	g := gradientsOf(3)
	dg := &op{eps: eps, ref: reference{layerNormGradGamma[float32], layerNormGradGamma[float64]}}
	dg.desc = device.Op{Kind: device.LayerNormGradGamma, State: []*device.State{mean, rstd, dbeta}, Out: []device.Tensor{gamma}}
	g.add(1, dg, in[0], dy)

	// The reference of dbeta sums dy itself; dgamma is only there to come first.
	db := &op{ref: reference{colSum[float32], colSum[float64]}}
	db.desc = device.Op{Kind: device.LayerNormGradBeta, State: []*device.State{dbeta}, Out: []device.Tensor{beta}}
	g.add(2, db, dy, g.nodes[1])

	dx := &op{eps: eps, ref: reference{layerNormGradInput[float32], layerNormGradInput[float64]}}
	dx.desc = device.Op{Kind: device.LayerNormGradInput, State: []*device.State{mean, rstd}, Out: []device.Tensor{x}}
	g.add(0, dx, in[0], in[1], dy)
	return g.done()
}

// rowStats are the mean and the reciprocal standard deviation of a row.
func rowStats[F float](x []F, eps float64) (mean, rstd float64) {
	for _, v := range x {
		mean += float64(v)
	}
	mean /= float64(len(x))
	var q float64
	for _, v := range x {
		d := float64(v) - mean
		q += d * d
	}
	return mean, 1 / math.Sqrt(q/float64(len(x))+eps)
}

func layerNorm[F float](a args[F]) error {
	x, gamma, beta := a.f[0], a.f[1], a.f[2]
	for d := len(gamma); len(x) > 0; x, a.out = x[d:], a.out[d:] {
		mean, rstd := rowStats(x[:d], a.eps)
		for j, v := range x[:d] {
			a.out[j] = F((float64(v)-mean)*rstd*float64(gamma[j]) + float64(beta[j]))
		}
	}
	return nil
}

func layerNormGradGamma[F float](a args[F]) error {
	x, dy := a.f[0], a.f[1]
	sum := make([]float64, len(a.out))
	for d := len(sum); len(x) > 0; x, dy = x[d:], dy[d:] {
		mean, rstd := rowStats(x[:d], a.eps)
		for j, v := range x[:d] {
			sum[j] += float64(dy[j]) * (float64(v) - mean) * rstd
		}
	}
	round(a.out, sum)
	return nil
}

// layerNormGradInput is rstd·(h − mean(h) − x̂·mean(h·x̂)) with h = dy·gamma.
func layerNormGradInput[F float](a args[F]) error {
	x, gamma, dy := a.f[0], a.f[1], a.f[2]
	for d := len(gamma); len(x) > 0; x, dy, a.out = x[d:], dy[d:], a.out[d:] {
		mean, rstd := rowStats(x[:d], a.eps)
		var sumH, sumHX float64
		for j, v := range x[:d] {
			h := float64(dy[j]) * float64(gamma[j])
			sumH += h
			sumHX += h * (float64(v) - mean) * rstd
		}
		sumH /= float64(d)
		sumHX /= float64(d)
		for j, v := range x[:d] {
			h := float64(dy[j]) * float64(gamma[j])
			a.out[j] = F(rstd * (h - sumH - (float64(v)-mean)*rstd*sumHX))
		}
	}
	return nil
}
