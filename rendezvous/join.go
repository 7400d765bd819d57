package rendezvous

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

var (
	// ErrDuplicateRank is in the chain when two processes claim one rank.
	ErrDuplicateRank = errors.New("rendezvous: two processes claim the same rank")
	// ErrRank is in the chain when a rank is not in [0, world size).
	ErrRank = errors.New("rendezvous: rank out of range")
	// ErrWorldSize is in the chain when ranks disagree on the world size.
	ErrWorldSize = errors.New("rendezvous: ranks disagree on the world size")
)

// AbsentError says who did not come to a barrier or a join in time. It wraps
// the end of the context.
type AbsentError struct {
	What    string // "barrier \"x\"" or "join"
	Rank    int    // who reports
	World   int
	Absent  []int // ascending
	Elapsed time.Duration
	Err     error
}

func (e *AbsentError) Error() string {
	return fmt.Sprintf("%s on rank %d: %s of %d did not come within %v: %v",
		e.What, e.Rank, rankList(e.Absent), e.World, e.Elapsed.Round(time.Millisecond), e.Err)
}

func (e *AbsentError) Unwrap() error { return e.Err }

// rankList is "rank 3", "ranks 1, 4" or, for many, "9 ranks (1, 4, … )".
func rankList(ranks []int) string {
	const most = 16
	s := make([]string, 0, most)
	for _, r := range ranks[:min(len(ranks), most)] {
		s = append(s, strconv.Itoa(r))
	}
	switch {
	case len(ranks) == 1:
		return "rank " + s[0]
	case len(ranks) > most:
		return fmt.Sprintf("%d ranks (%s, …)", len(ranks), strings.Join(s, ", "))
	}
	return "ranks " + strings.Join(s, ", ")
}

// reportTime is for what is said about a failure after its context has ended.
const reportTime = 2 * time.Second

// afterwards is a context for reporting on one that has ended.
func afterwards(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), reportTime)
}

// Barrier returns when all ranks of the world have called it with this name.
// A name may be used again and again, in the same order on all ranks. When ctx
// ends first the error is an *AbsentError; the name is then spent.
func Barrier(ctx context.Context, s Store, name string, rank, world int) error {
	if rank < 0 || rank >= world {
		return fmt.Errorf("%w: barrier %q: rank %d, world size %d", ErrRank, name, rank, world)
	}
	start := time.Now()
	base := "barrier/" + name + "/"
	what := fmt.Sprintf("barrier %q", name)
	round, err := s.Add(ctx, base+"rank/"+strconv.Itoa(rank), 1)
	if err != nil {
		return fmt.Errorf("%s on rank %d: %w", what, rank, err)
	}
	n, err := s.Add(ctx, base+"count", 1)
	if err != nil {
		return fmt.Errorf("%s on rank %d: %w", what, rank, err)
	}
	done := func(round int64) string { return base + "done/" + strconv.FormatInt(round, 10) }
	if n == round*int64(world) { // the last: all others have left the round before
		if err := s.Set(ctx, done(round), nil); err != nil {
			return fmt.Errorf("%s on rank %d: %w", what, rank, err)
		}
		return s.Delete(ctx, done(round-1))
	}
	err = s.Wait(ctx, done(round))
	if err == nil || ctx.Err() == nil {
		if err != nil {
			err = fmt.Errorf("%s on rank %d: %w", what, rank, err)
		}
		return err
	}
	return absent(ctx, s, &AbsentError{What: what, Rank: rank, World: world, Elapsed: time.Since(start), Err: err},
		func(ctx context.Context, r int) (bool, error) {
			n, err := s.Add(ctx, base+"rank/"+strconv.Itoa(r), 0)
			return n >= round, err
		})
}

// absent fills e with the ranks for which came is false. All are there when
// the last one came just after ctx had ended; then, and when the store can't
// be asked, the plain error is returned.
func absent(ctx context.Context, s Store, e *AbsentError, came func(context.Context, int) (bool, error)) error {
	ctx, cancel := afterwards(ctx)
	defer cancel()
	for r := range e.World {
		ok, err := came(ctx, r)
		if err != nil {
			return fmt.Errorf("%s on rank %d: %w (who is absent can't be told: %v)", e.What, e.Rank, e.Err, err)
		}
		if !ok {
			e.Absent = append(e.Absent, r)
		}
	}
	if len(e.Absent) == 0 {
		return fmt.Errorf("%s on rank %d: all %d ranks came, too late: %w", e.What, e.Rank, e.World, e.Err)
	}
	return e
}

const (
	joinWorld = "join/world"
	joinRank  = "join/rank/"
	joinCount = "join/count"
	joinDone  = "join/done" // joinOK, or the error of all
	joinOK    = "ok"
)

// Join returns when every rank of the world has joined once. A duplicate rank,
// a rank out of range or unequal world sizes are an immediate error on every
// rank that has joined or joins later; a process that comes to a complete
// group gets the error alone. Absent ranks are an *AbsentError when ctx ends.
//
// A store serves one Join; give each attempt its own Prefix.
func Join(ctx context.Context, s Store, rank, world int) error {
	start := time.Now()
	if err := claim(ctx, s, rank, world); err != nil {
		return fmt.Errorf("join as rank %d of %d: %w", rank, world, err)
	}
	v, err := WaitGet(ctx, s, joinDone)
	switch {
	case err == nil && string(v) == joinOK:
		return nil
	case err == nil:
		return fmt.Errorf("join as rank %d of %d: %w", rank, world, decodeJoin(v))
	case ctx.Err() == nil:
		return fmt.Errorf("join as rank %d of %d: %w", rank, world, err)
	}
	return absent(ctx, s, &AbsentError{What: "join", Rank: rank, World: world, Elapsed: time.Since(start), Err: err},
		func(ctx context.Context, r int) (bool, error) {
			_, err := s.Get(ctx, joinRank+strconv.Itoa(r))
			if errors.Is(err, ErrNotFound) {
				return false, nil
			}
			return err == nil, err
		})
}

// claim registers this rank, and tells all others what is wrong with it.
func claim(ctx context.Context, s Store, rank, world int) error {
	me := identity()
	w, err := s.CompareAndSet(ctx, joinWorld, nil, []byte(strconv.Itoa(world)))
	if err != nil {
		return err
	}
	if string(w) != strconv.Itoa(world) {
		return broadcast(ctx, s, ErrWorldSize, fmt.Sprintf("rank %d (%s) has %d, the first rank to come has %s", rank, me, world, w))
	}
	if rank < 0 || rank >= world {
		return broadcast(ctx, s, ErrRank, fmt.Sprintf("rank %d (%s), world size %d", rank, me, world))
	}
	var token [8]byte
	_, _ = rand.Read(token[:])
	mine := me + " " + hex.EncodeToString(token[:])
	got, err := s.CompareAndSet(ctx, joinRank+strconv.Itoa(rank), nil, []byte(mine))
	if err != nil {
		return err
	}
	if string(got) != mine {
		other, _, _ := strings.Cut(string(got), " ")
		return broadcast(ctx, s, ErrDuplicateRank, fmt.Sprintf("rank %d: %s and %s", rank, other, me))
	}
	n, err := s.Add(ctx, joinCount, 1)
	if err != nil || n < int64(world) {
		return err
	}
	_, err = s.CompareAndSet(ctx, joinDone, nil, []byte(joinOK))
	return err
}

// identity names this process to people: host and pid, without blanks.
func identity() string {
	h, err := os.Hostname()
	if err != nil {
		h = "?"
	}
	return fmt.Sprintf("%s:%d", strings.ReplaceAll(h, " ", "_"), os.Getpid())
}

var joinErrors = []error{ErrDuplicateRank, ErrRank, ErrWorldSize}

// broadcast makes text the end of everyone's join, unless it has succeeded or
// failed already, and returns it.
func broadcast(ctx context.Context, s Store, kind error, text string) error {
	v := fmt.Appendf(nil, "%d %s", slices.Index(joinErrors, kind), text)
	if _, err := s.CompareAndSet(ctx, joinDone, nil, v); err != nil {
		return fmt.Errorf("%w: %s (the others don't know: %w)", kind, text, err)
	}
	return fmt.Errorf("%w: %s", kind, text)
}

func decodeJoin(v []byte) error {
	kind, text, _ := strings.Cut(string(v), " ")
	k, err := strconv.Atoi(kind)
	if err != nil || k < 0 || k >= len(joinErrors) {
		return fmt.Errorf("rendezvous: malformed entry %q", v)
	}
	return fmt.Errorf("%w: %s", joinErrors[k], text)
}
