"""Memory and disk of this machine: whether a run on its CPU can fit, and what is said when room runs out."""

import errno
from pathlib import Path

import torch

from meshwright.errors import MeshwrightError, PlanError, RunError
from meshwright.hardware.catalogue import find_device, generic_cluster
from meshwright.hardware.machine import this_machine
from meshwright.memory.offload.budget import ranks_on_this_host
from meshwright.plan.predict import predict_run
from meshwright.spec import RunSpec
from meshwright.units import show_bytes

_STATE = ("weights", "gradients", "optimizer")
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


def require_room(run: RunSpec, device: torch.device) -> None:
    """PlanError where even the state of the ranks of this host is more than its memory.

    Activations are left out, so nothing is refused that could run. A CUDA device tells by itself.
    """
    if device.type != "cpu":
        return
    try:
        cluster = generic_cluster(find_device("cpu")).with_devices(run.parallel.num_ranks)
        stages = predict_run(run, cluster).stages
    except MeshwrightError:
        return  # what cannot be predicted is tried
    state = max(
        sum(stage.items.get(name, 0.0) for name in _STATE) + sum(stage.host_items.values())
        for stage in stages
    )
    num_ranks, free = ranks_on_this_host(), this_machine().free_memory_bytes
    if state * num_ranks <= free:
        return
    each = f"each of {num_ranks} ranks here needs" if num_ranks > 1 else "the run needs"
    raise PlanError(
        f"{each} {show_bytes(state)} for weights, gradients and optimizer, and this machine has "
        f"{show_bytes(free)} of memory free",
        where="device=cpu",
        hint="train it where there are GPUs, or a smaller model here (model.num_layers=2, model.width=...)",
    )


def lack_of_room(error: BaseException, run_dir: Path, *, rank: int) -> RunError | None:
    """A run that ended because memory or disk were full, in words; None where that is not why."""
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return RunError(
            f"the run directory can no longer be written: {error.strerror}",
            where=str(run_dir),
            hint="make room, then start the same command again: it goes on from the last checkpoint",
        )
    if is_out_of_memory(error):
        return RunError(
            f"rank {rank} ran out of memory outside of a step: {' '.join(str(error).split())[:200]}",
            where=str(run_dir),
            hint="weights and optimizer states do not fit: use a higher parallel.zero, or more ranks",
        )
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """A device or a host that has no memory left; torch has no class of its own for the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
