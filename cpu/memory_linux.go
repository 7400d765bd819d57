package cpu

import "golang.org/x/sys/unix"

// adviseHuge asks for huge pages behind b, which starts and ends on the
// boundary of one. A kernel without them says no, which is fine: it is advice.
func adviseHuge(b []byte) { _ = unix.Madvise(b, unix.MADV_HUGEPAGE) }
