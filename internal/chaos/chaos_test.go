package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if v := os.Getenv(workerEnv); v != "" {
		if err := work(v, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "chaos: rank:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// Without it the promises about failures would be tested in one process only,
// where nobody is ever killed or stopped.
func TestRounds(t *testing.T) {
	seen := map[disturbance]bool{}
	for seed := uint64(1000); len(seen) < len(disturbances)-1; seed++ {
		r, err := draw(seed, disturbances, nil)
		require.NoError(t, err)
		if seen[r.What] {
			continue
		}
		seen[r.What] = true
		if slow := r.What == pauseLong || r.What == skip || r.What == killJoin; slow && testing.Short() {
			continue
		}
		t.Run(string(r.What), func(t *testing.T) {
			defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
			require.NoError(t, play(context.Background(), r))
		})
	}
}

// Without it a failed round could not be repeated.
func TestDrawIsDeterministic(t *testing.T) {
	only := regexp.MustCompile("^pause")
	for seed := range uint64(200) {
		a, err := draw(seed, disturbances, only)
		require.NoError(t, err)
		b, err := draw(seed, disturbances, only)
		require.NoError(t, err)
		require.Equal(t, a, b)
		require.Regexp(t, only, string(a.What))
		require.Less(t, a.Victims[0], a.Size)
		require.Less(t, a.Bucket, len(a.Buckets))
	}
	_, err := draw(1, disturbances, regexp.MustCompile("x"))
	require.Error(t, err)
}

// Without it the referee could let everything pass.
func TestJudge(t *testing.T) {
	r := round{What: kill, Size: 3, Victims: []int{1}}
	ranks := func(change func(all []*rank)) []*rank {
		all := []*rank{{cmd: &exec.Cmd{}}, {cmd: &exec.Cmd{}, silent: true}, {cmd: &exec.Cmd{}}}
		for i, k := range all {
			k.said = report{Rank: i, Culprit: 1, Seq: 7, Bucket: 2, Op: "allreduce", Err: "rank 1 died"}
		}
		change(all)
		return all
	}
	require.NoError(t, judge(r, ranks(func([]*rank) {})))
	for name, change := range map[string]func(all []*rank){
		"hung":            func(all []*rank) { all[2].hung = true },
		"wrong sum":       func(all []*rank) { all[0].said.Wrong = 1 },
		"leak":            func(all []*rank) { all[0].said.Left = "3 goroutines" },
		"other seq":       func(all []*rank) { all[2].said.Seq = 8 },
		"other bucket":    func(all []*rank) { all[2].said.Bucket = 3 },
		"other culprit":   func(all []*rank) { all[0].said.Culprit, all[2].said.Culprit = 0, 0 },
		"did not notice":  func(all []*rank) { all[0].said = report{Done: true} },
		"died without it": func(all []*rank) { all[0].silent = true },
	} {
		require.Error(t, judge(r, ranks(change)), name)
	}
}
