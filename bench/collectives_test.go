package bench

import (
	"bytes"
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/comm/inmem"
	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
)

// measured are the rows that rank 0 sees of ranks that wrap turns into others.
func measured(t *testing.T, n int, c CollectivesConfig, wrap func(comm.Communicator) comm.Communicator) []CollectiveRow {
	t.Helper()
	dev, err := cpu.New(&cpu.Options{Threads: 1})
	require.NoError(t, err)
	defer dev.Close()
	all, err := inmem.New(dev, n, nil)
	require.NoError(t, err)
	var wg sync.WaitGroup
	var rows []CollectiveRow
	errs := make([]error, n)
	for i, g := range all {
		wg.Go(func() {
			errs[i] = Collectives(context.Background(), dev, wrap(g), c, func(r CollectiveRow) error {
				if i == 0 {
					rows = append(rows, r)
				}
				return nil
			})
		})
	}
	wg.Wait()
	for i, g := range all {
		require.NoError(t, errs[i])
		require.NoError(t, g.Close())
	}
	return rows
}

func same(g comm.Communicator) comm.Communicator { return g }

// Without it a collective, type, reduction or size could be measured wrongly, or
// right results be called wrong.
func TestCollectives(t *testing.T) {
	for _, n := range []int{1, 2, 3, 4} {
		for _, op := range []comm.Op{comm.Sum, comm.Avg, comm.Min, comm.Max, comm.Prod} {
			for _, out := range []bool{false, true} {
				rows := measured(t, n, CollectivesConfig{Names: CollectiveNames(), Types: dtype.All(), Op: op,
					Bytes: []int{0, 8, 20000}, Time: time.Microsecond, OutOfPlace: out, Cores: 3}, same)
				require.Len(t, rows, len(CollectiveNames())*len(dtype.All())*3)
				for _, r := range rows {
					require.Zero(t, r.Wrong, "%+v", r)
					require.Equal(t, n > 3, r.Oversubscribed)
					require.GreaterOrEqual(t, r.Iters, minCalls)
					require.LessOrEqual(t, r.P50US, r.P99US)
					require.LessOrEqual(t, r.P99US, r.MaxUS)
				}
			}
		}
	}
}

// spoiler adds a wrong element to what rank 1 contributes.
type spoiler struct{ comm.Communicator }

func (s spoiler) AllReduce(st device.Stream, dst, src device.Buffer, t dtype.Type, op comm.Op, tag comm.Tag) error {
	if mem, ok := src.HostBytes(); ok && s.Rank() == 1 && t == dtype.Float32 && len(mem) > 400 {
		putElem(t, mem[400:], 50)
	}
	return s.Communicator.AllReduce(st, dst, src, t, op, tag)
}

// Without it the column of wrong elements could say 0 whatever comes out.
func TestCollectivesNoticeWrongResults(t *testing.T) {
	rows := measured(t, 2, CollectivesConfig{Bytes: []int{4096}, Time: time.Microsecond},
		func(g comm.Communicator) comm.Communicator { return spoiler{g} })
	require.Equal(t, 4, rows[0].Wrong) // on two ranks, before and after
}

// Without it bandwidths could not be held against nccl-tests'.
func TestBusBandwidth(t *testing.T) {
	for _, c := range []struct {
		name string
		n    int
		want float64
	}{{AllReduce, 2, 1}, {AllReduce, 4, 1.5}, {ReduceScatter, 4, 0.75}, {AllGather, 2, 0.5}, {Broadcast, 4, 1}, {SendRecv, 4, 1}} {
		require.Equal(t, c.want, busFactor(c.name, c.n), c)
	}
}

// Without it the columns could drift apart from their headings.
func TestCollectivesTable(t *testing.T) {
	var b bytes.Buffer
	require.NoError(t, CollectivesHeader(&b, "ring", 4, 2))
	r := CollectiveRow{Collective: AllReduce, Type: "float32", Redop: "sum", Root: -1, Ranks: 4, Bytes: 4096, Count: 1024,
		AvgUS: 10, P50US: 9.5, P99US: 20, MaxUS: 30, AlgBW: 0.43, BusBW: 0.65, Oversubscribed: true}
	require.NoError(t, r.Write(&b))
	require.Equal(t, `# ring, 4 ranks (* oversubscribed: 2 cores); times are of one blocking call on the slowest rank, bandwidths from p50
#                        size        count      type  redop  root        avg        p50        p99        max    algbw    busbw  #wrong
#                         (B)   (elements)                              (us)       (us)       (us)       (us)   (GB/s)   (GB/s)        
* allreduce              4096         1024   float32    sum    -1       10.0        9.5       20.0       30.0     0.43     0.65       0
`, b.String())
}
