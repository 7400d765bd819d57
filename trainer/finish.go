package trainer

import (
	"context"
	"time"
)

// beat is how often the ranks hear from rank 0 while it works alone: well below
// the time that a collective waits for a rank.
const beat = 5 * time.Second

// finish runs work on rank 0. The other ranks wait for it, however long a disk or
// a long sample takes, and the group stays alive meanwhile: a barrier would run
// into its timeout.
func (r *run) finish(ctx context.Context, work func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	if r.g.Rank == 0 {
		go func() { done <- work(ctx) }()
	}
	over := [1]byte{}
	for over[0] == 0 {
		if r.g.Rank == 0 {
			select {
			case err := <-done:
				if err != nil {
					r.g.Comm.Abort(err)
					return err
				}
				done, over[0] = nil, 1
			case <-time.After(beat):
			}
		}
		if err := r.broadcast(ctx, over[:], "rank 0 has finished"); err != nil {
			if cancel(); r.g.Rank == 0 && done != nil {
				<-done
			}
			return err
		}
	}
	// Who leaves first would look like a failure to those still at work.
	return r.g.Comm.Barrier(ctx)
}
