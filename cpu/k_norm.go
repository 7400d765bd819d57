package cpu

import (
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/internal/simd"
)

// layerNormProgram is LayerNorm and LayerNormGradInput. Threads take rows.
type layerNormProgram struct {
	simd                  *simd.Kernels
	rows, d               int
	eps                   float32
	grad                  bool
	x, gamma, beta, dy, y []float32
	mean, rstd            []float32
}

// layerNormShapes checks what all layer norm kinds have in common.
func layerNormShapes(op device.Op) (rows, d int, err error) {
	x := op.In[0]
	rows, d, err = matrix("x", x)
	if err != nil {
		return 0, 0, err
	}
	return rows, d, firstError(
		elements("mean", op.State[0].Tensor, rows),
		elements("rstd", op.State[1].Tensor, rows))
}

func compileLayerNorm(d *Device, op device.Op) (program, error) {
	rows, n, err := layerNormShapes(op)
	if err != nil {
		return nil, err
	}
	return &layerNormProgram{simd: d.simd, rows: rows, d: n, eps: op.Attr.Eps}, firstError(
		elements("gamma", op.In[1], n),
		elements("beta", op.In[2], n),
		sameShape("y", op.Out[0], "x", op.In[0]))
}

func compileLayerNormGradInput(d *Device, op device.Op) (program, error) {
	rows, n, err := layerNormShapes(op)
	if err != nil {
		return nil, err
	}
	return &layerNormProgram{simd: d.simd, rows: rows, d: n, grad: true}, firstError(
		elements("gamma", op.In[1], n),
		sameShape("dy", op.In[2], "x", op.In[0]),
		sameShape("dx", op.Out[0], "x", op.In[0]))
}

func (l *layerNormProgram) run(p *pool, a [][]byte) error {
	l.x, l.gamma = view[float32](a[0]), view[float32](a[1])
	l.beta, l.dy = view[float32](a[2]), view[float32](a[2])
	l.mean, l.rstd, l.y = view[float32](a[3]), view[float32](a[4]), view[float32](a[5])
	p.run(pieces(l.rows, rowsPerPiece(l.d)), l)
	return nil
}

func (l *layerNormProgram) part(_, i int) {
	lo, hi := piece(i, l.rows, rowsPerPiece(l.d))
	y, x := l.y[lo*l.d:hi*l.d], l.x[lo*l.d:hi*l.d]
	mean, rstd := l.mean[lo:hi], l.rstd[lo:hi]
	if l.grad {
		l.simd.LayerNormGradInput(y, x, l.gamma, l.dy[lo*l.d:hi*l.d], mean, rstd, hi-lo, l.d)
		return
	}
	l.simd.LayerNorm(y, x, l.gamma, l.beta, mean, rstd, hi-lo, l.d, l.eps)
}

// layerNormParamsProgram is LayerNormGradGamma. Threads take columns, so every
// sum is over the rows in order.
type layerNormParamsProgram struct {
	simd                             *simd.Kernels
	rows, d, width                   int
	x, dy, mean, rstd, dgamma, dbeta []float32
}

func compileLayerNormGradGamma(d *Device, op device.Op) (program, error) {
	rows, n, err := layerNormShapes(op)
	if err != nil {
		return nil, err
	}
	return &layerNormParamsProgram{simd: d.simd, rows: rows, d: n}, firstError(
		sameShape("dy", op.In[1], "x", op.In[0]),
		elements("dbeta", op.State[2].Tensor, n),
		elements("dgamma", op.Out[0], n))
}

func (l *layerNormParamsProgram) run(p *pool, a [][]byte) error {
	l.x, l.dy, l.mean, l.rstd = view[float32](a[0]), view[float32](a[1]), view[float32](a[2]), view[float32](a[3])
	l.dbeta, l.dgamma = view[float32](a[4]), view[float32](a[5])
	l.width = p.columns(l.d)
	p.run(pieces(l.d, l.width), l)
	return nil
}

func (l *layerNormParamsProgram) part(_, i int) {
	lo, hi := piece(i, l.d, l.width)
	dgamma, dbeta := l.dgamma[lo:hi], l.dbeta[lo:hi]
	clear(dgamma)
	clear(dbeta)
	step := rowsPerPiece(l.d)
	for r := 0; r < l.rows; r += step {
		n, o := min(step, l.rows-r), r*l.d+lo
		l.simd.LayerNormGradParams(dgamma, dbeta, l.x[o:], l.dy[o:], l.mean[r:r+n], l.rstd[r:r+n], n, l.d)
	}
}

// layerNormBetaProgram is LayerNormGradBeta: the state as an output.
type layerNormBetaProgram struct{}

func compileLayerNormGradBeta(_ *Device, op device.Op) (program, error) {
	return layerNormBetaProgram{}, elements("dbeta", op.Out[0], op.State[0].Elems())
}

func (layerNormBetaProgram) run(_ *pool, a [][]byte) error {
	copy(a[3], a[2])
	return nil
}
