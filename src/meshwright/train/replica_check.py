"""Silent corruption: replicas whose weights should be equal bit for bit are compared every so many steps.

Ranks that differ only in their coordinate along dp_replicate hold the same shards. Their updates are computed
from the same reduced gradients, so any difference is a fault of a device, of memory or of a link, or a bug.
"""

import socket

import torch
import torch.distributed as dist

from meshwright.errors import LostRank
from meshwright.ops.bit_hash import hash_of
from meshwright.train.job import Job
from meshwright.train.state import TrainState


def compare_replicas(job: Job, state: TrainState) -> None:
    """Compare hashes of the weights over dp_replicate where due; all ranks call it. Waits for the device.

    LostRank where they differ: a supervisor restarts all ranks from the newest checkpoint.
    """
    every = job.run.resilience.compare_replicas_every_steps
    if every is None or state.step % every:
        return
    group = job.mesh.group("dp_replicate")
    own = hash_of(job.training.named_shards.values())
    hashes = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(hashes, own, group=group)
    found = [int(one) for one in hashes]
    differs = torch.tensor([int(len(set(found)) > 1)])
    dist.all_reduce(differs, op=dist.ReduceOp.MAX)  # all ranks end, also those whose own replicas are equal
    if not differs.item():
        return
    names: list[tuple[int, str]] = [(0, "")] * dist.get_world_size()
    dist.all_gather_object(names, (dist.get_rank(), socket.gethostname()))
    replicas = [f"rank {rank} on {names[rank][1]}" for rank in dist.get_process_group_ranks(group)]
    texts: list[str] = [""] * len(names)
    dist.all_gather_object(texts, _odd_ones(found, replicas))
    which = "; ".join(sorted({text for text in texts if text}))
    raise LostRank(
        f"the weights of replicas differ after step {state.step}: {which}",
        where="resilience.compare_replicas_every_steps",
        hint="suspect the device or the memory of that host; a restart goes on from the newest checkpoint, "
        "which was saved before this comparison",
    )


def _odd_ones(hashes: list[int], names: list[str]) -> str:
    """Those that differ from most of the others; all of them where there is no majority; empty where none."""
    if len(set(hashes)) == 1:
        return ""
    usual = max(set(hashes), key=hashes.count)
    is_majority = hashes.count(usual) > len(hashes) / 2
    odd = [name for name, value in zip(names, hashes, strict=True) if value != usual or not is_majority]
    return ", ".join(odd) + (" against the others" if is_majority else " against each other")
