# Allreduce of torch.distributed's gloo backend, float32 sum, in place, one
# blocking call after another. One JSON line a size, from rank 0.
# Environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; TANDEM_PEER_SIZES
# (bytes, comma separated) and TANDEM_PEER_SECONDS (a row).
import datetime, json, os, time
import torch, torch.distributed as dist

torch.set_num_threads(1)
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=120))
seconds = float(os.environ["TANDEM_PEER_SECONDS"])
for size in map(int, os.environ["TANDEM_PEER_SIZES"].split(",")):
    x = torch.full((size // 4,), float(rank + 1))
    dist.all_reduce(x)
    wrong = int((x != ranks * (ranks + 1) / 2).sum())
    x.zero_()
    for _ in range(2):
        dist.all_reduce(x)
    begin = time.perf_counter()
    dist.all_reduce(x)
    took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    calls = max(5, min(3000, int(seconds / max(float(took), 1e-7))))
    dist.barrier()
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        dist.all_reduce(x)
        times.append((time.perf_counter() - begin) * 1e6)
    s = sorted(times)
    q = lambda p: s[min(calls - 1, int(p * calls))]
    m = torch.tensor([sum(s) / calls, q(0.5), q(0.99), s[-1]], dtype=torch.float64)
    dist.all_reduce(m, op=dist.ReduceOp.MAX)
    if rank == 0:
        avg, p50, p99, most = m.tolist()
        print(json.dumps(dict(bytes=size, count=size // 4, iters=calls, wrong=wrong,
                              avg_us=avg, p50_us=p50, p99_us=p99, max_us=most)), flush=True)
dist.barrier()
