package rendezvous

import (
	"fmt"
	"hash/fnv"
	"net"
	"strconv"
	"strings"
)

var (
	torchKeys = []string{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
	ompiKeys  = []string{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"}
	pmiKeys   = []string{"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}
	slurmKeys = []string{"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID"}
)

const torchHint = "torchrun sets all four; on one machine run without any of them to have ranks started"

// whoAmI asks the sources in turn.
func whoAmI(f Flags, v environ) (Env, error) {
	if e, ok, err := fromFlags(f); ok || err != nil {
		return e, err
	}
	if v.has("LOCAL_RANK") {
		return fromTorch(v)
	}
	if v.has(ompiKeys...) {
		return fromSet(v, SourceOMPI, ompiKeys, "mpirun sets all four; pass them on with -x where a wrapper drops them")
	}
	_, noPMI, err := v.ints(pmiKeys...)
	if err != nil {
		return Env{}, err
	}
	if len(noPMI) == 0 {
		return fromSet(v, SourcePMI, pmiKeys, "")
	}
	e, ok, err := fromSLURM(v)
	if ok || err != nil {
		return e, err
	}
	return fromNothing(v, e.Notes)
}

func fromFlags(f Flags) (Env, bool, error) {
	if f.WorldSize == 0 {
		if f.Rank != 0 || f.LocalRank != 0 || f.LocalWorldSize != 0 {
			return Env{}, false, fmt.Errorf("%w: rank %d, local rank %d, local world size %d given, but no world size",
				ErrPartial, f.Rank, f.LocalRank, f.LocalWorldSize)
		}
		return Env{}, false, nil
	}
	return Env{
		Rank: f.Rank, WorldSize: f.WorldSize, LocalRank: f.LocalRank, LocalWorldSize: max(f.LocalWorldSize, 1),
		GroupRank: -1, Source: SourceFlags,
	}, true, nil
}

// fromSet reads rank, size, local rank and local size, in this order.
func fromSet(v environ, source string, keys []string, hint string) (Env, error) {
	n, missing, err := v.ints(keys...)
	if err != nil {
		return Env{}, err
	}
	if len(missing) > 0 {
		return Env{}, v.partial(keys, missing, hint)
	}
	e := Env{Rank: n[0], WorldSize: n[1], LocalRank: n[2], LocalWorldSize: n[3], GroupRank: -1, Source: source}
	if !e.MultiHost() {
		e.GroupRank = 0
	}
	return e, nil
}

func fromTorch(v environ) (Env, error) {
	e, err := fromSet(v, SourceTorch, torchKeys, torchHint)
	if err != nil {
		return e, err
	}
	if s := v.get("GROUP_RANK"); s != "" {
		e.GroupRank, err = number("GROUP_RANK", s)
	}
	return e, err
}

// fromSLURM applies only inside a step with several tasks: in the batch script
// itself PROCID is 0 and NTASKS is set, and nobody else will come.
func fromSLURM(v environ) (e Env, ok bool, err error) {
	if !v.has("SLURM_JOB_ID", "SLURM_PROCID") {
		return e, false, nil
	}
	if !inStep(v.get("SLURM_STEP_ID")) {
		if n := v.get("SLURM_NTASKS"); n != "" && n != "1" {
			e.Notes = append(e.Notes, "SLURM_NTASKS="+n+" is set, but this is no step of the job (no SLURM_STEP_ID): "+
				"nobody else was started; use srun to start the tasks")
		}
		return e, false, nil
	}
	keys := slurmKeys
	if v.has("SLURM_STEP_NUM_TASKS") {
		keys = []string{keys[0], "SLURM_STEP_NUM_TASKS", keys[2], keys[3]}
	}
	n, missing, err := v.ints(keys...)
	if err != nil {
		return e, false, err
	}
	if len(missing) > 0 {
		return e, false, v.partial(append([]string{"SLURM_STEP_ID"}, keys...), missing, "srun sets them all")
	}
	if n[1] == 1 {
		e.Notes = append(e.Notes, "the slurm step has one task: ranks are this machine's affair")
		return e, false, nil
	}
	e = Env{Rank: n[0], WorldSize: n[1], LocalRank: n[2], GroupRank: n[3], Source: SourceSLURM}
	e.LocalWorldSize, err = slurmLocalTasks(v, n[1], n[3])
	return e, true, err
}

// inStep excludes the pseudo-steps of batch scripts, extern and interactive
// shells, whose ids are the highest 32-bit numbers.
func inStep(id string) bool {
	n, err := strconv.ParseUint(id, 10, 64)
	return err == nil && n < 0xfffffff0
}

// slurmLocalTasks is entry node of "2(x3),1", the tasks on each machine.
func slurmLocalTasks(v environ, world, node int) (int, error) {
	key := "SLURM_STEP_TASKS_PER_NODE"
	if !v.has(key) {
		key = "SLURM_TASKS_PER_NODE"
	}
	list := v.get(key)
	if list == "" {
		if s := v.get("SLURM_NTASKS_PER_NODE"); s != "" {
			return number("SLURM_NTASKS_PER_NODE", s)
		}
		return 0, v.partial(slurmKeys, []string{key}, "srun sets it")
	}
	i := 0
	for part := range strings.SplitSeq(list, ",") {
		count, times, repeated := strings.Cut(part, "(x")
		n, err := strconv.Atoi(count)
		r := 1
		if err == nil && repeated {
			r, err = strconv.Atoi(strings.TrimSuffix(times, ")"))
		}
		if err != nil || n < 1 || r < 1 || n > world {
			return 0, fmt.Errorf("rendezvous: %s=%q is not a list like 2(x3),1 of at most %d tasks", key, list, world)
		}
		if node < i+r {
			return n, nil
		}
		i += r
	}
	return 0, fmt.Errorf("rendezvous: %s=%q has no entry for SLURM_NODEID=%d", key, list, node)
}

// fromNothing is a world of one, unless something hints at more.
func fromNothing(v environ, notes []string) (Env, error) {
	switch {
	case v.has("RANK") && v.has("WORLD_SIZE"):
		return Env{}, fmt.Errorf("%w: %s set, but not LOCAL_RANK: without it these may count machines, not processes "+
			"(PyTorchJob and some clouds); start ranks with torchrun --no-python, or set LOCAL_RANK and LOCAL_WORLD_SIZE",
			ErrPartial, v.show("RANK", "WORLD_SIZE"))
	case v.has(torchKeys...):
		_, missing, err := v.ints(torchKeys...)
		if err != nil {
			return Env{}, err
		}
		return Env{}, v.partial(torchKeys, missing, torchHint)
	case v.has("PMI_RANK", "PMI_SIZE", "PMIX_RANK"):
		_, missing, err := v.ints(pmiKeys...)
		if err != nil {
			return Env{}, err
		}
		return Env{}, v.partial(append([]string{"PMIX_RANK"}, pmiKeys...), missing,
			"looked for Open MPI's OMPI_COMM_WORLD_*, slurm's SLURM_PROCID … and PMI's, none is complete")
	case v.has("MASTER_ADDR", "MASTER_PORT", "TANDEM_STORE"):
		return Env{}, v.partial([]string{"MASTER_ADDR", "MASTER_PORT", "TANDEM_STORE"}, torchKeys,
			"they say where rank 0 is, nothing says which rank this is; unset them to run on this machine only")
	}
	for _, k := range []string{"PET_NNODES", "LWS_GROUP_SIZE"} {
		if n := v.get(k); n != "" && n != "1" {
			return Env{}, fmt.Errorf("%w: %s=%s says that there are several machines, not which ranks they run; "+
				"start ranks with torchrun --no-python", ErrPartial, k, n)
		}
	}
	return Env{WorldSize: 1, LocalWorldSize: 1, Source: SourceNone, Notes: notes}, nil
}

// parseStore takes "tcp://host:port" apart; host is "" for "" and "env://".
func parseStore(url string) (host string, port int, err error) {
	if url == "" || url == "env://" {
		return "", 0, nil
	}
	addr, ok := strings.CutPrefix(url, "tcp://")
	if !ok {
		return "", 0, fmt.Errorf("rendezvous: store %q, want env:// or tcp://host:port", url)
	}
	host, p, err := net.SplitHostPort(strings.TrimSuffix(addr, "/"))
	if err == nil && host == "" {
		err = fmt.Errorf("no host")
	}
	if err == nil {
		port, err = checkPort("port", p)
	}
	if err != nil {
		return "", 0, fmt.Errorf("rendezvous: store %q, want tcp://host:port: %w", url, err)
	}
	return host, port, nil
}

func checkPort(key, s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 || n > 65535 {
		return 0, fmt.Errorf("rendezvous: %s=%q is not a port", key, s)
	}
	return n, nil
}

func joinHostPort(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }

// place finds where the store is.
func place(e *Env, flag string, v environ) (err error) {
	if e.MasterAddr, e.MasterPort, err = parseStore(flag); err != nil || e.MasterAddr != "" {
		return err
	}
	if e.MasterAddr, e.MasterPort, err = parseStore(v.get("TANDEM_STORE")); err != nil {
		return fmt.Errorf("TANDEM_STORE: %w", err)
	} else if e.MasterAddr != "" {
		e.Hosted = true
		return nil
	}
	if e.MasterAddr, err = masterAddr(e, v); err != nil {
		return err
	}
	e.MasterPort, err = masterPort(e, v)
	return err
}

func masterAddr(e *Env, v environ) (string, error) {
	if s := v.get("MASTER_ADDR"); s != "" {
		return s, nil
	}
	if e.Source != SourceTorch && e.Source != SourceFlags && !e.MultiHost() {
		return "127.0.0.1", nil
	}
	switch e.Source {
	case SourceSLURM:
		list := v.get("SLURM_STEP_NODELIST")
		if list == "" {
			list = v.get("SLURM_JOB_NODELIST")
		}
		if h := firstHost(list); h != "" {
			return h, nil
		}
	case SourceOMPI, SourcePMI:
		return "", fmt.Errorf("%w: rank %d of %d (%s) without MASTER_ADDR: the job has ranks on several machines; "+
			"pass the address of rank 0's: mpirun -x MASTER_ADDR=HOST", ErrPartial, e.Rank, e.WorldSize, e.Source)
	}
	missing := []string{"MASTER_ADDR"}
	if !v.has("MASTER_PORT") {
		missing = append(missing, "MASTER_PORT")
	}
	return "", fmt.Errorf("%w: rank %d of %d (%s), but not where rank 0 is: %s not set (nor a store tcp://host:port given)",
		ErrPartial, e.Rank, e.WorldSize, e.Source, strings.Join(missing, ", "))
}

// firstHost is the first of "a[03-05,9],b".
func firstHost(list string) string {
	first, rest, _ := strings.Cut(list, ",")
	prefix, in, ranges := strings.Cut(first, "[")
	if !ranges {
		return first
	}
	if i := strings.IndexAny(in, "-,]"); i >= 0 {
		in, rest = in[:i], in[i:]+","+rest
	}
	if i := strings.IndexByte(rest, ']'); i >= 0 { // what follows the bracket, as in n[1-2]-ib
		tail, _, _ := strings.Cut(rest[i+1:], ",")
		return prefix + in + tail
	}
	return prefix + in
}

// Ports that are derived lie below those that systems hand out by themselves.
const (
	derivedLow   = 20000
	derivedCount = 10000
)

func masterPort(e *Env, v environ) (int, error) {
	if s := v.get("TANDEM_PORT"); s != "" {
		return checkPort("TANDEM_PORT", s)
	}
	if s := v.get("MASTER_PORT"); s != "" {
		n, err := checkPort("MASTER_PORT", s)
		if err == nil && e.Source == SourceTorch && agentStore(v) {
			return checkPort("MASTER_PORT+1", strconv.Itoa(n+1))
		}
		return n, err
	}
	if (e.Source == SourceOMPI || e.Source == SourcePMI || e.Source == SourceSLURM) && e.JobID != "" {
		h := fnv.New64a()
		_, _ = fmt.Fprintf(h, "%s/%d", e.JobID, e.Generation)
		return derivedLow + int(h.Sum64()%derivedCount), nil
	}
	return 0, fmt.Errorf("%w: rank %d of %d (%s), MASTER_ADDR is %s, but not the port: MASTER_PORT not set, "+
		"and no job id to derive one from", ErrPartial, e.Rank, e.WorldSize, e.Source, e.MasterAddr)
}

// agentStore says that torchrun's agent listens on MASTER_PORT itself.
func agentStore(v environ) bool {
	return strings.EqualFold(v.get("TORCHELASTIC_USE_AGENT_STORE"), "true")
}
