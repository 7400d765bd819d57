package ddp

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/ddp/hook"
	"github.com/tandem-go/tandem/optim"
	"github.com/tandem-go/tandem/overlap"
)

// tuned trains 60 steps by a clock that says how long a step took in a layout of
// so many buckets, on a rank, and returns rank 0's trials and all parameters.
func tuned(t *testing.T, g group, cost func(buckets, rank, step int) time.Duration) (trials []Trial, params [][][]float32) {
	params = make([][][]float32, g.ranks)
	chosen := make([]bucket.Caps, g.ranks)
	g.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
		m, d, err := setup(ctx, c, o)
		if err != nil {
			return err
		}
		defer d.Close()
		var now time.Time
		step := 0
		if d.tuner != nil {
			d.tuner.clock = func() time.Time {
				now = now.Add(cost(len(d.Layout().Buckets), rank, step))
				return now
			}
		}
		for ; step < 60; step++ {
			if step == 17 { // a step without communication says nothing of caps
				d.SetSchedule(overlap.NoOverlap)
			}
			if err := errors.Join(m.feed(step, rank*batch), d.Step(ctx)); err != nil {
				return err
			}
			d.SetSchedule(overlap.Normal)
		}
		if err := d.Sync(ctx); err != nil {
			return err
		}
		require.True(t, d.Tuned())
		chosen[rank], params[rank] = d.Caps(), snapshot(d.ValueGrads())
		if rank == 0 {
			trials = d.Trials()
		}
		return nil
	})
	for rank := range chosen {
		require.Equal(t, chosen[0], chosen[rank])
		require.Equal(t, params[0], params[rank])
	}
	for _, x := range trials {
		if x.Chosen {
			require.Equal(t, x.Caps, chosen[0])
		}
	}
	return trials, params
}

// candidates give 1, 3, 4 and 2 buckets; the default has 4.
var candidates = []bucket.Caps{
	bucket.One(), {First: 1, Cap: []int{300}, Last: 1000}, bucket.Each(), {First: 1, Cap: []int{1 << 20}, Last: 1 << 20},
}

func chosen(trials []Trial) (c Trial) {
	for _, x := range trials {
		if x.Chosen {
			c = x
		}
	}
	return c
}

// Without it the search could settle on something slow, leave ranks in different
// layouts, or change what is learned.
func TestAutotuneFindsTheFastest(t *testing.T) {
	for _, g := range []group{{ranks: 1}, {ranks: 4}, {ranks: 3, ring: true}} {
		g.opts = Options{Optimizer: optim.AdamW{}, Caps: bucket.Each(), CheckParams: 1}
		_, want := tuned(t, g, nil)
		g.opts.Autotune = &Autotune{Candidates: candidates, Steps: 3}
		for fastest := 1; fastest <= 4; fastest++ {
			trials, got := tuned(t, g, func(buckets, rank, step int) time.Duration {
				d := time.Duration(max(fastest-buckets, buckets-fastest)) * time.Millisecond
				if step%3 == 0 && step < 17 {
					d += time.Second // the first step of another turn, which isn't timed
				}
				return d + 10*time.Millisecond + time.Duration(rank)*time.Microsecond
			})
			require.Len(t, trials, 4)
			require.Equal(t, 4, trials[0].Buckets, "the default is the first")
			require.Equal(t, fastest, chosen(trials).Buckets, "%+v", trials)
			if !g.ring { // where the order of sums doesn't depend on buckets
				require.Equal(t, want, got)
			}
		}
	}
}

// Without it the search could make a run slower than without it: what isn't
// faster by more than the noise, on the slowest rank, is not chosen.
func TestAutotuneKeepsTheDefault(t *testing.T) {
	g := group{ranks: 3, opts: Options{Optimizer: optim.SGD{}, Caps: bucket.Each(), Autotune: &Autotune{Candidates: candidates, Steps: 4}}}
	for name, cost := range map[string]func(buckets, rank, step int) time.Duration{
		"noise": func(buckets, _, step int) time.Duration {
			if buckets == 4 {
				return time.Duration(10+step%3) * time.Millisecond // 11 in the middle
			}
			return 10700 * time.Microsecond
		},
		"a slow rank": func(buckets, rank, _ int) time.Duration {
			if buckets < 4 && rank == 2 {
				return 11 * time.Millisecond
			}
			return 9*time.Millisecond + time.Duration(buckets)*time.Millisecond/4
		},
	} {
		trials, _ := tuned(t, g, cost)
		require.Equal(t, 4, chosen(trials).Buckets, "%s: %+v", name, trials)
	}
}

// Without it what the user has set would be overruled.
func TestAutotuneLeavesWhatIsSet(t *testing.T) {
	base := bucket.Caps{First: 100, Cap: []int{100}, Last: 100}
	for _, c := range variants(bucket.Caps{Cap: []int{7}, Last: 3}, base) {
		require.Equal(t, []int{7}, c.Cap)
		require.Equal(t, 3, c.Last)
	}
	caps := map[int]bool{}
	for _, c := range variants(bucket.Caps{First: 5}, base) {
		require.Equal(t, 5, c.First)
		require.Contains(t, []int{c.Cap[0], c.Cap[0] / 4}, c.Last)
		caps[c.Cap[0]] = true
	}
	require.Equal(t, map[int]bool{25: true, 50: true, 100: true, 200: true, 400: true}, caps)
	for want, o := range map[string]Options{
		"with a Hook": {Autotune: &Autotune{}, Hook: hook.BF16{}}, "Steps is 1": {Autotune: &Autotune{Steps: 1}},
	} {
		_, err := o.validate()
		require.ErrorContains(t, err, want)
	}
}

// Without it nobody could see what the search saw.
func TestWriteTrials(t *testing.T) {
	var b bytes.Buffer
	require.NoError(t, WriteTrials(&b, []Trial{{Caps: bucket.Caps{First: 1, Cap: []int{2, 3}, Last: 4}, Buckets: 5, Steps: 6, Median: 7500 * time.Microsecond, Chosen: true}}))
	require.Equal(t, "first,cap,last,buckets,steps,median_ms,chosen\n1,[2 3],4,5,6,7.500,true\n", b.String())
}
