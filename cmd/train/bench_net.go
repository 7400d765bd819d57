package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/tandem-go/tandem/internal/netns"
	"github.com/tandem-go/tandem/launch"
)

var errOneRank = errors.New("--netns: a network needs at least --nproc 2")

// network puts the ranks that l will start into network namespaces of their
// own, behind links of a rate, and the store for them into the first.
func network(ctx context.Context, nproc int, rate string, l *launch.Options) (down func() error, err error) {
	if nproc < 2 {
		return nil, errOneRank
	}
	n, err := netns.Up(ctx, netns.Options{Ranks: nproc, Rate: rate})
	if err != nil {
		return nil, fmt.Errorf("--netns: %w", err)
	}
	if l.Listener, err = n.Listen(ctx, 0); err != nil {
		return nil, errors.Join(err, n.Down())
	}
	l.Wrap = func(rank int, argv []string) []string {
		return n.Command(rank, append([]string{"env", "TANDEM_HOST=" + n.Addr(rank)}, argv...))
	}
	return n.Down, nil
}
