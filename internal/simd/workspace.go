package simd

// Workspace is the scratch memory of one thread: whoever calls kernels that ask
// for one owns it for that time. About 0.5 MiB, allocated once.
type Workspace struct {
	args  gemmArgs
	packA []float32 // a block of A, tile by tile
	packB []float32 // a panel of B
	tail  []float32 // tiles of C whose columns don't all exist
}

// NewWorkspace allocates scratch memory that fits these kernels.
func (k *Kernels) NewWorkspace() *Workspace {
	// One allocation: the buffers stay aligned to cache lines, since the Go
	// allocator puts large objects on page boundaries.
	sizes := [...]int{blockRows * (blockDepth + rowPad), blockDepth * k.gemm.cols, blockRows * k.gemm.cols}
	total := 0
	for _, n := range sizes {
		total += n
	}
	all := make([]float32, total)
	take := func(n int) []float32 {
		s := all[:n:n]
		all = all[n:]
		return s
	}
	return &Workspace{packA: take(sizes[0]), packB: take(sizes[1]), tail: take(sizes[2])}
}
