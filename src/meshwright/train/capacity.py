"""Memory and disk of this machine: whether a run on its CPU can fit, and the errors when either is full."""

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
_LONGEST_TEXT = 300


def require_capacity(run: RunSpec, device: torch.device) -> None:
    """Raise PlanError where even the state of the ranks of this host is more than its memory.

    Activations are left out, so nothing is refused that could run. On CUDA the device itself refuses.
    """
    if device.type != "cpu":
        return
    try:
        cluster = generic_cluster(find_device("cpu")).with_devices(run.parallel.num_ranks)
        stages = predict_run(run, cluster).stages
    except MeshwrightError:
        return  # a run without a prediction is tried
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


def capacity_error(error: BaseException, run_dir: Path, *, rank: int) -> RunError | None:
    """The error of a run that ended because memory or disk were full; None where that is not why.

    An OOM in a step has a text of its own (`oom_report`), so this one is of building the run.
    """
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return RunError(
            f"the run directory can no longer be written: {error.strerror}",
            where=str(run_dir),
            hint="free disk space, then start the same command again: it resumes from the newest checkpoint",
        )
    oom = out_of_memory_in(error)
    if oom is not None:
        return RunError(
            f"rank {rank} ran out of memory outside of a step: {one_line(oom)}",
            where=str(run_dir),
            hint="weights and optimizer states do not fit: use a higher parallel.zero, or more ranks",
        )
    return None


def out_of_memory_in(error: BaseException | None) -> BaseException | None:
    """The OOM of a device or of the host that caused an error; None where there is none.

    torch's pipeline wraps what a stage raises, and torch has no class of its own for host memory.
    """
    while error is not None:
        is_oom = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if is_oom or "DefaultCPUAllocator" in str(error):
            return error
        error = error.__cause__
    return None


def one_line(error: BaseException) -> str:
    """The text of an error in one line of bounded length."""
    return " ".join(str(error).split())[:_LONGEST_TEXT]
