package rendezvous

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// all runs f for the given ranks at once and returns their errors.
func all(ranks []int, f func(rank int) error) []error {
	errs := make([]error, len(ranks))
	var wg sync.WaitGroup
	for i, r := range ranks {
		wg.Go(func() { errs[i] = f(r) })
	}
	wg.Wait()
	return errs
}

// Without it a rank could leave a barrier before another has come to it.
func TestBarrier(t *testing.T) {
	ctx := testContext(t)
	s := NewMem()
	var mu sync.Mutex
	inside := map[int]int{}
	for _, err := range all([]int{0, 1, 2, 3}, func(r int) error {
		for round := range 20 {
			mu.Lock()
			inside[round]++
			mu.Unlock()
			if err := Barrier(ctx, s, "b", r, 4); err != nil {
				return err
			}
			mu.Lock()
			n := inside[round]
			mu.Unlock()
			if n != 4 {
				t.Errorf("rank %d left round %d after %d ranks had come", r, round, n)
			}
		}
		return nil
	}) {
		require.NoError(t, err)
	}
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	require.Len(t, s.t.values, 4+1+1, "counters and one mark; older marks are deleted")
}

// Without it a hang would name nobody.
func TestBarrierNamesTheAbsent(t *testing.T) {
	s := NewMem()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer cancel()
	for _, err := range all([]int{0, 2}, func(r int) error { return Barrier(ctx, s, "b", r, 4) }) {
		var a *AbsentError
		require.ErrorAs(t, err, &a)
		require.Equal(t, []int{1, 3}, a.Absent)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "ranks 1, 3 of 4")
	}
	require.ErrorIs(t, Barrier(context.Background(), s, "b", 4, 4), ErrRank)
}

// Without it a job could start with the wrong ranks, or fail without saying why.
func TestJoin(t *testing.T) {
	type who struct{ rank, world int }
	for name, tc := range map[string]struct {
		ranks []who
		want  error
		text  string
	}{
		"complete":  {[]who{{0, 3}, {1, 3}, {2, 3}}, nil, ""},
		"alone":     {[]who{{0, 1}}, nil, ""},
		"duplicate": {[]who{{0, 3}, {1, 3}, {1, 3}}, ErrDuplicateRank, "rank 1: "},
		"too large": {[]who{{0, 3}, {1, 3}, {3, 3}}, ErrRank, "rank 3 "},
		"negative":  {[]who{{0, 2}, {-1, 2}}, ErrRank, "rank -1 "},
		"unequal":   {[]who{{0, 3}, {1, 3}, {2, 4}}, ErrWorldSize, "has"},
	} {
		t.Run(name, func(t *testing.T) {
			s := NewMem()
			idx := make([]int, len(tc.ranks))
			for i := range idx {
				idx[i] = i
			}
			for _, err := range all(idx, func(i int) error {
				return Join(testContext(t), s, tc.ranks[i].rank, tc.ranks[i].world)
			}) {
				if tc.want == nil {
					require.NoError(t, err)
					continue
				}
				require.ErrorIs(t, err, tc.want)
				require.ErrorContains(t, err, tc.text)
			}
		})
	}
}

// Without it a missing rank would be a hang, and a stray process could bring a
// running job down.
func TestJoinAbsentAndLate(t *testing.T) {
	s := NewMem()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer cancel()
	for _, err := range all([]int{0, 2}, func(r int) error { return Join(ctx, s, r, 3) }) {
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "rank 1 of 3")
	}

	s = NewMem()
	for _, err := range all([]int{0, 1}, func(r int) error { return Join(testContext(t), s, r, 2) }) {
		require.NoError(t, err)
	}
	require.ErrorIs(t, Join(testContext(t), s, 1, 2), ErrDuplicateRank)
	v, err := s.Get(testContext(t), joinDone)
	require.NoError(t, err)
	require.Equal(t, joinOK, string(v))
}
