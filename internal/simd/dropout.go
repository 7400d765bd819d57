package simd

import "github.com/tandem-go/tandem/device"

// Dropout computes y = x/(1−p) where an element is kept and 0 where it is
// dropped. Element j of x is element i0+j of the sample that key belongs to
// (device.DropoutKey), and device.DropoutBits decides, so the outcome is
// the same on every device and however a sample is cut. p is in [0, 1).
// y may be x.
func (k *Kernels) Dropout(y, x []float32, key uint64, i0 int, p float32) {
	k.vec.dropout(y, x[:len(y)], key, i0, device.DropoutThreshold(p), 1-p)
}

func dropoutGo(y, x []float32, key uint64, i0 int, threshold uint32, keep float32) {
	for j := range y {
		v := x[j] / keep
		if device.DropoutBits(key, i0+j) < threshold {
			v = 0
		}
		y[j] = v
	}
}
