package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/tandem-go/tandem/internal/auth"
)

var (
	// ErrLoopback is in the chain when a job on several machines is to meet at
	// an address that means "this machine" on each of them.
	ErrLoopback = errors.New("rendezvous: a loopback address between several machines")
	// ErrNoSecret is in the chain when ranks on several machines share none.
	ErrNoSecret = auth.ErrNoSecret
)

// ConnectOptions configure Connect.
type ConnectOptions struct {
	// Linger is how long the host of the store waits in Close for the others
	// to leave. 0 means 10 s.
	Linger time.Duration
	// Logger gets waiting and lost connections; nil discards.
	Logger *slog.Logger
	// LookupHost resolves names; nil means the system's resolver.
	LookupHost func(ctx context.Context, host string) ([]string, error)
}

func (o *ConnectOptions) validate() (ConnectOptions, error) {
	var v ConnectOptions
	if o != nil {
		v = *o
	}
	if v.Linger < 0 {
		return v, fmt.Errorf("rendezvous: linger %v, want at least 0", v.Linger)
	}
	if v.Linger == 0 {
		v.Linger = 10 * time.Second
	}
	if v.Logger == nil {
		v.Logger = slog.New(slog.DiscardHandler)
	}
	if v.LookupHost == nil {
		v.LookupHost = net.DefaultResolver.LookupHost
	}
	return v, nil
}

// Conn is this rank's share of the store: a client, or at rank 0 the server.
type Conn struct {
	// Store is for everybody's use, apart from that of earlier generations.
	Store Store

	base   Store
	server *Server
	linger time.Duration
	log    *slog.Logger
}

// Connect reaches the store that e points at, serves it where e says that rank
// 0 does, and joins the group: it returns when all ranks have come. A world of
// one has a store of its own and opens no socket. When ctx ends first the error
// names the absent ranks.
func Connect(ctx context.Context, e Env, o *ConnectOptions) (*Conn, error) {
	opts, err := o.validate()
	if err != nil {
		return nil, err
	}
	c := &Conn{linger: opts.Linger, log: opts.Logger}
	if e.WorldSize == 1 {
		if err := e.Validate(); err != nil {
			return nil, err
		}
		c.base = NewMem()
		c.Store = Prefix(c.base, e.Prefix())
		return c, nil
	}
	if c.base, c.server, err = open(ctx, e, opts); err != nil {
		return nil, fmt.Errorf("rank %d of %d: %w", e.Rank, e.WorldSize, err)
	}
	c.Store = Prefix(c.base, e.Prefix())
	err = Join(ctx, c.Store, e.Rank, e.WorldSize)
	if err == nil {
		err = e.Validate() // after the join, so that all hear of a bad rank
	}
	if err != nil {
		return nil, errors.Join(err, c.leave(ctx, e.WorldSize-1))
	}
	return c, nil
}

// Prefix is what keys of this generation begin with in the job's store.
func (e *Env) Prefix() string { return fmt.Sprintf("g%d/", e.Generation) }

// open serves the store or dials it.
func open(ctx context.Context, e Env, o ConnectOptions) (Store, *Server, error) {
	local, err := checkHost(ctx, e, o)
	if err != nil {
		return nil, nil, err
	}
	if e.Rank != 0 || e.Hosted {
		c, err := Dial(ctx, ClientOptions{
			Addr: e.Addr(), Rank: e.Rank, Secret: e.Secret, JobID: e.JobID, Generation: e.Generation, Logger: o.Logger,
		})
		if err != nil {
			return nil, nil, err
		}
		return c, nil, nil
	}
	// A name may be a service's, whose address no interface has: then listen on
	// all of them. The secret keeps strangers out.
	addr := e.Addr()
	if !local {
		addr = joinHostPort("", e.MasterPort)
	}
	ln, err := Listen(ctx, addr)
	if err != nil {
		return nil, nil, fmt.Errorf("%w (the store of MASTER_ADDR %s; choose another MASTER_PORT, or set TANDEM_PORT on all ranks)", err, e.MasterAddr)
	}
	s := Serve(ln, ServerOptions{Secret: e.Secret, JobID: e.JobID, Generation: e.Generation, Logger: o.Logger})
	return s.Store(), s, nil
}

// checkHost refuses a store that some ranks can't reach or anyone could enter,
// and says whether its host is a loopback address. A name that can't be
// resolved yet is left to the dialer, which tries again.
func checkHost(ctx context.Context, e Env, o ConnectOptions) (loopback bool, err error) {
	if e.MultiHost() && e.Secret == "" {
		return false, fmt.Errorf("%w: %d of %d ranks are on this machine; set TANDEM_SECRET to the same random text on all",
			ErrNoSecret, e.LocalWorldSize, e.WorldSize)
	}
	addrs, lookupErr := o.LookupHost(ctx, e.MasterAddr)
	if lookupErr != nil || len(addrs) == 0 {
		return false, nil
	}
	for _, a := range addrs {
		if ip := net.ParseIP(a); ip == nil || !ip.IsLoopback() {
			return false, nil
		}
	}
	if e.MultiHost() {
		return true, fmt.Errorf("%w: %s is %s here, but the job has ranks on other machines; "+
			"use a name or an address that means rank 0's machine on all of them", ErrLoopback, e.MasterAddr, addrs[0])
	}
	return true, nil
}

// leave ends a join that failed. The host stays until the others have read the
// verdict, also those that come a little later.
func (c *Conn) leave(ctx context.Context, others int) error {
	if c.server == nil {
		return c.base.Close()
	}
	stay, least := c.linger, others
	if ctx.Err() != nil { // nobody else will come
		stay, least = reportTime, 0
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stay)
	defer cancel()
	if err := c.server.drain(ctx, least); err != nil {
		c.log.Debug("leaving before all others have heard", "err", err)
	}
	return c.server.Close()
}

// Close leaves the store. Its host waits for the others to leave first, as
// they may still read what it said.
func (c *Conn) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), c.linger)
	defer cancel()
	if c.server == nil {
		return c.base.Close()
	}
	if err := c.server.Drain(ctx); err != nil {
		c.log.Warn("leaving although others still use the store", "err", err)
	}
	return c.server.Close()
}
