// Package launch starts the ranks of a job on this machine, watches them and
// stops them together: the first failure ends the job, is reported with its
// last lines, and gives the exit code. It starts any program; one that calls
// Guard (tandem.Init does) also dies with the launcher.
package launch

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"runtime"
	"time"
)

const (
	defaultGrace = 10 * time.Second
	maxProcs     = 1024
)

// Options of Launch. NProc and Args must be set; zero values of the rest mean
// the defaults.
type Options struct {
	// NProc is the number of ranks, all on this machine.
	NProc int
	// Args is the command with its arguments, the same for all ranks. A name
	// without a slash is looked up in PATH.
	Args []string
	// Env are "NAME=value" on top of this process's environment, of which the
	// variables that say who a rank is are not passed on.
	Env []string
	// Wrap, if set, turns the command of a rank into another that runs it, such
	// as one that enters a network namespace. It must pass on the environment
	// and what descriptors it inherits.
	Wrap func(rank int, args []string) []string
	// Listener, if set, is where the launcher serves the store; Launch closes
	// it. nil means a free port of 127.0.0.1.
	Listener net.Listener
	// Foreign says that the command does not call Guard. On Linux the kernel is
	// then asked to kill it when the launcher dies.
	Foreign bool

	// Dir gets rank<k>.log, the whole output of rank k, and on failure
	// error.json, of which the last job's stays as error.json.1. It is made where it
	// is missing. "" writes no files.
	Dir string
	// Append adds to the logs of an earlier job in Dir, which otherwise are replaced.
	Append bool
	// Stdout and Stderr get the ranks' output, line by line, each behind its
	// rank ("3: "). nil means this process's.
	Stdout, Stderr io.Writer
	// Ranks are those whose output is forwarded; nil means all.
	Ranks []int
	// Passthrough forwards rank 0's output as it comes, without a prefix, so
	// that a progress bar works.
	Passthrough bool
	// Prefix comes before the rank in front of a line, such as "host:".
	Prefix string

	// Threads is TANDEM_THREADS of each rank. 0 means the cores of this process
	// divided by NProc, at least 1, unless the variable is set.
	Threads int
	// Devices is an opaque list of GPUs; rank i sees only entry i
	// (CUDA_VISIBLE_DEVICES). nil leaves the variable alone.
	Devices []string

	// Grace is the time between SIGTERM and SIGKILL. 0 means 10 s.
	Grace time.Duration
	// Orderly says that the command saves its state after a first SIGINT, SIGTERM or
	// SIGHUP, however long that takes: when one is forwarded there is no deadline,
	// unless a rank then fails or the context ends. A second signal kills.
	Orderly bool
	// KeepSignals leaves SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 to the caller;
	// otherwise they are forwarded to the ranks while Launch runs.
	KeepSignals bool

	// JobID and Generation are what the ranks are told; "" means a random id.
	JobID      string
	Generation int
	// Logger gets what happens to ranks; nil discards.
	Logger *slog.Logger
}

func (o Options) validate() (Options, error) {
	if o.Grace == 0 {
		o.Grace = defaultGrace
	}
	if o.Stdout == nil {
		o.Stdout = os.Stdout
	}
	if o.Stderr == nil {
		o.Stderr = os.Stderr
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.JobID == "" {
		var b [6]byte
		_, _ = rand.Read(b[:])
		o.JobID = "job-" + hex.EncodeToString(b[:])
	}
	switch {
	case o.NProc < 1 || o.NProc > maxProcs:
		return o, fmt.Errorf("launch: NProc %d, want 1 to %d", o.NProc, maxProcs)
	case len(o.Args) == 0:
		return o, fmt.Errorf("launch: no command to start")
	case o.Grace < 0:
		return o, fmt.Errorf("launch: grace %v, want at least 0", o.Grace)
	case o.Threads < 0:
		return o, fmt.Errorf("launch: threads %d, want at least 0", o.Threads)
	case o.Devices != nil && len(o.Devices) < o.NProc:
		return o, fmt.Errorf("launch: %d devices for %d ranks", len(o.Devices), o.NProc)
	case o.Generation < 0:
		return o, fmt.Errorf("launch: generation %d, want at least 0", o.Generation)
	}
	for _, r := range o.Ranks {
		if r < 0 || r >= o.NProc {
			return o, fmt.Errorf("launch: rank %d is to be shown, but ranks go from 0 to %d", r, o.NProc-1)
		}
	}
	return o, nil
}

// share is the number of compute threads for each of n ranks.
func share(n int) int { return max(1, runtime.GOMAXPROCS(0)/n) }
