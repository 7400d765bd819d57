package launch

import (
	"context"
	"strconv"
	"time"

	"github.com/tandem-go/tandem/rendezvous"
	"golang.org/x/sys/unix"
)

func blameKey(rank int) string { return "launch/blame/" + strconv.Itoa(rank) }

// Blame tells the launcher, before rank exits with an error, that another rank
// was the cause. A rank that dies takes the others with it within milliseconds,
// so the order in which they are seen to end says little.
func Blame(ctx context.Context, s rendezvous.Store, rank, culprit int) error {
	return s.Set(ctx, blameKey(rank), strconv.AppendInt(nil, int64(culprit), 10))
}

// culprit is the index of the failure that caused the others, among those that
// are no consequence of our own signals: whom the others blame, also when it had
// to be killed because it didn't stop, else the first that was killed by a signal,
// else the first.
func culprit(failures []exit, blame map[int]int) int {
	byRank := map[int]int{}
	best := -1
	for i, f := range failures {
		if stoppedByUs(f) {
			if f.signal == unix.SIGKILL { // it didn't answer us either
				byRank[f.Rank] = i
			}
			continue
		}
		byRank[f.Rank] = i
		if best < 0 || before(f, failures[best]) {
			best = i
		}
	}
	if best < 0 {
		return 0
	}
	for range failures { // an accusation may lead to another; a circle ends here
		i, ok := byRank[blameOf(blame, failures[best].Rank)]
		if !ok || i == best {
			break
		}
		best = i
	}
	return best
}

func blameOf(blame map[int]int, rank int) int {
	if c, ok := blame[rank]; ok {
		return c
	}
	return -1
}

// before says whether a is the likelier cause than b.
func before(a, b exit) bool {
	near := a.at.Sub(b.at).Abs() <= settle
	if near && (a.signal != 0) != (b.signal != 0) {
		return a.signal != 0
	}
	return a.at.Before(b.at)
}

// stoppedByUs says that a rank did what we asked of it. One that had already
// begun to exit for its own reasons doesn't count, although it was told, too.
func stoppedByUs(f exit) bool {
	return f.ByUs && (f.signal == unix.SIGTERM || f.signal == unix.SIGINT || f.signal == unix.SIGHUP || f.signal == unix.SIGKILL)
}

// exit is how and when a rank ended.
type exit struct {
	Outcome
	at time.Time
}
