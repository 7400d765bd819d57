package trace

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/rendezvous"
)

// far is a store that is reached over a network: each way takes some time, in a
// pattern that differs from call to call and is not symmetric.
type far struct {
	rendezvous.Store
	calls int
}

func (f *far) way() time.Duration {
	f.calls++
	return time.Duration(1+f.calls*7%5) * msec
}

func (f *far) Set(ctx context.Context, key string, v []byte) error {
	time.Sleep(f.way())
	return f.Store.Set(ctx, key, v)
}

func (f *far) Wait(ctx context.Context, keys ...string) error {
	err := f.Store.Wait(ctx, keys...)
	time.Sleep(f.way())
	return err
}

// together runs f for each rank with a recorder whose clock is skewed.
func together(t *testing.T, skew []time.Duration, f func(rank int, s Store, r *Recorder)) {
	t.Helper()
	mem := rendezvous.NewMem()
	defer mem.Close()
	var wg sync.WaitGroup
	for rank, d := range skew {
		r, err := NewRecorder(Options{Rank: rank, Size: len(skew), Buckets: []Bucket{{Bytes: 8}}})
		require.NoError(t, err)
		r.wall += int64(d)
		wg.Go(func() { f(rank, &far{Store: mem, calls: rank}, r) })
	}
	wg.Wait()
}

// Without it ranks of two machines would be shown hours apart, or closer
// together than is known.
func TestClocksAreAlignedWithinTheStatedError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		skew := []time.Duration{0, 3 * time.Hour, -7 * time.Second, 11 * msec}
		together(t, skew, func(rank int, s Store, r *Recorder) {
			require.NoError(t, r.Align(t.Context(), s))
			c := r.clock()
			require.LessOrEqual(t, (c.Offset + skew[rank]).Abs(), c.Error)
			if rank > 0 {
				require.Greater(t, c.Error, time.Duration(0))
				require.LessOrEqual(t, c.Error, 5*msec)
			}
		})
	})
}

// Without it clocks that run at different speeds would drift apart over a long run.
func TestDriftIsInterpolated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const drift = 20 * msec // over the run
		together(t, []time.Duration{0, 0}, func(rank int, s Store, r *Recorder) {
			require.NoError(t, r.Align(t.Context(), s))
			time.Sleep(time.Hour)
			if rank == 1 {
				r.wall += int64(drift)
			}
			require.NoError(t, r.Align(t.Context(), s))
			c := r.clock()
			if rank == 1 {
				require.LessOrEqual(t, (r.offset(time.Hour/2) + drift/2).Abs(), c.Error)
				require.InDelta(t, -1e6*float64(drift)/float64(time.Hour), c.Drift, 1e6*2*float64(c.Error)/float64(time.Hour))
				return
			}
			require.Zero(t, r.offset(time.Hour/2))
		})
	})
}

// Without it the file would lack ranks, or show them at other times than they
// worked at.
func TestCollect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		skew := []time.Duration{0, 3 * time.Hour, -7 * time.Second}
		begin := time.Now().Add(time.Minute)
		var got *Timeline
		together(t, skew, func(rank int, s Store, r *Recorder) {
			require.NoError(t, r.Align(t.Context(), s))
			time.Sleep(time.Until(begin))
			r.Passes(1, begin, msec, 2*msec)
			r.Record(Slice{Track: Comm, Name: "allreduce", Step: 1, Bucket: 0, Ready: r.Since(begin), Start: r.Since(begin), End: r.Since(begin) + msec})
			tl, err := Collect(t.Context(), s, r)
			require.NoError(t, err)
			if rank == 0 {
				got = tl
			} else {
				require.Nil(t, tl)
			}
		})
		require.Len(t, got.Ranks, 3)
		require.Equal(t, []Bucket{{Bytes: 8}}, got.Buckets)
		for i, r := range got.Ranks {
			require.Equal(t, i, r.Rank)
			require.Len(t, r.Slices, 3)
			at := got.Start.Add(r.Slices[0].Start)
			require.LessOrEqual(t, at.Sub(begin).Abs(), r.Clock.Error)
			require.Equal(t, msec, r.Slices[0].End-r.Slices[0].Start)
		}
	})
}

// Without it a rank that is gone would hang the others at the end of a run, and
// what the rest recorded be lost.
func TestCollectWithoutARank(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		together(t, []time.Duration{0, 0, 0}, func(rank int, s Store, r *Recorder) {
			if rank == 2 {
				return
			}
			r.Passes(1, time.Now(), msec, msec)
			tl, err := Collect(ctx, s, r)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.NotContains(t, err.Error(), "\n")
			if rank == 0 {
				require.ErrorContains(t, err, "rank 2")
				require.Len(t, tl.Ranks, 1)
			}
		})
	})
}

// Without it a long timeline would not fit into the store, and be lost whole.
func TestPackKeepsTheNewest(t *testing.T) {
	p := &part{Slices: make([]Slice, 1000)}
	for i := range p.Slices {
		p.Slices[i] = Slice{Step: i, Start: time.Duration(i * i * i)}
	}
	raw, err := pack(p, 4000)
	require.NoError(t, err)
	require.LessOrEqual(t, len(raw), 4000)
	got, err := unpack(raw)
	require.NoError(t, err)
	require.NotEmpty(t, got.Slices)
	require.Equal(t, 999, got.Slices[len(got.Slices)-1].Step)
	require.Equal(t, 1000, got.Dropped+len(got.Slices))
	_, err = pack(&part{}, 10)
	require.Error(t, err)
	_, err = unpack([]byte("nonsense"))
	require.Error(t, err)
}
