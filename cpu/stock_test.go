package cpu

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// region draws a shape with strides and an offset that stay within n elements.
// Distinct strides keep elements apart.
func region(t *rapid.T, distinct bool) (shape []int, a device.Attr, n int) {
	dims := size(t, "dims", 0, 4)
	shape, a.Strides = make([]int, dims), make([]int, dims)
	a.Offset = size(t, "offset", 0, 5)
	reach, order := 1, rapid.Permutation([]int{0, 1, 2, 3}[:dims]).Draw(t, "order")
	for _, i := range order {
		shape[i] = size(t, "d", 0, 40)
		if !distinct && rapid.Bool().Draw(t, "repeat") {
			shape[i] = size(t, "times", 1, 4)
			continue
		}
		a.Strides[i] = reach * size(t, "step", 1, 2)
		reach = a.Strides[i]*max(1, shape[i]) + size(t, "gap", 0, 2)
		if reach > 40000 {
			shape[i] = min(1, shape[i])
			reach = a.Strides[i] + 1
		}
	}
	last := a.Offset
	for i, d := range shape {
		last += max(0, d-1) * a.Strides[i]
	}
	return shape, a, last + 1 + size(t, "rest", 0, 3)
}

// each calls f with the position of every element in dense and strided memory.
func each(shape []int, a device.Attr, f func(dense, strided int)) {
	n := elems(shape)
	for i := range n {
		at, r := a.Offset, i
		for k := len(shape) - 1; k >= 0; k-- {
			at += r % shape[k] * a.Strides[k]
			r /= shape[k]
		}
		f(i, at)
	}
}

func elems(shape []int) int { return device.Tensor{Shape: shape}.Elems() }

// Without it a transposition, slice or repetition could move elements to other
// places, at the seams of pieces or where axes were merged.
func TestStrided(t *testing.T) {
	r := newRig(t)
	rapid.Check(t, func(t *rapid.T) {
		shape, a, n := region(t, false)
		x := normal(seeded(t), n)
		want := make([]float64, elems(shape))
		each(shape, a, func(dense, strided int) { want[dense] = float64(x[strided]) })
		c := call{kind: device.Strided, attr: a, in: []arg{floats(x, n)}, out: []arg{garbage(shape...)}}
		r.run(t, c, true, func(t *rapid.T, res result) { near(t, "y", res.f32(0), want, 0) })
	})
}

// Without it the gradient of a slice could leave garbage beside it.
func TestStridedGrad(t *testing.T) {
	r := newRig(t)
	rapid.Check(t, func(t *rapid.T) {
		shape, a, n := region(t, true)
		dy := normal(seeded(t), elems(shape))
		want := make([]float64, n)
		each(shape, a, func(dense, strided int) { want[strided] = float64(dy[dense]) })
		c := call{kind: device.StridedGrad, attr: a, in: []arg{floats(dy, shape...)}, out: []arg{garbage(n)}}
		r.run(t, c, true, func(t *rapid.T, res result) { near(t, "dx", res.f32(0), want, 0) })
	})
}

// Without it only elements of four bytes could be moved, and masks or indices be
// torn.
func TestStridedMovesEveryType(t *testing.T) {
	d := open(t, &Options{Threads: 2})
	s := newStreamOf(t, d)
	for _, typ := range []dtype.Type{dtype.Uint8, dtype.Float16, dtype.Int32, dtype.Float64} {
		w := typ.Size()
		in := arg{device.Tensor{Shape: []int{2, 3}, Type: typ}, make([]byte, 6*w)}
		for i := range in.data {
			in.data[i] = byte(i + 1)
		}
		c := call{kind: device.Strided, attr: device.Attr{Strides: []int{1, 3}}, in: []arg{in},
			out: []arg{{device.Tensor{Shape: []int{3, 2}, Type: typ}, make([]byte, 6*w)}}}
		args := c.buffers(t, d)
		require.NoError(t, s.Launch(compile(t, d, c.op()), args))
		require.NoError(t, s.Sync(t.Context()))
		got, _ := args[1].HostBytes()
		for i, from := range []int{0, 3, 1, 4, 2, 5} {
			require.Equal(t, in.data[from*w:(from+1)*w], got[i*w:(i+1)*w], "%v", typ)
		}
	}
}

// Without it a region could reach past the end of its tensor, into other memory.
func TestStridedRefusesWhatReachesOut(t *testing.T) {
	d := open(t, &Options{Threads: 1})
	m := func(shape ...int) []device.Tensor { return []device.Tensor{{Shape: shape, Type: dtype.Float32}} }
	for want, op := range map[string]device.Op{
		"reach element 6 of 6": {Kind: device.Strided, Attr: device.Attr{Strides: []int{3}, Offset: 3}, In: m(6), Out: m(2)},
		"1 strides for shape":  {Kind: device.Strided, Attr: device.Attr{Strides: []int{1}}, In: m(6), Out: m(2, 3)},
		"is negative":          {Kind: device.Strided, Attr: device.Attr{Strides: []int{-1}, Offset: 5}, In: m(6), Out: m(6)},
		"stride 0 of an axis":  {Kind: device.StridedGrad, Attr: device.Attr{Strides: []int{0}}, In: m(2), Out: m(6)},
		"ascending neighbours": {Kind: device.Reduce, Attr: device.Attr{Func: device.Add, Axes: []int{0, 2}}, In: m(2, 3, 4), Out: m(3)},
		"doesn't fit into":     {Kind: device.Concat, Attr: device.Attr{Axes: []int{0}}, In: m(2, 3), Out: m(2, 4)},
		"have 2 along axis 0":  {Kind: device.Concat, Attr: device.Attr{Axes: []int{0}}, In: m(2, 3), Out: m(3, 3)},
		"want one":             {Kind: device.Softmax, In: m(2, 3), Out: m(2, 3)},
	} {
		_, err := d.Compile(op)
		require.ErrorContains(t, err, want)
		require.NotErrorIs(t, err, device.ErrUnsupported)
	}
}

// Without it a concatenation could interleave its inputs wrongly.
func TestConcat(t *testing.T) {
	r := newRig(t)
	rapid.Check(t, func(t *rapid.T) {
		rnd := seeded(t)
		outer, inner, axis := size(t, "outer", 0, 30), size(t, "inner", 1, 9), size(t, "axis", 0, 1)
		parts := rapid.SliceOfN(rapid.IntRange(0, 50), 1, 4).Draw(t, "parts")
		along := 0
		for _, p := range parts {
			along += p
		}
		shape := func(n int) []int { return [][]int{{n, outer * inner}, {outer, n, inner}}[axis] }
		rows, width := 1, outer*inner
		if axis == 1 {
			rows, width = outer, inner
		}
		want, at := make([]float64, rows*along*width), 0
		c := call{kind: device.Concat, attr: device.Attr{Axes: []int{axis}}, out: []arg{garbage(shape(along)...)}}
		for _, p := range parts {
			x := normal(rnd, rows*p*width)
			c.in = append(c.in, floats(x, shape(p)...))
			for i, v := range x {
				o := i / (p * width)
				want[o*along*width+at*width+i%(p*width)] = float64(v)
			}
			at += p
		}
		r.run(t, c, true, func(t *rapid.T, res result) { near(t, "y", res.f32(0), want, 0) })
	})
}

// Without it rows could be taken from other places than the indices say.
func TestGather(t *testing.T) {
	r := newRig(t)
	rapid.Check(t, func(t *rapid.T) {
		rnd := seeded(t)
		v, d, n := size(t, "v", 1, 50), size(t, "d", 0, 300), size(t, "n", 0, 200)
		x, rows := normal(rnd, v*d), indices(rnd, n, 0, v)
		want := make([]float64, n*d)
		for i := range want {
			want[i] = float64(x[int(rows[i/d])*d+i%d])
		}
		c := call{kind: device.Gather, in: []arg{floats(x, v, d), ints(rows, n)}, out: []arg{garbage(n, d)}}
		r.run(t, c, true, func(t *rapid.T, res result) { near(t, "y", res.f32(0), want, 0) })
	})
}

// Without it an index out of range would read other memory.
func TestGatherRefusesRowsOutside(t *testing.T) {
	d := open(t, &Options{Threads: 1})
	s := newStreamOf(t, d)
	c := call{kind: device.Gather, in: []arg{floats(make([]float32, 6), 3, 2), ints([]int64{3}, 1)}, out: []arg{garbage(1, 2)}}
	require.NoError(t, s.Launch(compile(t, d, c.op()), c.buffers(t, d)))
	require.ErrorContains(t, s.Sync(t.Context()), "row 3 at position 0 is outside [0, 3)")
}

// folded draws a shape of three axes, the middle one long now and then.
func folded(t *rapid.T) (outer, n, inner int) {
	outer, n, inner = size(t, "outer", 0, 8), size(t, "n", 1, 200), size(t, "inner", 1, 90)
	switch rapid.IntRange(0, 3).Draw(t, "form") {
	case 0:
		outer, n, inner = 1, size(t, "long", 1, 3*chunkElems), 1
	case 1:
		inner = 1
	case 2:
		outer = 1
	}
	return outer, n, inner
}

// column is the values of x that are reduced to one result.
func column(x []float32, o, n, inner, j int) []float64 {
	c := make([]float64, n)
	for i := range c {
		c[i] = float64(x[(o*n+i)*inner+j])
	}
	return c
}

// Without it a sum or maximum along an axis could miss elements, or its bits
// depend on the number of threads.
func TestReduce(t *testing.T) {
	r := newRig(t)
	rapid.Check(t, func(t *rapid.T) {
		outer, n, inner := folded(t)
		f := rapid.SampledFrom([]device.Func{device.Add, device.Most}).Draw(t, "f")
		x := normal(seeded(t), outer*n*inner)
		want := make([]float64, outer*inner)
		absolute := 0.0
		for i := range want {
			want[i] = math.Inf(-1)
			if f == device.Add {
				want[i] = 0
			}
			for _, v := range column(x, i/inner, n, inner, i%inner) {
				if f == device.Add {
					want[i] += v
					absolute += math.Abs(v)
				} else {
					want[i] = max(want[i], v)
				}
			}
		}
		tolerance := 0.0
		if top := largest(want); f == device.Add && top > 0 {
			tolerance = 1e-6 * max(1, absolute/float64(len(want))/top)
		}
		c := call{kind: device.Reduce, attr: device.Attr{Func: f, Axes: []int{1}}, in: []arg{floats(x, outer, n, inner)}, out: []arg{garbage(outer, inner)}}
		r.run(t, c, true, func(t *rapid.T, res result) { near(t, "y", res.f32(0), want, tolerance) })
	})
}

func largest(x []float64) (m float64) {
	for _, v := range x {
		m = max(m, math.Abs(v))
	}
	return m
}

// Without it a softmax along some axis, or its gradient, could be wrong.
func TestSoftmax(t *testing.T) {
	r := newRig(t)
	rapid.Check(t, func(t *rapid.T) {
		rnd := seeded(t)
		outer, n, inner := folded(t)
		shape := []int{outer, n, inner}
		x, dy := normal(rnd, outer*n*inner), normal(rnd, outer*n*inner)
		soft, log, dsoft, dlog := make([]float64, len(x)), make([]float64, len(x)), make([]float64, len(x)), make([]float64, len(x))
		for r := range outer * inner {
			o, j := r/inner, r%inner
			a, g := column(x, o, n, inner, j), column(dy, o, n, inner, j)
			var sum, dot, total float64
			for i := range a {
				sum += math.Exp(a[i])
				dot += math.Exp(a[i]) * g[i]
				total += g[i]
			}
			for i := range a {
				p, at := math.Exp(a[i])/sum, (o*n+i)*inner+j
				soft[at], log[at] = p, math.Log(p)
				dsoft[at], dlog[at] = p*(g[i]-dot/sum), g[i]-p*total
			}
		}
		for _, k := range []struct {
			kind, grad device.Kind
			y, dx      []float64
		}{{device.Softmax, device.SoftmaxGrad, soft, dsoft}, {device.LogSoftmax, device.LogSoftmaxGrad, log, dlog}} {
			a := device.Attr{Axes: []int{1}}
			var y []float32
			c := call{kind: k.kind, attr: a, in: []arg{floats(x, shape...)}, out: []arg{garbage(shape...)}}
			r.run(t, c, false, func(t *rapid.T, res result) { near(t, string(k.kind), res.f32(0), k.y, 2e-6); y = res.f32(0) })
			c = call{kind: k.grad, attr: a, in: []arg{floats(y, shape...), floats(dy, shape...)}, out: []arg{garbage(shape...)}}
			r.run(t, c, false, func(t *rapid.T, res result) { near(t, string(k.grad), res.f32(0), k.dx, 5e-6) })
		}
	})
}

// Without it a comparison could be another one, or take NaN for a number.
func TestComparisons(t *testing.T) {
	r := newRig(t)
	nan := float32(math.NaN())
	a, b := []float32{1, 2, 2, nan, 1, nan}, []float32{2, 1, 2, 1, nan, nan}
	for f, want := range map[device.Func][]float64{
		device.Greater: {0, 1, 0, 0, 0, 0}, device.Less: {1, 0, 0, 0, 0, 0},
		device.AtLeast: {0, 1, 1, 0, 0, 0}, device.AtMost: {1, 0, 1, 0, 0, 0},
		device.Equal: {0, 0, 1, 0, 0, 0}, device.Differ: {1, 1, 0, 1, 1, 1},
	} {
		rapid.Check(t, func(t *rapid.T) {
			c := call{kind: device.Binary, attr: device.Attr{Func: f}, in: []arg{floats(a, 6), floats(b, 6)}, out: []arg{garbage(6)}}
			r.run(t, c, true, func(t *rapid.T, res result) { near(t, string(f), res.f32(0), want, 0) })
		})
	}
}
