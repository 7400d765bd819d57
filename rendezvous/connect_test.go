package rendezvous

import (
	"context"
	"errors"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func freePort(t *testing.T) int {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	return ln.Addr().(*net.TCPAddr).Port
}

func testEnv(rank, world, port int) Env {
	return Env{Rank: rank, WorldSize: world, LocalRank: rank, LocalWorldSize: world, MasterAddr: "127.0.0.1", MasterPort: port, Source: SourceTorch}
}

// Without it ranks would not find one another, or rank 0 would take the store
// away while others read.
func TestConnect(t *testing.T) {
	port := freePort(t)
	for _, err := range all([]int{0, 1, 2}, func(r int) error {
		c, err := Connect(testContext(t), testEnv(r, 3, port), nil)
		if err != nil {
			return err
		}
		if r == 0 {
			err = c.Store.Set(testContext(t), "x", []byte("v"))
		} else {
			time.Sleep(20 * time.Millisecond)
			_, err = WaitGet(testContext(t), c.Store, "x")
		}
		return errors.Join(err, c.Close())
	}) {
		require.NoError(t, err)
	}
}

// Without it a launcher's store would be looked for in rank 0.
func TestConnectHosted(t *testing.T) {
	s := startServer(t, ServerOptions{JobID: "j", Generation: 1, Secret: "s"})
	for _, err := range all([]int{0, 1}, func(r int) error {
		e := testEnv(r, 2, s.Addr().(*net.TCPAddr).Port)
		e.Hosted, e.JobID, e.Generation, e.Secret = true, "j", 1, "s"
		c, err := Connect(testContext(t), e, nil)
		if err != nil {
			return err
		}
		return c.Close()
	}) {
		require.NoError(t, err)
	}
}

// Without it a world of one would open sockets.
func TestConnectAlone(t *testing.T) {
	c, err := Connect(testContext(t), Env{WorldSize: 1, LocalWorldSize: 1}, nil)
	require.NoError(t, err)
	require.NoError(t, c.Store.Set(testContext(t), "k", nil))
	require.NoError(t, c.Close())
}

// Without it the ranks that are right would wait for one that is wrong.
func TestConnectTellsAll(t *testing.T) {
	port := freePort(t)
	worlds := []int{3, 3, 3}
	ranks := []int{0, 1, 3}
	for _, err := range all([]int{0, 1, 2}, func(i int) error {
		if i == 1 { // the others have their verdict by now
			time.Sleep(200 * time.Millisecond)
		}
		_, err := Connect(testContext(t), testEnv(ranks[i], worlds[i], port), nil)
		return err
	}) {
		require.ErrorIs(t, err, ErrRank)
		require.ErrorContains(t, err, "rank 3")
	}
}

// Without it a missing rank would be a hang, or an error without a name.
func TestConnectNamesTheAbsent(t *testing.T) {
	port := freePort(t)
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	for _, err := range all([]int{0, 2}, func(r int) error {
		_, err := Connect(ctx, testEnv(r, 3, port), nil)
		return err
	}) {
		require.ErrorIs(t, err, context.DeadlineExceeded)
		var a *AbsentError
		require.ErrorAs(t, err, &a)
		require.Equal(t, []int{1}, a.Absent)
	}
}

// Without it nobody would learn which port is taken.
func TestConnectPortTaken(t *testing.T) {
	s := startServer(t, ServerOptions{})
	_, err := Connect(testContext(t), testEnv(0, 2, s.Addr().(*net.TCPAddr).Port), nil)
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	require.ErrorContains(t, err, s.Addr().String())
}

// Without it each machine of a job would look for the store at itself, or
// strangers could join.
func TestConnectRefusals(t *testing.T) {
	e := testEnv(1, 4, 1)
	e.LocalWorldSize, e.LocalRank, e.MasterAddr = 2, 1, "node1"
	resolve := func(addrs ...string) *ConnectOptions {
		return &ConnectOptions{LookupHost: func(_ context.Context, h string) ([]string, error) {
			require.Equal(t, "node1", h, "the name is used verbatim")
			return addrs, nil
		}}
	}
	_, err := Connect(testContext(t), e, resolve("10.0.0.1"))
	require.ErrorIs(t, err, ErrNoSecret)
	e.Secret = "s"
	_, err = Connect(testContext(t), e, resolve("127.0.1.1"))
	require.ErrorIs(t, err, ErrLoopback)
	require.ErrorContains(t, err, "node1 is 127.0.1.1")
	_, err = Connect(testContext(t), e, &ConnectOptions{Linger: -1})
	require.ErrorContains(t, err, "linger")
}
