package cpu

import (
	"fmt"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/internal/simd"
)

// attentionProgram is Attention and AttentionGrad. Threads take heads.
type attentionProgram struct {
	simd                  *simd.Kernels
	ws                    []*simd.Workspace
	shape                 simd.AttentionShape
	grad                  bool
	qkv, y, dy, lse, dqkv []float32
}

func newAttention(d *Device, op device.Op) (*attentionProgram, error) {
	rows, cols, err := matrix("qkv", op.In[0])
	if err != nil {
		return nil, err
	}
	h, t := op.Attr.Heads, op.Attr.Seq
	if h < 1 || t < 1 || rows%t != 0 || cols%(3*h) != 0 {
		return nil, fmt.Errorf("qkv has shape %v, want (B·T, 3·H·k) with T = Attr.Seq = %d and H = Attr.Heads = %d",
			op.In[0].Shape, t, h)
	}
	a := &attentionProgram{simd: d.simd, ws: d.pool.ws}
	a.shape = simd.AttentionShape{B: rows / t, T: t, H: h, D: cols / 3}
	return a, elements("lse", op.State[0].Tensor, rows*h)
}

func (a *attentionProgram) checkRows(what string, t device.Tensor) error {
	s := a.shape
	if len(t.Shape) != 2 || t.Shape[0] != s.B*s.T || t.Shape[1] != s.D {
		return fmt.Errorf("%s has shape %v, want [%d %d]", what, t.Shape, s.B*s.T, s.D)
	}
	return nil
}

func compileAttention(d *Device, op device.Op) (program, error) {
	a, err := newAttention(d, op)
	if err != nil {
		return nil, err
	}
	return a, a.checkRows("y", op.Out[0])
}

func compileAttentionGrad(d *Device, op device.Op) (program, error) {
	a, err := newAttention(d, op)
	if err != nil {
		return nil, err
	}
	a.grad = true
	return a, firstError(
		a.checkRows("y", op.In[1]),
		a.checkRows("dy", op.In[2]),
		sameShape("dqkv", op.Out[0], "qkv", op.In[0]))
}

func (a *attentionProgram) run(p *pool, args [][]byte) error {
	a.qkv = view[float32](args[0])
	if a.grad {
		a.y, a.dy, a.lse, a.dqkv = view[float32](args[1]), view[float32](args[2]), view[float32](args[3]), view[float32](args[4])
	} else {
		a.lse, a.y = view[float32](args[1]), view[float32](args[2])
	}
	p.run(a.shape.B*a.shape.H, a)
	return nil
}

func (a *attentionProgram) part(t, i int) {
	b, h := i/a.shape.H, i%a.shape.H
	if a.grad {
		a.simd.AttentionGrad(a.ws[t], a.dqkv, a.qkv, a.y, a.dy, a.lse, a.shape, b, h)
		return
	}
	a.simd.Attention(a.ws[t], a.y, a.qkv, a.lse, a.shape, b, h)
}
