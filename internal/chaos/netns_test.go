//go:build netns

package main

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/internal/netns"
)

// Without it a cut cable, or one that comes back, would be promised for only.
func TestNetnsRounds(t *testing.T) {
	for seed := range uint64(len(netDisturbances)) {
		r, err := draw(seed, netDisturbances, nil)
		require.NoError(t, err)
		t.Run(string(r.What), func(t *testing.T) {
			err := play(context.Background(), r)
			if errors.Is(err, netns.ErrUnsupported) {
				t.Skip(err)
			}
			require.NoError(t, err)
		})
	}
}
