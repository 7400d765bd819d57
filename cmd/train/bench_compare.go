package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/tandem-go/tandem/bench"
	"github.com/tandem-go/tandem/internal/netns"
)

// comparison runs ours and the peers in turn.
func (o *benchCollectives) comparison(ctx context.Context, out io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "tandem-peers-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	peers, missing := bench.FindPeers(ctx, dir)
	for _, m := range missing {
		fmt.Fprintln(os.Stderr, "#", m)
	}
	// Once now, to say what it is and to fail early. It is made for each turn:
	// with --netns ours needs one of the same names.
	_, down, note, err := o.peerNet(ctx)
	if err != nil {
		return err
	}
	if err := down(); err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "#", note)
	var theirs []bench.Contender
	for _, p := range peers {
		if o.netns != "" && !p.Hosts() {
			fmt.Fprintf(os.Stderr, "# %s: not between namespaces, which its launcher can't enter\n", p.Name)
			continue
		}
		fmt.Fprintf(os.Stderr, "# %s: %s\n", p.Name, p.Version)
		theirs = append(theirs, bench.Contender{Name: p.Name, Run: func(ctx context.Context, n int) ([]bench.CollectiveRow, error) {
			net, down, _, err := o.peerNet(ctx)
			if err != nil {
				return nil, err
			}
			rows, err := p.Run(ctx, n, o.Bytes, o.seconds, net)
			return rows, errors.Join(err, down())
		}})
	}
	if len(theirs) == 0 {
		return errors.New("--compare: there is nobody to compare with (see above)")
	}
	p := o.rowsOfAll(out)
	ratios, err := bench.Compare(ctx, o.ranks, o.rounds, o.Cores, o.ours(), theirs, p)
	if err != nil {
		return err
	}
	if !o.json {
		return bench.WriteRatios(out, ratios)
	}
	for _, r := range ratios {
		err = errors.Join(err, json.NewEncoder(out).Encode(r))
	}
	return err
}

// ours are the transports that --transport asks for: of auto on one machine,
// both that it may mean.
func (o *benchCollectives) ours() (all []bench.Contender) {
	transports := []string{o.transport}
	if o.transport == "auto" && o.netns == "" {
		transports = []string{"auto", "tcp"}
	}
	for _, t := range transports {
		all = append(all, bench.Contender{Name: o.label(t), Run: func(ctx context.Context, n int) ([]bench.CollectiveRow, error) {
			return o.collect(ctx, n, t)
		}})
	}
	return all
}

// collect runs our ranks and reads what rank 0 prints.
func (o *benchCollectives) collect(ctx context.Context, n int, transport string) ([]bench.CollectiveRow, error) {
	var buf bytes.Buffer
	each := *o
	each.json = true
	if err := each.start(ctx, n, transport, &buf); err != nil {
		return nil, err
	}
	var rows []bench.CollectiveRow
	for d := json.NewDecoder(&buf); ; {
		var r bench.CollectiveRow
		err := d.Decode(&r)
		if errors.Is(err, io.EOF) {
			return rows, nil
		}
		if err != nil {
			return nil, fmt.Errorf("reading our own rows: %w", err)
		}
		rows = append(rows, r)
	}
}

// rowsOfAll prints rows of whoever they are, with a heading where that changes.
func (o *benchCollectives) rowsOfAll(out io.Writer) func(bench.CollectiveRow) error {
	last := ""
	return func(r bench.CollectiveRow) error {
		if o.json {
			return json.NewEncoder(out).Encode(r)
		}
		if key := r.Backend + strconv.Itoa(r.Ranks); key != last {
			last = key
			if err := bench.CollectivesHeader(out, r.Backend, r.Ranks, o.Cores); err != nil {
				return err
			}
		}
		return r.Write(out)
	}
}

// peerNet is where the peers run: between namespaces with --netns, otherwise on
// a loopback whose TCP uses cubic, if this process may make one.
func (o *benchCollectives) peerNet(ctx context.Context) (on bench.PeerNet, down func() error, note string, err error) {
	on = bench.PeerNet{Addr: "127.0.0.1", Interface: "lo"}
	opts := netns.Options{Ranks: 1, Rate: "1gbit"}
	if o.netns != "" {
		most := 0
		for _, n := range o.ranks {
			most = max(most, n)
		}
		opts = netns.Options{Ranks: most, Rate: o.netns}
	}
	n, err := netns.Up(ctx, opts)
	switch {
	case err == nil && o.netns != "":
		on = bench.PeerNet{Addr: n.Addr(0), Interface: "eth0", Wrap: n.Command}
		return on, n.Down, "peers run in namespaces behind links of " + o.netns + ", with cubic", nil
	case err == nil:
		on.Wrap = func(_ int, argv []string) []string { return n.Command(0, argv) }
		return on, n.Down, "the peers' loopback uses cubic, as ours does", nil
	case o.netns != "" || !errors.Is(err, netns.ErrUnsupported):
		return on, nil, "", fmt.Errorf("--compare: %w", err)
	}
	return on, func() error { return nil }, "the peers' TCP uses this system's congestion control: " + err.Error(), nil
}
