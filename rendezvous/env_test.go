package rendezvous

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// table reads "A=1 B=2".
func lookupIn(vars string) func(string) (string, bool) {
	m := map[string]string{}
	for f := range strings.FieldsSeq(vars) {
		k, x, _ := strings.Cut(f, "=")
		m[k] = x
	}
	return func(k string) (string, bool) { x, ok := m[k]; return x, ok }
}

// brief is an Env as the golden cases write it.
func brief(e Env) string {
	s := fmt.Sprintf("%s: rank %d/%d local %d/%d group %d", e.Source, e.Rank, e.WorldSize, e.LocalRank, e.LocalWorldSize, e.GroupRank)
	if e.MasterAddr != "" {
		s += " at " + e.Addr()
	}
	if e.Hosted {
		s += " hosted"
	}
	if e.JobID != "" {
		s += fmt.Sprintf(" job %s.%d", e.JobID, e.Generation)
	}
	if len(e.Notes) > 0 {
		s += " | " + strings.Join(e.Notes, "; ")
	}
	return s
}

const (
	torch4 = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 "
	ompi4  = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4 "
	ompi8  = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4 "
	slurm4 = "SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_STEP_NODELIST=gpu[03-04] "
)

// The golden cases of who a process is. Without them a job could start as many
// worlds of one, or its ranks could look for one another in different places.
func TestFind(t *testing.T) {
	for _, tc := range []struct {
		name, vars string
		flags      Flags
		want       string // of brief, or of the error
		err        error
	}{
		{"nothing", "", Flags{}, "none: rank 0/1 local 0/1 group 0", nil},
		{"empty variables", "RANK= LOCAL_RANK= MASTER_ADDR=", Flags{}, "none: rank 0/1 local 0/1 group 0", nil},
		{"torchrun", torch4 + "MASTER_ADDR=h MASTER_PORT=29500", Flags{}, "torch: rank 3/4 local 1/2 group 1 at h:29500", nil},
		{"torchrun hosts its own store", torch4 + "MASTER_ADDR=h MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RUN_ID=r TORCHELASTIC_RESTART_COUNT=2",
			Flags{}, "torch: rank 3/4 local 1/2 group 1 at h:29501 job r.2", nil},
		{"torchrun, other port", torch4 + "MASTER_ADDR=h MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True TANDEM_PORT=31000", Flags{}, "torch: rank 3/4 local 1/2 group 1 at h:31000", nil},
		{"our launcher", torch4 + "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 TANDEM_STORE=tcp://127.0.0.1:4242 TANDEM_JOB_ID=j TANDEM_GENERATION=1 TANDEM_SECRET=s",
			Flags{}, "torch: rank 3/4 local 1/2 group 1 at 127.0.0.1:4242 hosted job j.1", nil},
		{"torch, world of one", "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1", Flags{}, "torch: rank 0/1 local 0/1 group 0", nil},
		{"MASTER_ADDR alone", "MASTER_ADDR=10.0.0.1", Flags{}, "MASTER_ADDR=10.0.0.1 set, but not RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE", ErrPartial},
		{"MASTER_PORT alone", "MASTER_PORT=1", Flags{}, "MASTER_PORT=1 set, but not RANK", ErrPartial},
		{"RANK alone", "RANK=0", Flags{}, "RANK=0 set, but not WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE", ErrPartial},
		{"WORLD_SIZE alone", "WORLD_SIZE=4", Flags{}, "WORLD_SIZE=4 set, but not RANK, LOCAL_RANK, LOCAL_WORLD_SIZE", ErrPartial},
		{"LOCAL_RANK alone", "LOCAL_RANK=0", Flags{}, "LOCAL_RANK=0 set, but not RANK, WORLD_SIZE, LOCAL_WORLD_SIZE", ErrPartial},
		{"without LOCAL_WORLD_SIZE", "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=h MASTER_PORT=1", Flags{}, "not LOCAL_WORLD_SIZE", ErrPartial},
		{"node-level RANK", "RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1", Flags{}, "may count machines", ErrPartial},
		{"node-level RANK under mpirun", "RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1 " + ompi8, Flags{}, "open mpi: rank 3/8 local 3/4 group -1 at h:1", nil},
		{"torch without a master", torch4, Flags{}, "not where rank 0 is: MASTER_ADDR, MASTER_PORT not set", ErrPartial},
		{"torch without a port", torch4 + "MASTER_ADDR=h", Flags{}, "MASTER_ADDR is h, but not the port", ErrPartial},
		{"bad number", "RANK=x WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1", Flags{}, `RANK="x" is not a number`, nil},
		{"negative number", "RANK=-1 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1", Flags{}, `RANK="-1" is not a number`, nil},
		{"bad port", torch4 + "MASTER_ADDR=h MASTER_PORT=70000", Flags{}, `MASTER_PORT="70000" is not a port`, nil},

		{"mpirun with MASTER_ADDR", ompi8 + "MASTER_ADDR=h MASTER_PORT=9", Flags{}, "open mpi: rank 3/8 local 3/4 group -1 at h:9", nil},
		{"mpirun on one host", ompi4 + "PMIX_NAMESPACE=prterun-h-123@1 PMIX_RANK=3", Flags{}, "open mpi: rank 3/4 local 3/4 group 0 at 127.0.0.1:23005 job prterun-h-123@1.0", nil},
		{"a second mpirun on that host", ompi4 + "PMIX_NAMESPACE=prterun-h-124@1", Flags{}, "open mpi: rank 3/4 local 3/4 group 0 at 127.0.0.1:23564 job prterun-h-124@1.0", nil},
		{"mpirun with MASTER_ADDR, without port", ompi8 + "MASTER_ADDR=h PMIX_NAMESPACE=prterun-h-123@1", Flags{}, "open mpi: rank 3/8 local 3/4 group -1 at h:23005 job prterun-h-123@1.0", nil},
		{"mpirun on many hosts without MASTER_ADDR", ompi8 + "PMIX_NAMESPACE=n", Flags{}, "mpirun -x MASTER_ADDR=HOST", ErrPartial},
		{"mpirun without any id", ompi4, Flags{}, "no job id to derive one from", ErrPartial},
		{"mpirun, partial", "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2", Flags{}, "not OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE", ErrPartial},
		{"mpich", "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 MASTER_PORT=5", Flags{}, "mpi (pmi): rank 1/2 local 1/2 group 0 at 127.0.0.1:5", nil},
		{"pmi, partial", "PMI_RANK=1 PMI_SIZE=2", Flags{}, "not MPI_LOCALRANKID, MPI_LOCALNRANKS", ErrPartial},
		{"PMIX_RANK alone", "PMIX_RANK=1", Flags{}, "PMIX_RANK=1 set, but not PMI_RANK", ErrPartial},

		{"srun", slurm4, Flags{}, "slurm: rank 3/4 local 1/2 group 1 at gpu03:28236 job slurm-77.0.0", nil},
		{"srun with pmi2", slurm4 + "PMI_RANK=3 PMI_SIZE=4 PMIX_RANK=3", Flags{}, "slurm: rank 3/4 local 1/2 group 1 at gpu03:28236 job slurm-77.0.0", nil},
		{"srun with MASTER_ADDR", slurm4 + "MASTER_ADDR=h MASTER_PORT=9", Flags{}, "slurm: rank 3/4 local 1/2 group 1 at h:9 job slurm-77.0.0", nil},
		{"srun, partial", "SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=4", Flags{}, "not SLURM_LOCALID, SLURM_NODEID", ErrPartial},
		{"sbatch without srun", "SLURM_JOB_ID=77 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_NODEID=0", Flags{},
			"none: rank 0/1 local 0/1 group 0 | SLURM_NTASKS=4 is set, but this is no step of the job (no SLURM_STEP_ID): nobody else was started; use srun to start the tasks", nil},
		{"batch step", "SLURM_JOB_ID=77 SLURM_STEP_ID=4294967291 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0 SLURM_NODEID=0", Flags{}, "none: rank 0/1 local 0/1 group 0", nil},
		{"shell in a step", "SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0 SLURM_NODEID=0", Flags{},
			"none: rank 0/1 local 0/1 group 0 | the slurm step has one task: ranks are this machine's affair", nil},
		{"torchrun under srun", slurm4 + torch4 + "MASTER_ADDR=h MASTER_PORT=9", Flags{}, "torch: rank 3/4 local 1/2 group 1 at h:9", nil},

		{"flags", torch4, Flags{WorldSize: 2, Rank: 1, Store: "tcp://h:7"}, "flags: rank 1/2 local 0/1 group -1 at h:7", nil},
		{"flags and MASTER_ADDR", "MASTER_ADDR=h MASTER_PORT=9", Flags{WorldSize: 2, LocalWorldSize: 2, LocalRank: 1, Rank: 1, Store: "env://"}, "flags: rank 1/2 local 1/2 group -1 at h:9", nil},
		{"flags, partial", "", Flags{Rank: 1}, "no world size", ErrPartial},
		{"flags without a store", "", Flags{WorldSize: 2}, "MASTER_ADDR, MASTER_PORT not set (nor a store tcp://host:port given)", ErrPartial},
		{"bad store", "", Flags{WorldSize: 2, Store: "redis://h"}, "want env:// or tcp://host:port", nil},
		{"bad store port", "", Flags{WorldSize: 2, Store: "tcp://h"}, "missing port", nil},
		{"ipv6", "", Flags{WorldSize: 2, Store: "tcp://[::1]:7"}, "flags: rank 0/2 local 0/1 group -1 at [::1]:7", nil},

		{"kubeflow trainer", "PET_NNODES=2 PET_NODE_RANK=0 PET_NPROC_PER_NODE=1", Flags{}, "PET_NNODES=2", ErrPartial},
		{"leader worker set", "LWS_GROUP_SIZE=2 LWS_WORKER_INDEX=0", Flags{}, "LWS_GROUP_SIZE=2", ErrPartial},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e, err := Find(tc.flags, lookupIn(tc.vars))
			if err == nil {
				require.Equal(t, tc.want, brief(e))
				return
			}
			require.ErrorContains(t, err, tc.want)
			if tc.err != nil {
				require.ErrorIs(t, err, tc.err)
			}
		})
	}
}

// Without it a tool that a rank starts would pose as that rank and disturb its
// job.
func TestToolInsideAWorker(t *testing.T) {
	vars := torch4 + "MASTER_ADDR=h MASTER_PORT=9 "
	rank, err := FromEnv(lookupIn(vars))
	require.NoError(t, err)
	key, value := rank.Mark()
	with := func(vars string) func(string) (string, bool) {
		inner := lookupIn(vars)
		return func(k string) (string, bool) {
			if k == key {
				return value, true
			}
			return inner(k)
		}
	}
	_, err = FromEnv(with(vars))
	require.NoError(t, err, "the rank itself may ask again")
	_, err = find(Flags{}, environ{with(vars)}, os.Getpid()+1)
	require.ErrorIs(t, err, ErrInside)
	require.ErrorContains(t, err, "rank 3 of 4")

	e, err := find(Flags{}, environ{with("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=10")}, os.Getpid()+1)
	require.NoError(t, err, "a launcher inside the rank gave it an identity of its own")
	require.Equal(t, 2, e.WorldSize)
	_, err = find(Flags{WorldSize: 1}, environ{with(vars)}, os.Getpid()+1)
	require.NoError(t, err, "flags are not inherited")
	require.True(t, IsIdentity(key))
}

// Without it numbers that contradict one another would index out of range.
func TestValidate(t *testing.T) {
	ok := Env{Rank: 1, WorldSize: 2, LocalRank: 0, LocalWorldSize: 1}
	require.NoError(t, ok.Validate())
	for _, e := range []Env{
		{},
		{Rank: 2, WorldSize: 2, LocalWorldSize: 1},
		{Rank: -1, WorldSize: 2, LocalWorldSize: 1},
		{WorldSize: 2, LocalWorldSize: 3},
		{WorldSize: 2, LocalWorldSize: 0},
		{WorldSize: 2, LocalWorldSize: 1, LocalRank: 1},
		{WorldSize: 2, LocalWorldSize: 1, Generation: -1},
	} {
		require.Error(t, e.Validate(), "%+v", e)
	}
}

// Without it rank 0 would be looked for on the wrong machine.
func TestSLURMLists(t *testing.T) {
	for list, want := range map[string]string{
		"": "", "a": "a", "a,b": "a", "a[03-05,9],b": "a03", "n[1-2]-ib": "n1-ib", "n[7]": "n7", "n[7,9]x,c": "n7x", "a,b[1-2]": "a",
	} {
		require.Equal(t, want, firstHost(list), list)
	}
	for _, tc := range []struct {
		list       string
		node, want int
	}{{"2(x3),1", 0, 2}, {"2(x3),1", 2, 2}, {"2(x3),1", 3, 1}, {"4", 0, 4}, {"2(x3),1", 4, -1}, {"x", 0, -1}, {"2(x", 0, -1}, {"99", 0, -1}} {
		n, err := slurmLocalTasks(environ{lookupIn("SLURM_STEP_TASKS_PER_NODE=" + tc.list)}, 7, tc.node)
		if tc.want < 0 {
			require.Error(t, err, tc.list)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, tc.want, n, tc)
	}
}

// Without it a strange environment could crash a process before it has begun.
func FuzzFind(f *testing.F) {
	f.Add(torch4 + "MASTER_ADDR=h MASTER_PORT=29500")
	f.Add(slurm4)
	f.Add(ompi8 + "PMIX_NAMESPACE=n")
	f.Fuzz(func(t *testing.T, vars string) {
		e, err := FromEnv(lookupIn(vars))
		if err == nil && e.WorldSize > 1 && (e.MasterAddr == "" || e.MasterPort == 0) {
			t.Fatalf("a world of %d that meets nowhere", e.WorldSize)
		}
	})
}
