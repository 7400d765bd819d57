package rendezvous

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/tandem-go/tandem/internal/auth"
)

var (
	// ErrPartial is in the chain when the environment says something about
	// ranks, but not all. It is never taken for a world of one.
	ErrPartial = errors.New("rendezvous: incomplete environment")
	// ErrInside is in the chain when a process inherited the variables of a
	// rank that is another process, such as the rank that started it.
	ErrInside = errors.New("rendezvous: started inside a rank of another job")
)

// Where Env.Source may come from.
const (
	SourceFlags = "flags"
	SourceTorch = "torch"     // RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE
	SourceOMPI  = "open mpi"  // OMPI_COMM_WORLD_*
	SourcePMI   = "mpi (pmi)" // PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
	SourceSLURM = "slurm"     // SLURM_PROCID …, inside a step
	SourceNone  = "none"      // this machine only
)

// Env is who a process is and where its group meets.
type Env struct {
	// Rank is in [0, WorldSize); LocalRank counts the ranks of this machine.
	// Only Join and Validate look whether they are in range.
	Rank, LocalRank int
	// WorldSize and LocalWorldSize are the ranks of the job and of this machine.
	WorldSize, LocalWorldSize int
	// GroupRank is the number of this machine, -1 when the source doesn't say.
	GroupRank int
	// MasterAddr and MasterPort are where the store is; empty in a world of one.
	MasterAddr string
	MasterPort int
	// Hosted says that somebody else serves the store there, such as the
	// launcher; otherwise rank 0 does.
	Hosted bool
	// JobID and Generation (restarts so far) tell jobs apart; Secret is what
	// all processes of the job know.
	JobID      string
	Generation int
	Secret     auth.Secret
	// Source says which of the sources told who this process is.
	Source string
	// Notes are one-line remarks for the log, such as a variable that looks
	// like a rank's but isn't.
	Notes []string
}

// MultiHost says that the job may have ranks on other machines.
func (e *Env) MultiHost() bool { return e.WorldSize > e.LocalWorldSize }

// Addr is the store's "host:port".
func (e *Env) Addr() string { return joinHostPort(e.MasterAddr, e.MasterPort) }

// Validate says whether the numbers agree with one another.
func (e *Env) Validate() error {
	switch {
	case e.WorldSize < 1:
		return fmt.Errorf("%w: world size %d (%s), want at least 1", ErrWorldSize, e.WorldSize, e.Source)
	case e.Rank < 0 || e.Rank >= e.WorldSize:
		return fmt.Errorf("%w: rank %d, world size %d (%s)", ErrRank, e.Rank, e.WorldSize, e.Source)
	case e.LocalWorldSize < 1 || e.LocalWorldSize > e.WorldSize:
		return fmt.Errorf("%w: local world size %d, world size %d (%s)", ErrWorldSize, e.LocalWorldSize, e.WorldSize, e.Source)
	case e.LocalRank < 0 || e.LocalRank >= e.LocalWorldSize:
		return fmt.Errorf("%w: local rank %d, local world size %d (%s)", ErrRank, e.LocalRank, e.LocalWorldSize, e.Source)
	case e.Generation < 0:
		return fmt.Errorf("rendezvous: generation %d, want at least 0", e.Generation)
	}
	return nil
}

// Flags are what a caller says about this process explicitly. They win over
// every variable.
type Flags struct {
	// WorldSize is the number of ranks; 0 means that Rank, LocalRank and
	// LocalWorldSize are not given either.
	WorldSize, Rank int
	// LocalWorldSize is the number of ranks on this machine; 0 means 1.
	LocalWorldSize, LocalRank int
	// Store is "" or "env://" (MASTER_ADDR and MASTER_PORT), or
	// "tcp://host:port", where rank 0 then serves the store.
	Store string
}

// FromEnv reads the environment alone. lookup is os.LookupEnv, or a table in
// tests; a variable set to "" counts as unset.
func FromEnv(lookup func(string) (string, bool)) (Env, error) { return Find(Flags{}, lookup) }

// Find says who this process is. The first source that applies wins:
//
//  1. Flags
//  2. torch's RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, but
//     only with LOCAL_RANK: some clouds set the first two per machine
//  3. OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE (Open MPI), or
//     PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS (MPICH, Intel MPI)
//  4. SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_NODEID, inside a step of
//     more than one task
//  5. none of them: a world of one
//
// Where rank 0 is comes from MASTER_ADDR and MASTER_PORT whatever the source;
// TANDEM_STORE (tcp://host:port, served by somebody else) comes first, and
// TANDEM_PORT replaces the port where something else listens on MASTER_PORT.
// torchrun's agent does (TORCHELASTIC_USE_AGENT_STORE), so there the store is
// at MASTER_PORT+1. On one machine MPI and SLURM jobs meet at 127.0.0.1; their
// port comes from the job's id. TANDEM_JOB_ID, TANDEM_GENERATION and
// TANDEM_SECRET complete it.
//
// A partial set is an error that wraps ErrPartial and lists what is missing.
func Find(f Flags, lookup func(string) (string, bool)) (Env, error) {
	return find(f, environ{lookup}, os.Getpid())
}

func find(f Flags, v environ, pid int) (Env, error) {
	e, err := whoAmI(f, v)
	if err != nil {
		return Env{}, err
	}
	if err := jobOf(&e, v); err != nil {
		return Env{}, err
	}
	if e.WorldSize > 1 {
		if err := place(&e, f.Store, v); err != nil {
			return Env{}, err
		}
	} else if _, _, err := parseStore(f.Store); err != nil {
		return Env{}, err
	}
	if e.Source != SourceFlags && e.Source != SourceNone {
		if err := checkInside(&e, v, pid); err != nil {
			return Env{}, err
		}
	}
	return e, nil
}

// environ reads variables.
type environ struct{ lookup func(string) (string, bool) }

func (v environ) get(key string) string {
	s, _ := v.lookup(key)
	return strings.TrimSpace(s)
}

func (v environ) has(keys ...string) bool {
	for _, k := range keys {
		if v.get(k) != "" {
			return true
		}
	}
	return false
}

// ints reads a whole set, or lists what is missing of it.
func (v environ) ints(keys ...string) (vals []int, missing []string, err error) {
	vals = make([]int, len(keys))
	for i, k := range keys {
		s := v.get(k)
		if s == "" {
			missing = append(missing, k)
			continue
		}
		if vals[i], err = number(k, s); err != nil {
			return nil, nil, err
		}
	}
	return vals, missing, nil
}

func number(key, s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("rendezvous: %s=%q is not a number of at least 0", key, s)
	}
	return n, nil
}

// show is "A=1, B=2" for those that are set.
func (v environ) show(keys ...string) string {
	var s []string
	for _, k := range keys {
		if x := v.get(k); x != "" {
			s = append(s, k+"="+x)
		}
	}
	return strings.Join(s, ", ")
}

// partial is the error for a set of which only some are there.
func (v environ) partial(keys, missing []string, hint string) error {
	return fmt.Errorf("%w: %s, but not %s: %s", ErrPartial, orNothing(v.show(keys...)), strings.Join(missing, ", "), hint)
}

func orNothing(s string) string {
	if s == "" {
		return "nothing is set"
	}
	return s + " set"
}

// jobOf fills in what tells jobs apart.
func jobOf(e *Env, v environ) error {
	e.Secret = auth.Secret(v.get("TANDEM_SECRET"))
	e.JobID = v.get("TANDEM_JOB_ID")
	if e.JobID == "" {
		e.JobID = schedulerJob(e.Source, v)
	}
	gen := "TANDEM_GENERATION"
	if e.Source == SourceTorch && !v.has(gen) {
		gen = "TORCHELASTIC_RESTART_COUNT"
	}
	if s := v.get(gen); s != "" {
		n, err := number(gen, s)
		if err != nil {
			return err
		}
		e.Generation = n
	}
	return nil
}

// schedulerJob is the id that the starter of the ranks gave the job, "" when
// it gave none. All ranks see the same one.
func schedulerJob(source string, v environ) string {
	switch source {
	case SourceTorch:
		return v.get("TORCHELASTIC_RUN_ID")
	case SourceOMPI, SourcePMI:
		for _, k := range []string{"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PMI_ID_JOB"} {
			if s := v.get(k); s != "" {
				return s
			}
		}
	}
	if source != SourceNone && source != SourceFlags && v.has("SLURM_JOB_ID") {
		return "slurm-" + v.get("SLURM_JOB_ID") + "." + v.get("SLURM_STEP_ID")
	}
	return ""
}

// insideKey is how a rank marks its environment, for those it starts.
const insideKey = "TANDEM_INSIDE"

// Mark is a variable that a rank sets in its own environment once it knows who
// it is. A process that inherits it along with the rank's other variables is
// told so (ErrInside) instead of posing as the rank.
func (e *Env) Mark() (key, value string) {
	return insideKey, fmt.Sprintf("%d %s", os.Getpid(), e.fingerprint())
}

func (e *Env) fingerprint() string {
	return fmt.Sprintf("%s/%d/%d/%s/%d", e.Source, e.Rank, e.WorldSize, e.Addr(), e.Generation)
}

// checkInside compares the mark with who we seem to be: a launcher that runs
// inside a rank gives its children other values, and they are no rank's.
func checkInside(e *Env, v environ, pid int) error {
	owner, print, ok := strings.Cut(v.get(insideKey), " ")
	if !ok || print != e.fingerprint() || owner == strconv.Itoa(pid) {
		return nil
	}
	return fmt.Errorf("%w: RANK and the like (%s: rank %d of %d) belong to process %s; "+
		"start this one without them (env -u RANK -u WORLD_SIZE -u LOCAL_RANK …) or with a launcher",
		ErrInside, e.Source, e.Rank, e.WorldSize, owner)
}

var identityPrefixes = []string{
	"OMPI_", "PMIX_", "PMI_", "MPI_LOCAL", "TORCHELASTIC_", "PET_", "LWS_", "SLURM_STEP", "SLURM_TASK",
}

var identityNames = []string{
	"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
	"ROLE_NAME", "ROLE_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "JOB_COMPLETION_INDEX",
	"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_GTIDS",
	"TANDEM_JOB_ID", "TANDEM_GENERATION", "TANDEM_SECRET", "TANDEM_STORE", "TANDEM_PORT", insideKey,
}

// IsIdentity says whether a variable tells a process which rank of which job
// it is, by any source. A launcher passes none of them on.
func IsIdentity(name string) bool {
	for _, p := range identityPrefixes {
		if strings.HasPrefix(name, p) {
			return true
		}
	}
	for _, n := range identityNames {
		if n == name {
			return true
		}
	}
	return false
}
