package main

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/internal/simd"
	"github.com/tandem-go/tandem/rendezvous"
)

func newEnv() *cobra.Command {
	return &cobra.Command{
		Use:   "env",
		Short: "Say what the environment makes of this process: which rank of which job, with what",
		Long: `Says which rank of which job this process would be, how it knows, where the ranks
meet and with what it computes. Run it the way the job is run, for example
  srun train env
  torchrun --no-python --nproc-per-node 2 train env
A set of variables that says something about ranks, but not all, is an error.
Secrets are not shown.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return printEnv(cmd.OutOrStdout(), os.Environ())
		},
	}
}

// printEnv describes what environ (as os.Environ has it) says. The error is that
// of an incomplete set.
func printEnv(w io.Writer, environ []string) error {
	vars := map[string]string{}
	for _, e := range environ {
		k, v, _ := strings.Cut(e, "=")
		vars[k] = v
	}
	e, err := rendezvous.FromEnv(func(k string) (string, bool) { v, ok := vars[k]; return v, ok })
	var b strings.Builder
	line := func(what, format string, args ...any) {
		fmt.Fprintf(&b, "%-10s %s\n", what, fmt.Sprintf(format, args...))
	}
	if err == nil {
		describe(line, &e)
	}
	ranks := e.LocalWorldSize
	if e.Source == rendezvous.SourceNone {
		ranks = 0
	}
	machine(line, ranks, vars["TANDEM_THREADS"])
	for _, v := range relevant(environ) {
		line("variable", "%s", v)
	}
	if _, werr := io.WriteString(w, b.String()); err == nil {
		err = werr
	}
	return err
}

// describe says who a process is.
func describe(line func(what, format string, args ...any), e *rendezvous.Env) {
	if e.Source == rendezvous.SourceNone {
		line("rank", "none of a job that somebody else has started: train starts ranks on this machine")
	} else {
		machine := ""
		if e.GroupRank >= 0 {
			machine = fmt.Sprintf(", machine %d", e.GroupRank)
		}
		line("rank", "%d of %d; %d of %d on this machine%s", e.Rank, e.WorldSize, e.LocalRank, e.LocalWorldSize, machine)
	}
	line("source", "%s", e.Source)
	if e.WorldSize > 1 {
		by := "rank 0"
		if e.Hosted {
			by = "somebody else, such as the launcher"
		}
		line("store", "tcp://%s, served by %s", e.Addr(), by)
		line("secret", "%v", e.Secret)
		if e.MultiHost() && e.Secret.Reveal() == "" {
			line("problem", "several machines need a secret that all ranks know: set TANDEM_SECRET")
		}
	}
	if e.JobID != "" {
		line("job", "%s, restarted %d times", e.JobID, e.Generation)
	}
	for _, n := range e.Notes {
		line("note", "%s", n)
	}
}

// machine says what one of n ranks of this machine computes with; n is 0 where
// that depends on --nproc.
func machine(line func(what, format string, args ...any), n int, threads string) {
	cores := cpu.AllowedCores()
	t, err := strconv.Atoi(threads)
	switch {
	case threads != "" && (err != nil || t < 1):
		line("problem", "TANDEM_THREADS=%q, want a number of at least 1", threads)
	case threads != "":
		line("threads", "%d a rank (TANDEM_THREADS)", t)
	case n > 0:
		line("threads", "%d a rank (cores / ranks of this machine)", max(1, cores/n))
	default:
		line("threads", "cores / --nproc a rank, at least 1")
	}
	line("cores", "%d of %d may be used", cores, runtime.NumCPU())
	line("kernels", "%v (%s/%s)", simd.Best(), runtime.GOOS, runtime.GOARCH)
	line("gpus", "%s", tandem.Accelerators())
}

// relevant lists the variables that say something to us, secrets redacted.
func relevant(environ []string) []string {
	var all []string
	for _, e := range environ {
		k, v, _ := strings.Cut(e, "=")
		if v == "" || !rendezvous.IsIdentity(k) && !strings.HasPrefix(k, "TANDEM_") {
			continue
		}
		if secret(k) {
			v = fmt.Sprintf("(%d bytes, not shown)", len(v))
		}
		all = append(all, k+"="+v)
	}
	slices.Sort(all)
	return all
}

// secret says that a variable's value is nobody's business.
func secret(name string) bool {
	for _, part := range []string{"SECRET", "TOKEN", "PASSWORD", "KEY"} {
		if strings.Contains(name, part) {
			return true
		}
	}
	return false
}
