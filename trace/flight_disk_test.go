//go:build linux

package trace

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// Without it a full disk could leave half a record, which would be read as one,
// or replace the record of before with nothing.
func TestFlightFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skip("needs root: ", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, 0) })
	r, err := NewFlightRecorder(FlightOptions{Dir: dir})
	require.NoError(t, err)
	c := r.Communicator("world", []int{0})
	record := func(n int) {
		for range n {
			r.End(r.Queue(&FlightCall{Comm: c, Kind: "allreduce", Bucket: -1, Peer: -1}), false)
		}
	}
	record(10)
	require.NoError(t, r.DumpSignal())
	record(1990) // more than the disk holds
	require.ErrorIs(t, r.DumpError("cause", -1), syscall.ENOSPC)
	f, err := ReadFlight(filepath.Join(dir, FlightName(0)))
	require.NoError(t, err)
	require.Len(t, f.Entries, 10)
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, files, 1, "nothing half-written stays")
}
