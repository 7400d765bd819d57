package ring

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/cpu"
)

// Without it a group would remember every child that it ever had, and with it
// the memory of the child's last buffers: a sweep over bucket layouts fills the
// machine.
func TestClosedChildIsForgotten(t *testing.T) {
	dev, err := cpu.New(&cpu.Options{Threads: 1})
	require.NoError(t, err)
	defer dev.Close()
	world := start(t, 2, Options{Device: dev, Secret: "a secret"})
	children, errs := make([]comm.Communicator, 2), make([]error, 2)
	var wg sync.WaitGroup
	for i, w := range world {
		wg.Go(func() { children[i], errs[i] = w.Split(t.Context(), 0, i) })
	}
	wg.Wait()
	for i, w := range world {
		require.NoError(t, errs[i])
		g := w.(*group)
		require.Len(t, g.children, 1)
		require.NoError(t, children[i].Close())
		require.Empty(t, g.children)
		require.Len(t, g.n.groups, 1)
	}
	for _, w := range world {
		require.NoError(t, w.Close())
	}
}
