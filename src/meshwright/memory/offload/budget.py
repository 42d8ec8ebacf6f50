"""Whether host memory suffices for what a run offloads; checked before anything is built."""

import torch
import torch.distributed as dist

from meshwright.errors import PlanError
from meshwright.hardware.machine import this_machine
from meshwright.launch.launched import launched_rank
from meshwright.plan.memory.offload import HOST_SHARE
from meshwright.plan.predict import host_bytes
from meshwright.spec import RunSpec
from meshwright.units import show_bytes


def host_budget(run: RunSpec) -> int:
    """Bytes of host memory that this rank may use; PlanError where the run needs more."""
    num_ranks, budget, needed = ranks_on_this_host(), host_share(), host_bytes(run)
    if needed > budget:
        shared = f" for each of {num_ranks} ranks" if num_ranks > 1 else ""
        raise PlanError(
            f"offload of {', '.join(run.memory.offload)} needs {show_bytes(needed)} of host memory on a "
            f"rank, and this machine has {show_bytes(budget)}{shared}",
            where="memory.offload",
            hint="offload less, shard state over more ranks (parallel.zero), or use fewer ranks per host",
        )
    return budget


def host_share() -> int:
    """This rank's share of the host memory that is free now."""
    return int(HOST_SHARE * this_machine().free_memory_bytes / ranks_on_this_host())


def ranks_on_this_host() -> int:
    """Ranks on this host, as the launcher set it; otherwise no more than there are devices."""
    launched = launched_rank()
    if launched is not None and launched.num_local_ranks is not None:
        return launched.num_local_ranks
    world = dist.get_world_size() if dist.is_initialized() else 1
    return min(world, torch.cuda.device_count() or world)
