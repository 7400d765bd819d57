package simd

// Workspace is the scratch memory of one thread: whoever calls kernels that ask
// for one owns it for that time. About 0.9 MiB, allocated once.
type Workspace struct {
	args  gemmArgs
	packA []float32 // a block of A, tile by tile
	packB []float32 // a panel of B
	tail  []float32 // tiles of C whose columns don't all exist
	attentionScratch
}

// NewWorkspace allocates scratch memory that fits these kernels.
func (k *Kernels) NewWorkspace() *Workspace {
	w := &Workspace{}
	const scores = attentionBlock * scoreStride
	buffers := []struct {
		s *[]float32
		n int
	}{
		{&w.packA, blockRows * (blockDepth + rowPad)}, {&w.packB, blockDepth * k.gemm.cols}, {&w.tail, blockRows * k.gemm.cols},
		{&w.scores, scores}, {&w.grads, scores},
		{&w.max, attentionBlock}, {&w.newMax, attentionBlock}, {&w.sum, attentionBlock}, {&w.partial, attentionBlock},
	}
	total := 0
	for _, b := range buffers {
		total += b.n
	}
	// One allocation: the buffers stay aligned to cache lines, since the Go
	// allocator puts large objects on page boundaries.
	all := make([]float32, total)
	for _, b := range buffers {
		*b.s, all = all[:b.n:b.n], all[b.n:]
	}
	return w
}
