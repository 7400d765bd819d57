package cpu

import (
	"fmt"
	"slices"

	"github.com/tandem-go/tandem/device"
)

// matrix is the rows and columns of an argument of two dimensions.
func matrix(what string, t device.Tensor) (rows, cols int, err error) {
	if len(t.Shape) != 2 {
		return 0, 0, fmt.Errorf("%s has shape %v, want two dimensions", what, t.Shape)
	}
	return t.Shape[0], t.Shape[1], nil
}

// sameShape requires equal shapes.
func sameShape(what string, a device.Tensor, as string, b device.Tensor) error {
	if !slices.Equal(a.Shape, b.Shape) {
		return fmt.Errorf("%s has shape %v, %s has %v", what, a.Shape, as, b.Shape)
	}
	return nil
}

// elements requires a number of elements, of whatever shape.
func elements(what string, t device.Tensor, n int) error {
	if t.Elems() != n {
		return fmt.Errorf("%s has shape %v, want %d elements", what, t.Shape, n)
	}
	return nil
}

// firstError is the first of some checks that failed.
func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// chunkElems is the piece, in elements, in which threads take element-wise
// work: short enough for 200 µs of assembly, long enough to be worth a claim.
// It doesn't depend on the number of threads, so neither does any result.
const chunkElems = 1 << 14

// rowsPerPiece is how many rows of d elements make a piece.
func rowsPerPiece(d int) int { return max(1, chunkElems/max(1, d)) }

// columns divides d columns among the threads of p in multiples of a cache
// line, and returns the width of a share.
func (p *pool) columns(d int) int {
	const line = alignment / 4
	share := pieces(d, p.threads)
	return max(line, pieces(share, line)*line)
}
