package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/tandem-go/tandem/internal/auth"
	"github.com/tandem-go/tandem/internal/netns"
	"github.com/tandem-go/tandem/rendezvous"
)

// limit is how long any rank may take from its start to its end: clocks, graces
// and a machine that is busy with something else. Longer is a hang.
const limit = 40 * time.Second

// rank is a process.
type rank struct {
	cmd    *exec.Cmd
	lines  *bufio.Scanner
	said   report
	ended  chan struct{} // closed when it has, after which the rest may be read
	silent bool          // it ended without a report
	hung   bool
}

// place is where a job's ranks live: on this machine, or with n, each on a host
// of its own.
type place struct{ n *netns.Net }

func (p place) listen(ctx context.Context) (net.Listener, error) {
	if p.n == nil {
		return rendezvous.Listen(ctx, "127.0.0.1:0")
	}
	return p.n.Listen(ctx, 0)
}

// command starts this executable as a rank, and says its host's address.
func (p place) command(rank int) (cmd *exec.Cmd, host string, err error) {
	self, err := os.Executable()
	if err != nil || p.n == nil {
		return exec.Command(self), "", err
	}
	argv := p.n.Command(rank, []string{self})
	return exec.Command(argv[0], argv[1:]...), p.n.Addr(rank), nil
}

// play runs one round and returns what was wrong with it.
func play(ctx context.Context, r round) (err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*limit)
	defer cancel()
	var p place
	if slices.Contains(netDisturbances, r.What) {
		if p.n, err = netns.Up(ctx, netns.Options{Ranks: r.Size, Rate: "200mbit"}); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, p.n.Down()) }()
	}
	ln, err := p.listen(ctx)
	if err != nil {
		return err
	}
	secret := auth.Secret(fmt.Sprintf("secret-%d", r.Seed))
	srv := rendezvous.Serve(ln, rendezvous.ServerOptions{Secret: secret, JobID: jobID, Generation: 1})
	defer srv.Close()
	var all []*rank
	defer func() {
		for _, k := range all {
			_ = k.cmd.Process.Kill()
			<-k.ended
		}
	}()
	for i := range r.Size {
		k, err := p.start(task{Round: r, Rank: i, Store: srv.Addr().String(), Secret: string(secret), Generation: 1})
		if err != nil {
			return err
		}
		all = append(all, k)
	}
	if err := p.disturb(ctx, r, all, srv); err != nil {
		return err
	}
	await(all, r)
	return judge(r, all)
}

// start runs a rank.
func (p place) start(t task) (*rank, error) {
	cmd, host, err := p.command(t.Rank)
	if err != nil {
		return nil, err
	}
	t.Host = host
	v, err := json.Marshal(t)
	if err != nil {
		return nil, err
	}
	k := &rank{cmd: cmd, ended: make(chan struct{})}
	k.cmd.Env = append(os.Environ(), workerEnv+"="+string(v))
	k.cmd.Stderr = os.Stderr
	out, err := k.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	k.lines = bufio.NewScanner(out)
	k.lines.Buffer(nil, 1<<20)
	return k, k.cmd.Start()
}

// hear waits for a line that is not the report, or for the report.
func (k *rank) hear(line string) bool {
	for k.lines.Scan() {
		if k.lines.Text() == line {
			return true
		}
		if json.Unmarshal(k.lines.Bytes(), &k.said) == nil && strings.HasPrefix(k.lines.Text(), "{") {
			return false
		}
	}
	k.silent = true
	return false
}

// follow reads until the process ends; the rank is hung if that takes too long.
func (k *rank) follow() {
	go func() {
		defer close(k.ended)
		hung := time.AfterFunc(limit, func() { _ = k.cmd.Process.Signal(syscall.SIGABRT) })
		if k.said == (report{}) && !k.silent {
			k.hear("")
		}
		for k.lines.Scan() { // until the pipe closes
		}
		_ = k.cmd.Wait()
		k.hung = !hung.Stop()
	}()
}

// disturb does what comes from outside and then follows every rank.
func (p place) disturb(ctx context.Context, r round, all []*rank, srv *rendezvous.Server) error {
	var err error
	switch r.What {
	case killJoin:
		time.Sleep(r.Delay)
		_ = all[r.Victims[0]].cmd.Process.Kill()
	case pauseShort, pauseLong, strangers, impostors, linkDown, linkFlap:
		for i, k := range all {
			if !k.hear("running") && k.silent {
				err = fmt.Errorf("rank %d died before the first step was over", i)
			}
		}
	}
	for _, k := range all {
		k.follow()
	}
	if err != nil {
		return err
	}
	victim := all[r.Victims[0]]
	switch r.What {
	case pauseShort:
		_ = victim.cmd.Process.Signal(syscall.SIGSTOP)
		time.Sleep(r.Delay)
		return victim.cmd.Process.Signal(syscall.SIGCONT)
	case pauseLong:
		if err := victim.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			return nil // it has ended already
		}
		for i, k := range all {
			if i != r.Victims[0] {
				<-k.ended
			}
		}
		return victim.cmd.Process.Signal(syscall.SIGCONT)
	case linkDown:
		return p.n.Link(ctx, r.Victims[0], false)
	case linkFlap:
		if err := p.n.Link(ctx, r.Victims[0], false); err != nil {
			return err
		}
		time.Sleep(r.Delay)
		return p.n.Link(ctx, r.Victims[0], true)
	case strangers, impostors:
		return intrude(ctx, r, srv)
	}
	return nil
}

func await(all []*rank, r round) {
	for i, k := range all {
		if r.What == killJoin && i == r.Victims[0] {
			continue
		}
		<-k.ended
	}
}

// judge holds what ranks said against what a round of this kind must come to.
func judge(r round, all []*rank) error {
	var errs []error
	var first *report
	for i, k := range all {
		dies := r.victim(i) && (r.What == kill || r.What == killTwo || r.What == killJoin)
		s := &k.said
		switch {
		case k.hung:
			errs = append(errs, fmt.Errorf("rank %d hung", i))
			continue
		case dies:
			continue
		case k.silent:
			errs = append(errs, fmt.Errorf("rank %d ended without a word: %v", i, k.cmd.ProcessState))
			continue
		}
		if s.Wrong > 0 {
			errs = append(errs, fmt.Errorf("rank %d: %d wrong elements", i, s.Wrong))
		}
		if s.Left != "" {
			errs = append(errs, fmt.Errorf("rank %d left behind %s", i, s.Left))
		}
		if s.Done != r.ends() {
			errs = append(errs, fmt.Errorf("rank %d: done %t, want %t: %s", i, s.Done, r.ends(), s.Err))
			continue
		}
		// The victim knows itself what happened; the survivors must agree.
		if s.Done || r.victim(i) || r.What == killJoin {
			continue
		}
		if first == nil {
			first = s
		}
		if s.Culprit != first.Culprit || s.Seq != first.Seq || s.Bucket != first.Bucket || s.Op != first.Op {
			errs = append(errs, fmt.Errorf("survivors disagree:\n\trank %d: %s\n\trank %d: %s", first.Rank, first.Err, i, s.Err))
		} else if r.What != mismatch && !slices.Contains(r.Victims, s.Culprit) {
			errs = append(errs, fmt.Errorf("rank %d blames rank %d, not %v: %s", i, s.Culprit, r.Victims, s.Err))
		}
	}
	if len(errs) > 0 {
		return fmt.Errorf("%v\n%w", &r, errors.Join(errs...))
	}
	return nil
}

// random is the round's own source for what comes from outside.
func (r *round) random() *rand.Rand { return rand.New(rand.NewPCG(r.Seed, 2)) }
