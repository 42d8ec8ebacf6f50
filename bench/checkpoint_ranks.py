"""How the stall of a save depends on the number of ranks.

    python -m bench.checkpoint_ranks --work DIR --megabytes 64 --rounds 7

All files are written into new folders inside DIR, which are deleted at the end; nothing else in DIR is
touched. Every rank has the same number of bytes, and all ranks share one machine. The stall has two parts:
the copy to host memory, which competes for the memory of the machine, and the rest, which grows only where
ranks wait for each other. Both are printed, the median over the rounds of the slowest rank.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from bench.checkpoint import new_folder_in, state_of

from meshwright.checkpoint.saver import Saver
from meshwright.checkpoint.snapshot import HostSnapshot
from meshwright.spec import CheckpointSpec

_NUM_RANKS = (1, 2, 4)


def slowest(seconds: float) -> float:
    """The largest value of all ranks."""
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found.item())


def measure(rank: int, num_ranks: int, work: str, num_bytes: int, rounds: int) -> None:
    """One rank: a bare copy and the stall of a save in every round; rank 0 prints the line of the table."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{work}/store-{num_ranks}", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    state = {f"rank{rank}.{name}": tensor for name, tensor in state_of(num_bytes).items()}
    copy = HostSnapshot(torch.device("cpu"))
    assert copy.reserve(state), "too little host memory"
    root = Path(work) / f"ranks-{num_ranks}"
    saver = Saver(root, CheckpointSpec(every_steps=1), torch.device("cpu"), timeout_seconds=600.0)
    copies, stalls = [], []
    for step in range(rounds + 1):
        dist.barrier()
        started_at = time.perf_counter()
        copy.copy(state)
        copies.append(slowest(time.perf_counter() - started_at))
        dist.barrier()
        started_at = time.perf_counter()
        saver.start(step + 1, state, {})
        stalls.append(slowest(time.perf_counter() - started_at))
        saver.wait()
    saver.close()
    dist.destroy_process_group()
    if rank == 0:
        bare, stall = statistics.median(copies[1:]), statistics.median(stalls[1:])
        print(f"| {num_ranks} | {bare:.4f} | {stall:.4f} | {stall - bare:.4f} |", flush=True)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print("| ranks | bare copy s | stall s | rest s |\n|---|---|---|---|", flush=True)
    for num_ranks in _NUM_RANKS:
        with new_folder_in(options.work) as work:
            settings = (num_ranks, str(work), options.megabytes * 10**6, options.rounds)
            processes.spawn(measure, settings, nprocs=num_ranks)


if __name__ == "__main__":
    main()
