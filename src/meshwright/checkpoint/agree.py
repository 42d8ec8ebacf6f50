"""Decisions that all ranks take alike."""

import torch
import torch.distributed as dist


def on_all_ranks_alike(*, here: bool) -> bool:
    """Whether a condition that is true or false on this rank holds on all. Communicates (host)."""
    if dist.get_world_size() == 1:
        return here
    flag = torch.tensor([int(here)])
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())
