package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"time"

	"github.com/tandem-go/tandem/internal/auth"
	"github.com/tandem-go/tandem/rendezvous"
)

// intrude bothers every port of a running job: the store's and each rank's.
func intrude(ctx context.Context, r round, srv *rendezvous.Server) error {
	addrs := []string{srv.Addr().String()}
	for i := range r.Size {
		v, err := srv.Store().Get(ctx, "ring/1/card/"+strconv.Itoa(i))
		if err != nil {
			return err
		}
		var card struct{ Addrs []string }
		if err := json.Unmarshal(v, &card); err != nil || len(card.Addrs) == 0 {
			return fmt.Errorf("rank %d's addresses are %q: %w", i, v, err)
		}
		addrs = append(addrs, card.Addrs...)
	}
	var errs []error
	for _, a := range addrs {
		if r.What == strangers {
			errs = append(errs, bother(a, r.random()))
		} else {
			errs = append(errs, pose(ctx, r, a))
		}
	}
	return errors.Join(errs...)
}

// bother opens connections that send garbage, nothing, or a byte now and then.
// Those that find the port closed have come after the job's end.
func bother(addr string, rng *rand.Rand) error {
	for i := range 24 {
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err != nil {
			return nil
		}
		switch i % 3 {
		case 0:
			junk := make([]byte, 1+rng.IntN(4000))
			for j := range junk {
				junk[j] = byte(rng.Uint32())
			}
			_, _ = c.Write(junk)
			_ = c.Close()
		case 1: // silent
			time.AfterFunc(time.Second, func() { _ = c.Close() })
		case 2: // slow
			go func() {
				defer c.Close()
				for range 20 {
					if _, err := c.Write([]byte("T")); err != nil {
						return
					}
					time.Sleep(50 * time.Millisecond)
				}
			}()
		}
	}
	return nil
}

// pose tries to get in with a wrong secret, as another job, or as a rank of an
// earlier life of this one. Getting in is the fault.
func pose(ctx context.Context, r round, addr string) error {
	secret := auth.Secret(fmt.Sprintf("secret-%d", r.Seed))
	for _, p := range []struct {
		what       string
		secret     auth.Secret
		job        string
		generation int
	}{{"a wrong secret", "wrong", jobID, 1}, {"no secret", "", jobID, 1}, {"another job", secret, "other", 1}, {"an old generation", secret, jobID, 0}} {
		for _, purpose := range []string{"store", "ring"} {
			var d net.Dialer
			c, err := d.DialContext(ctx, "tcp", addr)
			if err != nil {
				return nil // the job is over
			}
			_, err = auth.Client(c, p.secret, auth.Hello{JobID: p.job, Generation: p.generation, Purpose: purpose, Rank: r.Victims[0]},
				time.Now().Add(5*time.Second))
			_ = c.Close()
			if err == nil {
				return fmt.Errorf("%s was let in as %s at %s", p.what, purpose, addr)
			}
		}
	}
	return nil
}
