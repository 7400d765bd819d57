package device_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// Without it the rates that benchmarks report would be off by a factor.
func TestCost(t *testing.T) {
	m := func(shape ...int) device.Tensor { return device.Tensor{Shape: shape, Type: dtype.Float32} }
	list := func(t ...device.Tensor) []device.Tensor { return t }
	for _, c := range []struct {
		op           device.Op
		flops, bytes int64
	}{
		{device.Op{Kind: device.MatMul, In: list(m(2, 3), m(3, 5)), Out: list(m(2, 5))}, 60, 4 * (6 + 15 + 10)},
		{device.Op{Kind: device.MatMul, Attr: device.Attr{TransA: true, Accumulate: true}, In: list(m(3, 2), m(3, 5)), Out: list(m(2, 5))}, 60, 4 * (6 + 15 + 20)},
		{device.Op{Kind: device.BatchedMatMul, In: list(m(4, 2, 3), m(4, 3, 5)), Out: list(m(4, 2, 5))}, 240, 16 * (6 + 15 + 10)},
		{device.Op{Kind: device.MatMul, Attr: device.Attr{Bias: true}, In: list(m(2, 3), m(3, 5), m(5)), Out: list(m(2, 5))}, 70, 4 * (6 + 15 + 5 + 10)},
		{device.Op{Kind: device.Attention, Attr: device.Attr{Heads: 2, Seq: 3}, In: list(m(6, 12)), Out: list(m(6, 4)),
			State: []*device.State{{Tensor: m(12)}}}, 2 * 24 * 4, 4 * (72 + 24 + 12)},
		{device.Op{Kind: device.Binary, In: list(m(), m(7)), Out: list(m(7))}, 7, 4 * 15},
		{device.Op{Kind: device.LayerNormGradBeta, In: list(m(100, 7), m(7)), State: []*device.State{{Tensor: m(7)}}, Out: list(m(7))}, 0, 4 * 14},
		{device.Op{Kind: device.Gather, In: list(m(100, 7), m(2)), Out: list(m(2, 7))}, 0, 4 * (2 + 28)},
		{device.Op{Kind: device.Embedding, In: list(m(100, 7), m(9, 7), m(2)), Out: list(m(2, 7))}, 0, 4 * (2 + 42)},
		{device.Op{Kind: device.Copy, In: list(m(7)), Out: list(m(7))}, 0, 56},
	} {
		flops, bytes := device.Cost(c.op)
		require.Equal(t, c.flops, flops, "%v", c.op)
		require.Equal(t, c.bytes, bytes, "%v", c.op)
	}
}
