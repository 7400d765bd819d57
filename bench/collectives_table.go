package bench

import (
	"fmt"
	"io"
)

// CollectivesHeader writes what stands above rows of nccl-tests' table.
func CollectivesHeader(w io.Writer, backend string, ranks, cores int) error {
	mark := ""
	if cores > 0 && ranks > cores {
		mark = fmt.Sprintf(" (* oversubscribed: %d cores)", cores)
	}
	_, err := fmt.Fprintf(w, "# %s, %d ranks%s; times are of one blocking call on the slowest rank, bandwidths from p50\n"+
		"# %-14s %12s %12s %9s %6s %5s %10s %10s %10s %10s %8s %8s %7s\n"+
		"# %-14s %12s %12s %9s %6s %5s %10s %10s %10s %10s %8s %8s %7s\n", backend, ranks, mark,
		"", "size", "count", "type", "redop", "root", "avg", "p50", "p99", "max", "algbw", "busbw", "#wrong",
		"", "(B)", "(elements)", "", "", "", "(us)", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)", "")
	return err
}

// Write writes r as a line of the table.
func (r *CollectiveRow) Write(w io.Writer) error {
	mark := ' '
	if r.Oversubscribed {
		mark = '*'
	}
	_, err := fmt.Fprintf(w, "%c %-14s %12d %12d %9s %6s %5d %10.1f %10.1f %10.1f %10.1f %8.2f %8.2f %7d\n", mark, r.Collective,
		r.Bytes, r.Count, r.Type, r.Redop, r.Root, r.AvgUS, r.P50US, r.P99US, r.MaxUS, r.AlgBW, r.BusBW, r.Wrong)
	return err
}
