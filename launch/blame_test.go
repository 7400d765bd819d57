package launch

import (
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Without it the report would name a rank that another took down.
func TestCulprit(t *testing.T) {
	start := time.Now()
	f := func(rank, ms int, sig syscall.Signal, byUs bool) exit {
		o := Outcome{Rank: rank, ExitCode: 1, signal: sig, ByUs: byUs}
		return exit{o, start.Add(time.Duration(ms) * time.Millisecond)}
	}
	for name, tc := range map[string]struct {
		failures []exit
		blame    map[int]int
		want     int // rank
	}{
		"one":                        {[]exit{f(3, 0, 0, false)}, nil, 3},
		"the first":                  {[]exit{f(1, 5, 0, false), f(0, 2, 0, false)}, nil, 0},
		"killed, a little later":     {[]exit{f(1, 5, 0, false), f(2, 9, syscall.SIGKILL, false)}, nil, 2},
		"killed, much later":         {[]exit{f(1, 5, 0, false), f(2, 900, syscall.SIGSEGV, false)}, nil, 1},
		"killed by us":               {[]exit{f(1, 5, 0, false), f(2, 9, syscall.SIGKILL, true), f(3, 6, syscall.SIGTERM, true)}, nil, 1},
		"told, but failed by itself": {[]exit{f(1, 5, 0, false), f(2, 3, 0, true)}, nil, 2},
		"blamed":                     {[]exit{f(0, 5, 0, false), f(1, 20, 0, true)}, map[int]int{0: 1}, 1},
		"blamed, but only stopped":   {[]exit{f(0, 5, 0, false), f(1, 20, syscall.SIGTERM, true)}, map[int]int{0: 1}, 0},
		"blamed, and deaf":           {[]exit{f(0, 5, 0, false), f(1, 9000, syscall.SIGKILL, true)}, map[int]int{0: 1}, 1},
		"blamed, but well":           {[]exit{f(0, 5, 0, false)}, map[int]int{0: 1}, 0},
		"a chain":                    {[]exit{f(0, 5, 0, false), f(1, 6, 0, false), f(2, 7, 0, false)}, map[int]int{0: 1, 1: 2}, 2},
		"only ours":                  {[]exit{f(4, 5, syscall.SIGTERM, true)}, nil, 4},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, tc.want, tc.failures[culprit(tc.failures, tc.blame)].Rank)
		})
	}
	circle := []exit{f(0, 5, 0, false), f(1, 6, 0, false)}
	require.Contains(t, []int{0, 1}, culprit(circle, map[int]int{0: 1, 1: 0}))
}
