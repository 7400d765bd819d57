package trace

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"
)

// Store is what Align and Collect need of a store that all ranks share. A
// rendezvous.Store is one.
type Store interface {
	Set(ctx context.Context, key string, value []byte) error
	Get(ctx context.Context, key string) ([]byte, error)
	Wait(ctx context.Context, keys ...string) error
	Delete(ctx context.Context, key string) error
}

// Clock says how a rank's clock relates to rank 0's.
type Clock struct {
	// Offset is rank 0's clock minus this one's, at the last alignment.
	Offset time.Duration `json:"offset"`
	// Error bounds how wrong Offset can be, either way: half of the shortest
	// round trip that was seen. It is what limits a comparison between ranks.
	Error time.Duration `json:"error"`
	// Drift is by how much the offset grew between the first and the last
	// alignment, in parts per million; 0 where there was only one.
	Drift float64 `json:"drift"`
}

// reading is one estimate of the offset.
type reading struct {
	at            time.Duration // on the recorder's clock
	offset, error time.Duration
}

const (
	pings = 16
	// A drift is told from the error of two readings only over some time.
	driftAfter = time.Second
)

// now is this rank's clock in Unix nanoseconds; steps of the system's clock
// since the recorder was made are not in it.
func (r *Recorder) now() int64 { return r.wall + int64(time.Since(r.epoch)) }

// Align estimates this rank's clock against rank 0's. All ranks call it, best
// when they begin and, which Collect does, when they end: times in between are
// interpolated. Each rank in turn exchanges some messages with rank 0 through
// the store and believes the one with the shortest round trip (Cristian's
// algorithm), which bounds the error.
func (r *Recorder) Align(ctx context.Context, s Store) error {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	round := r.rounds
	r.rounds++
	r.mu.Unlock()
	var err error
	best := reading{at: time.Since(r.epoch)}
	if r.opts.Rank == 0 {
		for k := 1; k < r.opts.Size && err == nil; k++ {
			err = r.answer(ctx, s, round, k)
		}
	} else {
		best, err = r.ask(ctx, s, round)
	}
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.clocks) < 2 {
		r.clocks = append(r.clocks, best)
	} else {
		r.clocks[1] = best
	}
	return nil
}

func pingKey(round, rank, i int, what string) string {
	return fmt.Sprintf("trace/clock/%d/%d/%d/%s", round, rank, i, what)
}

// answer tells rank k the time whenever it asks.
func (r *Recorder) answer(ctx context.Context, s Store, round, k int) error {
	for i := range pings {
		ask := pingKey(round, k, i, "ask")
		if err := s.Wait(ctx, ask); err != nil {
			return fmt.Errorf("trace: aligning the clock of rank %d: %w", k, err)
		}
		var raw [8]byte
		binary.LittleEndian.PutUint64(raw[:], uint64(r.now()))
		err := s.Set(ctx, pingKey(round, k, i, "answer"), raw[:])
		if err == nil {
			err = s.Delete(ctx, ask)
		}
		if err != nil {
			return fmt.Errorf("trace: aligning the clock of rank %d: %w", k, err)
		}
	}
	return nil
}

// ask asks rank 0 for the time and keeps the tightest answer.
func (r *Recorder) ask(ctx context.Context, s Store, round int) (best reading, err error) {
	for i := range pings {
		answer := pingKey(round, r.opts.Rank, i, "answer")
		sent := r.now()
		err := s.Set(ctx, pingKey(round, r.opts.Rank, i, "ask"), []byte{1})
		if err == nil {
			err = s.Wait(ctx, answer)
		}
		got := r.now()
		var raw []byte
		if err == nil {
			raw, err = s.Get(ctx, answer)
		}
		if err == nil && len(raw) != 8 {
			err = fmt.Errorf("%d bytes, want 8", len(raw))
		}
		if err == nil {
			err = s.Delete(ctx, answer)
		}
		if err != nil {
			return best, fmt.Errorf("trace: rank %d: asking rank 0 for the time: %w", r.opts.Rank, err)
		}
		half := (got - sent + 1) / 2
		if e := time.Duration(half); i == 0 || e < best.error {
			there := int64(binary.LittleEndian.Uint64(raw))
			best = reading{at: time.Since(r.epoch), offset: time.Duration(there - sent - half), error: e}
		}
	}
	return best, nil
}

// offset is what to add to a time of this rank to get rank 0's: between and
// beyond two readings a straight line, else the better one.
func (r *Recorder) offset(at time.Duration) time.Duration {
	switch len(r.clocks) {
	case 0:
		return 0
	case 1:
		return r.clocks[0].offset
	}
	a, b := r.clocks[0], r.clocks[1]
	span := b.at - a.at
	if span < driftAfter {
		if a.error < b.error {
			return a.offset
		}
		return b.offset
	}
	return a.offset + time.Duration(float64(b.offset-a.offset)*float64(at-a.at)/float64(span))
}

// clock sums up the readings.
func (r *Recorder) clock() Clock {
	if len(r.clocks) == 0 {
		return Clock{}
	}
	last := r.clocks[len(r.clocks)-1]
	c := Clock{Offset: r.offset(last.at), Error: last.error}
	if len(r.clocks) == 1 {
		return c
	}
	first := r.clocks[0]
	span := last.at - first.at
	if span < driftAfter {
		c.Error = min(c.Error, first.error)
		return c
	}
	c.Error = max(c.Error, first.error)
	c.Drift = 1e6 * float64(last.offset-first.offset) / float64(span)
	return c
}
