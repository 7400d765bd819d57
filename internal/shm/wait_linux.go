//go:build linux && (amd64 || arm64)

package shm

import (
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	futexWait = 0
	futexWake = 1
)

// Word is the 32-bit word at byte off of b, a multiple of 4.
func Word(b []byte, off int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&b[off : off+4][0]))
}

// Wait sleeps while w holds old, until Wake, or for limit. It may return for no
// reason.
func Wait(w *atomic.Uint32, old uint32, limit time.Duration) {
	ts := unix.NsecToTimespec(int64(limit))
	_, _, _ = syscall.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(w)), futexWait, uintptr(old), uintptr(unsafe.Pointer(&ts)), 0, 0)
}

// Wake wakes all who wait for w, in all processes.
func Wake(w *atomic.Uint32) {
	_, _, _ = syscall.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(w)), futexWake, 1<<30, 0, 0, 0)
}

// Yield lets another thread have this core.
func Yield() { _, _, _ = syscall.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// probeWait checks that both calls are allowed here.
func probeWait() error {
	var w atomic.Uint32
	_, _, e := syscall.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&w)), futexWake, 1, 0, 0, 0)
	if e != 0 {
		return e
	}
	return nil
}
