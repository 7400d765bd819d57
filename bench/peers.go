package bench

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

//go:embed peers/gloo.py
var glooScript []byte

//go:embed peers/mpi.c
var mpiSource []byte

// ErrNoPeer is in the chain when a peer isn't installed; the text says what to
// install.
var ErrNoPeer = errors.New("not installed here")

// peerTime bounds a peer's run, which may hang.
const peerTime = 5 * time.Minute

// Peer is another implementation of allreduce, for comparisons.
type Peer struct {
	// Name is "gloo" (torch.distributed), "openmpi" (its default transport) or
	// "openmpi-tcp". Version is what it says of itself.
	Name, Version string

	dir  string // scripts and programs, removed by the owner of dir
	argv func(ranks int) []string
	each bool // one process a rank, started here
}

// FindPeers prepares the peers that this machine has, in dir, and returns for
// each that it lacks an error wrapping ErrNoPeer.
func FindPeers(ctx context.Context, dir string) (peers []Peer, missing []error) {
	gloo, err := findGloo(ctx, dir)
	if err != nil {
		missing = append(missing, err)
	} else {
		peers = append(peers, gloo)
	}
	mpi, err := findMPI(ctx, dir)
	if err != nil {
		missing = append(missing, err)
	}
	return append(peers, mpi...), missing
}

// findGloo looks for a Python that has torch with gloo.
func findGloo(ctx context.Context, dir string) (Peer, error) {
	path := filepath.Join(dir, "gloo.py")
	if err := os.WriteFile(path, glooScript, 0o644); err != nil {
		return Peer{}, err
	}
	const ask = "import torch, torch.distributed as d; assert d.is_available() and hasattr(d, 'ProcessGroupGloo'); print(torch.__version__)"
	for _, python := range []string{"python3", "/usr/bin/python3"} {
		out, err := exec.CommandContext(ctx, python, "-c", ask).Output()
		if err == nil {
			return Peer{Name: "gloo", Version: "torch " + strings.TrimSpace(string(out)), dir: dir, each: true,
				argv: func(int) []string { return []string{python, path} }}, nil
		}
	}
	return Peer{}, fmt.Errorf("gloo: %w: apt-get install python3-torch, or pip install torch", ErrNoPeer)
}

// findMPI compiles the program for Open MPI.
func findMPI(ctx context.Context, dir string) ([]Peer, error) {
	version, err := exec.CommandContext(ctx, "mpirun", "--version").Output()
	cc, ccErr := exec.LookPath("mpicc")
	if err != nil || ccErr != nil || !bytes.Contains(version, []byte("Open MPI")) {
		return nil, fmt.Errorf("openmpi: %w: apt-get install openmpi-bin libopenmpi-dev gcc", ErrNoPeer)
	}
	src, exe := filepath.Join(dir, "mpi.c"), filepath.Join(dir, "mpi")
	if err := os.WriteFile(src, mpiSource, 0o644); err != nil {
		return nil, err
	}
	if out, err := exec.CommandContext(ctx, cc, "-O3", src, "-o", exe).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("openmpi: mpicc: %w: %s", err, bytes.TrimSpace(out))
	}
	first, _, _ := strings.Cut(string(version), "\n")
	run := func(extra ...string) func(int) []string {
		return func(ranks int) []string {
			argv := []string{"mpirun", "--oversubscribe", "--bind-to", "none", "-n", strconv.Itoa(ranks)}
			if os.Geteuid() == 0 {
				argv = append(argv, "--allow-run-as-root")
			}
			return append(append(argv, extra...), exe)
		}
	}
	tcp := run("--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo")
	return []Peer{
		{Name: "openmpi", Version: strings.TrimSpace(first), dir: dir, argv: run()},
		{Name: "openmpi-tcp", Version: strings.TrimSpace(first), dir: dir, argv: tcp},
	}, nil
}

// PeerNet is where a peer's ranks run.
type PeerNet struct {
	// Addr is rank 0's address, Interface the one that it belongs to.
	Addr, Interface string
	// Wrap, if set, turns a rank's command into another that runs it, such as one
	// that enters a network namespace.
	Wrap func(rank int, argv []string) []string
}

// Hosts says whether the peer's ranks can be put on hosts of their own: they
// must be processes that we start, one a rank.
func (p *Peer) Hosts() bool { return p.each }

// Run measures the peer's allreduce, float32 sum in place, for seconds a size.
func (p *Peer) Run(ctx context.Context, ranks int, bytes []int, seconds float64, on PeerNet) ([]CollectiveRow, error) {
	ctx, cancel := context.WithTimeout(ctx, peerTime)
	defer cancel()
	sizes := make([]string, len(bytes))
	for i, b := range bytes {
		sizes[i] = strconv.Itoa(b)
	}
	env := append(os.Environ(), "TANDEM_PEER_SIZES="+strings.Join(sizes, ","), fmt.Sprintf("TANDEM_PEER_SECONDS=%g", seconds),
		"OMP_NUM_THREADS=1", "MALLOC_MMAP_THRESHOLD_=1073741824", "MALLOC_TRIM_THRESHOLD_=4294967296", "MALLOC_TOP_PAD_=67108864")
	out, err := p.start(ctx, ranks, env, on)
	if err != nil {
		return nil, fmt.Errorf("bench: %s with %d ranks: %w", p.Name, ranks, err)
	}
	return p.rows(out, ranks)
}

// start runs all ranks and returns what rank 0 wrote.
func (p *Peer) start(ctx context.Context, ranks int, env []string, on PeerNet) ([]byte, error) {
	procs := ranks
	if !p.each {
		procs = 1
	}
	port, err := freePort(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var out bytes.Buffer
	errs := make(chan error, procs)
	for r := range procs {
		var stderr bytes.Buffer
		argv := p.argv(ranks)
		if on.Wrap != nil {
			argv = on.Wrap(r, argv)
		}
		cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
		cmd.WaitDelay = 5 * time.Second
		cmd.Stderr = &stderr
		if cmd.Env = env; p.each {
			cmd.Env = append(env[:len(env):len(env)], fmt.Sprintf("RANK=%d", r), fmt.Sprintf("WORLD_SIZE=%d", ranks),
				"MASTER_ADDR="+on.Addr, fmt.Sprintf("MASTER_PORT=%d", port), "GLOO_SOCKET_IFNAME="+on.Interface)
		}
		if r == 0 {
			cmd.Stdout = &out
		}
		go func() {
			err := cmd.Run()
			if err != nil {
				err = fmt.Errorf("rank %d: %w: %s", r, err, tail(stderr.Bytes()))
				cancel() // the others would wait for it
			}
			errs <- err
		}()
	}
	for range procs {
		if e := <-errs; err == nil {
			err = e
		}
	}
	return out.Bytes(), err
}

func tail(b []byte) []byte {
	b = bytes.TrimSpace(b)
	return b[max(0, len(b)-500):]
}

func freePort(ctx context.Context) (int, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// rows reads what a peer wrote.
func (p *Peer) rows(out []byte, ranks int) ([]CollectiveRow, error) {
	var rows []CollectiveRow
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		r := CollectiveRow{Bench: "collectives", Backend: p.Name, Collective: AllReduce, Type: "float32", Redop: "sum",
			Root: -1, Ranks: ranks, InPlace: true}
		if err := d.Decode(&r); err != nil {
			if len(rows) > 0 && !d.More() {
				return rows, nil
			}
			return nil, fmt.Errorf("bench: %s wrote %q: %w", p.Name, tail(out), err)
		}
		r.bandwidth()
		rows = append(rows, r)
	}
}
