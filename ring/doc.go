// Package ring is the communicator for CPUs: ranks in processes, on one host or
// several, joined by shared memory or TCP.
//
// # Connections
//
// Every rank listens, publishes its addresses through a rendezvous.Store, and
// connects to its right neighbour and to ranks 0 and 1. Before a byte is
// believed both ends prove that they know the job's secret (internal/auth) and
// belong to the same job and generation. Data flow around the ring in one
// direction; Send opens a connection of its own between two ranks when it is
// first used. Traffic is authenticated when a connection begins, not encrypted.
//
// # Algorithms
//
// For P ranks and N bytes; a hop is one message to the neighbour:
//
//	operation        hops        bytes sent by a rank
//	AllReduce        2(P−1)      2N(P−1)/P   pipelined ring
//	AllReduce        P−1         N(P−1)      small N: exchange, everyone adds
//	ReduceScatter    P−1         N(P−1)/P    N is the whole input
//	AllGather        P−1         N(P−1)      N is one rank's block
//	Broadcast        P−1         N           pipelined along the ring
//	Barrier, Split   P−1         16(P−1)
//
// # Shared memory
//
// Groups whose ranks are all on one host (Options.Transport) use no connections
// for data. What Alloc returns lies in segments that the other ranks map, to
// read only, when they first need them: anonymous files, passed over a unix
// socket to processes of the same user that prove the secret. Each rank adds
// one block of all ranks' buffers where they lie, in the order of the ranks,
// and copies the other blocks from those who added them; memory from elsewhere
// is shown piece by piece on a stage. Small operations carry their data with
// the header: one phase in which everybody writes, then everybody reads. A rank
// waits for another by looking, then yielding, then sleeping in the kernel until
// it is woken, by the other or by a failure.
//
// Which allreduce is used over TCP depends on N and P alone. Every element is
// added in one fixed order: all ranks get the same bits, and so does a rerun over
// the same transport. From 3 ranks on the pipelined ring adds in another order
// than shared memory does.
//
// Each operation on each connection begins with a header of 64 bytes that names
// job, generation, group, sequence number, operation, type, count and bucket.
// It is compared before anything is added or kept, also when there are no
// elements: ranks that call different things get an error that names both.
//
// # Failures
//
// Ranks tell ranks 0 and 1 every second that they live. Whoever fails says why
// before it closes a connection; a rank that sees a connection break waits for
// the cause. Rank 0, or rank 1 when rank 0 is gone, picks one cause and tells
// all, so that every rank's comm.OpError names the same culprit, operation,
// sequence number and bucket:
//
//	a process dies                 at once: its connections break
//	a process stops, a host is cut Options.DeadAfter
//	a rank lives but never comes   Options.Timeout; the error names the rank
//	Abort, Close in mid-operation  at once
//
// An orderly Close when nothing is in flight is no failure for the others, until
// they start an operation that would need the rank that left.
//
// After a failure buffers are undefined and only Close works. To go on, make a
// new group, with another Generation or a rendezvous.Prefix of its own.
package ring
