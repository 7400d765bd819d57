package cpu

import (
	"fmt"
	"slices"

	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/internal/simd"
)

// fold is a shape seen as (outer, n, inner), where n is what is reduced.
type fold struct{ outer, n, inner int }

// newFold folds neighbouring axes. No axes are all of them.
func newFold(shape, axes []int) (fold, error) {
	f := fold{1, 1, 1}
	for i, a := range axes {
		if a < 0 || a >= len(shape) || a != axes[0]+i {
			return f, fmt.Errorf("axes %v of shape %v, want ascending neighbours", axes, shape)
		}
	}
	for i, d := range shape {
		switch {
		case slices.Contains(axes, i):
			f.n *= d
		case len(axes) > 0 && i < axes[0]:
			f.outer *= d
		default:
			f.inner *= d
		}
	}
	return f, nil
}

// sumLanes is how many sums run side by side over a row, so that the order of
// additions is the same on every instruction set.
const sumLanes = 32

// rowSums adds rows up on any thread.
type rowSums struct {
	simd  *simd.Kernels
	lanes [][]float32 // of each thread
}

func newRowSums(d *Device) rowSums {
	r := rowSums{simd: d.simd}
	for range d.opts.Threads {
		r.lanes = append(r.lanes, make([]float32, sumLanes))
	}
	return r
}

// sum adds x up on thread t: lanes of a piece in float32, the rest in float64.
func (r *rowSums) sum(t int, x []float32) float64 {
	var sum float64
	lanes := r.lanes[t]
	for len(x) >= sumLanes {
		n := min(len(x), chunkElems) / sumLanes
		clear(lanes)
		r.simd.ColSum(lanes, x, n, sumLanes)
		var a, b, c, d float64 // four chains of additions
		for i := 0; i < sumLanes; i += 4 {
			l := (*[4]float32)(lanes[i:])
			a, b, c, d = a+float64(l[0]), b+float64(l[1]), c+float64(l[2]), d+float64(l[3])
		}
		sum += a + b + (c + d)
		x = x[n*sumLanes:]
	}
	for _, v := range x {
		sum += float64(v)
	}
	return sum
}

// reduceProgram is Reduce. Threads take results, or pieces of the only one.
type reduceProgram struct {
	fold
	rowSums
	most    bool
	partial []float64 // of the pieces of a single result
	width   int       // columns that a thread takes at once
	cuts    int       // pieces of width that inner makes
	x, y    []float32
}

func compileReduce(d *Device, op device.Op) (program, error) {
	f, err := newFold(op.In[0].Shape, op.Attr.Axes)
	if err != nil {
		return nil, err
	}
	r := &reduceProgram{fold: f, rowSums: newRowSums(d), most: op.Attr.Func == device.Most}
	if !r.most && op.Attr.Func != device.Add {
		return nil, fmt.Errorf("reduction by %q: %w", op.Attr.Func, device.ErrUnsupported)
	}
	if r.most && f.n == 0 {
		return nil, fmt.Errorf("the greatest of no elements: shape %v along %v", op.In[0].Shape, op.Attr.Axes)
	}
	if f.outer*f.inner == 1 {
		r.partial = make([]float64, pieces(f.n, chunkElems))
	}
	return r, elements("y", op.Out[0], f.outer*f.inner)
}

func (r *reduceProgram) run(p *pool, a [][]byte) error {
	r.x, r.y = view[float32](a[0]), view[float32](a[1])
	switch {
	case len(r.partial) > 1:
		p.run(len(r.partial), r)
		total := r.partial[0]
		for _, v := range r.partial[1:] {
			if r.most {
				total = max(total, v)
			} else {
				total += v
			}
		}
		r.y[0] = float32(total)
	case r.inner == 1:
		p.run(pieces(r.outer, rowsPerPiece(r.n)), r)
	default:
		r.width = r.inner
		if r.outer < p.threads {
			r.width = p.columns(r.inner)
		}
		r.cuts = pieces(r.inner, r.width)
		p.run(r.outer*r.cuts, r)
	}
	return nil
}

func (r *reduceProgram) part(t, i int) {
	switch {
	case len(r.partial) > 1:
		lo, hi := piece(i, r.n, chunkElems)
		r.partial[i] = r.row(t, r.x[lo:hi])
	case r.inner == 1:
		lo, hi := piece(i, r.outer, rowsPerPiece(r.n))
		for k := lo; k < hi; k++ {
			r.y[k] = float32(r.row(t, r.x[k*r.n:(k+1)*r.n]))
		}
	default:
		o := i / r.cuts
		lo, hi := piece(i%r.cuts, r.inner, r.width)
		r.columns(r.y[o*r.inner+lo:o*r.inner+hi], r.x[o*r.n*r.inner+lo:(o+1)*r.n*r.inner])
	}
}

func (r *reduceProgram) row(t int, x []float32) float64 {
	if r.most {
		return float64(r.simd.Max(x))
	}
	return r.sum(t, x)
}

// columns reduces n rows, which are inner apart, to one.
func (r *reduceProgram) columns(y, x []float32) {
	if !r.most {
		clear(y)
		step := rowsPerPiece(len(y))
		for k := 0; k < r.n; k += step {
			r.simd.ColSum(y, x[k*r.inner:], min(step, r.n-k), r.inner)
		}
		return
	}
	copy(y, x)
	to := raw(y)
	for k := 1; k < r.n; k++ {
		r.simd.Reduce(simd.ReduceMax, dtype.Float32, to, to, raw(x[k*r.inner:][:len(y)]))
	}
}
