package launch

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"

	"github.com/tandem-go/tandem/internal/auth"
	"github.com/tandem-go/tandem/rendezvous"
)

const (
	envLiveness = "TANDEM_LIVENESS_FD"
	envLaunched = "TANDEM_LAUNCHED"
	envTerminal = "TANDEM_TERMINAL"
)

// environment is what the ranks of a job share.
type environment struct {
	base   []string // inherited, without any identity
	secret auth.Secret
	store  net.Addr
	alive  string // livenessName
	master int    // a port for programs that serve a store of their own
}

func newEnvironment(o *Options, secret auth.Secret, store net.Addr, alive string) (*environment, error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	e := &environment{secret: secret, store: store, alive: alive, master: port}
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		switch {
		case rendezvous.IsIdentity(name), name == envLiveness, name == envLaunched, name == envTerminal:
		case name == "TANDEM_THREADS" && o.Threads > 0:
		default:
			e.base = append(e.base, kv)
		}
	}
	for _, kv := range o.Env {
		name, _, ok := strings.Cut(kv, "=")
		if !ok || name == "" || strings.ContainsRune(kv, 0) {
			return nil, fmt.Errorf("launch: environment entry %q, want NAME=value", name)
		}
		if rendezvous.IsIdentity(name) {
			return nil, fmt.Errorf("launch: %s is set for each rank by the launcher and can't be given", name)
		}
	}
	e.base = append(e.base, o.Env...)
	return e, nil
}

// of is the environment of one rank: always the whole set, explicitly.
// MASTER_PORT is for programs of other frameworks, whose rank 0 serves a store
// there; it was free a moment ago. tandem's own store is TANDEM_STORE, which
// the launcher has had open since before it started anyone.
func (e *environment) of(o *Options, rank int) []string {
	threads := o.Threads
	if s := e.get("TANDEM_THREADS"); threads == 0 && s != "" {
		threads, _ = strconv.Atoi(s) // a bad one is the rank's to refuse
	} else if threads == 0 {
		threads = share(o.NProc)
	}
	env := append([]string(nil), e.base...)
	set := func(name string, value any) { env = append(env, fmt.Sprintf("%s=%v", name, value)) }
	set("RANK", rank)
	set("LOCAL_RANK", rank)
	set("WORLD_SIZE", o.NProc)
	set("LOCAL_WORLD_SIZE", o.NProc)
	set("GROUP_RANK", 0)
	host, _, _ := net.SplitHostPort(e.store.String())
	set("MASTER_ADDR", host)
	set("MASTER_PORT", e.master)
	set("TANDEM_STORE", "tcp://"+e.store.String())
	set("TANDEM_JOB_ID", o.JobID)
	set("TANDEM_GENERATION", o.Generation)
	set("TANDEM_SECRET", e.secret.Reveal())
	set(envLaunched, 1)
	set(envLiveness, e.alive)
	if e.get("TANDEM_THREADS") == "" {
		set("TANDEM_THREADS", threads)
	}
	if e.get("GOMAXPROCS") == "" && threads > 0 {
		set("GOMAXPROCS", threads+2)
	}
	if o.Devices != nil {
		set("CUDA_VISIBLE_DEVICES", o.Devices[rank])
	}
	if w := terminalWidth(o.Stdout); w > 0 && o.Passthrough && rank == 0 {
		set(envTerminal, w)
	}
	return env
}

// get is the value that a rank will see, which is the last one.
func (e *environment) get(name string) string {
	for i := len(e.base) - 1; i >= 0; i-- {
		if v, ok := strings.CutPrefix(e.base[i], name+"="); ok {
			return v
		}
	}
	return ""
}

func freePort() (int, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("launch: find a free port: %w", err)
	}
	defer ln.Close()
	return ln.Addr().(*net.TCPAddr).Port, nil
}
