package ring

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-go/tandem/rendezvous"
)

// Joining: every rank claims its number and publishes what it is; rank 0 waits
// for all of them, checks that they belong together and publishes the table of
// addresses, or why there is none. All others wait for that one key, so that a
// mistake ends everybody at once.

// card is what a rank publishes.
type card struct {
	Size  int      // of the world, as this rank believes
	Addrs []string // where it listens

	Transport string    // Options.Transport
	Shm       *hostCard `json:",omitempty"` // nil if it shares no memory
	NoShm     string    `json:",omitempty"` // why, if that is not by choice
}

// table is what rank 0 publishes.
type table struct {
	Err   string `json:",omitempty"`
	Cards []card `json:",omitempty"`
}

// joinGrace is how much longer the others wait than rank 0, which has more to
// say about who is missing.
const joinGrace = 2 * time.Second

// join exchanges addresses through the store, under a prefix of this
// generation.
func join(ctx context.Context, o *Options, self card) ([]card, error) {
	st := o.keys()
	if err := claim(ctx, st, o, self); err != nil {
		return nil, err
	}
	if o.Rank == 0 {
		return collect(ctx, st, o)
	}
	ctx, cancel := context.WithTimeout(ctx, o.Timeout+joinGrace)
	defer cancel()
	v, err := rendezvous.WaitGet(ctx, st, "table")
	if err != nil {
		return nil, fmt.Errorf("ring: rank %d waits for rank 0 to gather all %d ranks: %w", o.Rank, o.Size, err)
	}
	var t table
	if err := json.Unmarshal(v, &t); err != nil {
		return nil, fmt.Errorf("ring: rank %d reads the table of addresses: %w", o.Rank, err)
	}
	switch {
	case t.Err != "":
		return nil, fmt.Errorf("ring: rank %d: %w", o.Rank, joinError(t.Err))
	case len(t.Cards) != o.Size:
		return nil, fmt.Errorf("ring: rank %d: world size is %d here, %d on rank 0", o.Rank, o.Size, len(t.Cards))
	}
	return t.Cards, nil
}

// keys is the part of the store that belongs to this generation.
func (o *Options) keys() rendezvous.Store {
	return rendezvous.Prefix(o.Store, fmt.Sprintf("ring/%d/", o.Generation))
}

// together runs f, which connects this rank, and ends it when another rank
// could not connect: whoever fails leaves a note in the store.
func together(ctx context.Context, o *Options, f func(context.Context) error) error {
	st := o.keys()
	watch, stop := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if v, err := rendezvous.WaitGet(watch, st, "failed"); err == nil {
			stop(joinError(v))
		}
	}()
	err := f(watch)
	if err != nil && watch.Err() == nil {
		c, cancel := context.WithTimeout(context.WithoutCancel(ctx), joinGrace)
		_, _ = st.CompareAndSet(c, "failed", nil, []byte(err.Error())) // the error is what counts
		cancel()
	}
	stop(nil)
	<-done
	return err
}

// claim takes this rank's number and publishes its card.
func claim(ctx context.Context, st rendezvous.Store, o *Options, self card) error {
	n, err := st.Add(ctx, "claim/"+strconv.Itoa(o.Rank), 1)
	if err != nil {
		return fmt.Errorf("ring: rank %d: %w", o.Rank, err)
	}
	if n > 1 {
		return refuse(ctx, st, fmt.Sprintf("rank %d exists %d times (%s is the last): start every rank once", o.Rank, n, strings.Join(self.Addrs, ", ")))
	}
	v, err := json.Marshal(self)
	if err != nil {
		return fmt.Errorf("ring: rank %d: %w", o.Rank, err)
	}
	if err := st.Set(ctx, cardKey(o.Rank), v); err != nil {
		return fmt.Errorf("ring: rank %d publishes its address: %w", o.Rank, err)
	}
	// Rank 0 knows only the ranks of its own, smaller world.
	zero, err := st.Get(ctx, cardKey(0))
	var c card
	if err == nil && json.Unmarshal(zero, &c) == nil && o.Rank >= c.Size {
		return refuse(ctx, st, fmt.Sprintf("rank %d of a world of %d, but on rank 0 the world size is %d", o.Rank, o.Size, c.Size))
	}
	return nil
}

func cardKey(rank int) string { return "card/" + strconv.Itoa(rank) }

// refuse publishes why there will be no group, unless there is one already.
func refuse(ctx context.Context, st rendezvous.Store, why string) error {
	v, err := json.Marshal(table{Err: why})
	if err == nil {
		_, err = st.CompareAndSet(ctx, "table", nil, v)
	}
	return errors.Join(fmt.Errorf("ring: %w", joinError(why)), err)
}

// joinError is a reason that came through the store. A missing rank is a
// timeout wherever it is reported.
type joinError string

func (e joinError) Error() string { return string(e) }

// Is makes a timeout on rank 0 one on all ranks.
func (e joinError) Is(target error) bool {
	return target == context.DeadlineExceeded && strings.HasSuffix(string(e), context.DeadlineExceeded.Error())
}

// collect is rank 0's part.
func collect(ctx context.Context, st rendezvous.Store, o *Options) ([]card, error) {
	wait, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	cards := make([]card, o.Size)
	for i := range cards {
		v, err := waitCard(wait, st, i)
		if err != nil {
			return nil, absent(ctx, st, o, err)
		}
		if err := json.Unmarshal(v, &cards[i]); err != nil {
			return nil, refuse(ctx, st, fmt.Sprintf("rank %d published nonsense: %v", i, err))
		}
		if cards[i].Size != o.Size {
			return nil, refuse(ctx, st, fmt.Sprintf("world size is %d on rank 0, %d on rank %d", o.Size, cards[i].Size, i))
		}
	}
	refusal, note := agreeTransport(cards)
	if refusal != "" {
		return nil, refuse(ctx, st, refusal)
	}
	if note != "" {
		o.Logger.Info("ranks talk over TCP", "why", note)
	}
	v, err := json.Marshal(table{Cards: cards})
	if err != nil {
		return nil, fmt.Errorf("ring: rank 0: %w", err)
	}
	have, err := st.CompareAndSet(ctx, "table", nil, v)
	if err != nil {
		return nil, fmt.Errorf("ring: rank 0 publishes the table of addresses: %w", err)
	}
	var t table
	if err := json.Unmarshal(have, &t); err != nil || t.Err != "" {
		return nil, fmt.Errorf("ring: rank 0: %w", errors.Join(joinError(t.Err), err))
	}
	return cards, nil
}

// waitCard waits for one rank's card, or for somebody's refusal.
func waitCard(ctx context.Context, st rendezvous.Store, rank int) ([]byte, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	refused := make(chan struct{})
	go func() {
		defer close(refused)
		if v, err := rendezvous.WaitGet(ctx, st, "table"); err == nil {
			var t table
			_ = json.Unmarshal(v, &t)
			cancel(joinError(t.Err))
		}
	}()
	v, err := rendezvous.WaitGet(ctx, st, cardKey(rank))
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	cancel(nil)
	<-refused
	return v, err
}

// absent says which ranks never came, to all that did.
func absent(ctx context.Context, st rendezvous.Store, o *Options, err error) error {
	if je := joinError(""); errors.As(err, &je) {
		return fmt.Errorf("ring: rank 0: %w", je)
	}
	var missing []string
	for i := range o.Size {
		c, cancel := context.WithTimeout(context.WithoutCancel(ctx), joinGrace)
		if _, err := st.Get(c, cardKey(i)); errors.Is(err, rendezvous.ErrNotFound) {
			missing = append(missing, strconv.Itoa(i))
		}
		cancel()
	}
	if len(missing) == 0 {
		return fmt.Errorf("ring: rank 0 gathers %d ranks: %w", o.Size, err)
	}
	c, cancel := context.WithTimeout(context.WithoutCancel(ctx), joinGrace)
	defer cancel()
	why := fmt.Sprintf("ranks %s of %d did not come within %v: %v", strings.Join(missing, ", "), o.Size, o.Timeout, context.Cause(ctx))
	if ctx.Err() == nil {
		why = fmt.Sprintf("ranks %s of %d did not come within %v: %v", strings.Join(missing, ", "), o.Size, o.Timeout, context.DeadlineExceeded)
	}
	return refuse(c, st, why)
}
