"""Whether this machine has the memory for a run on its CPU: asked before the kernel has to end processes."""

import torch

from meshwright.errors import MeshwrightError, PlanError
from meshwright.hardware.catalogue import find_device, generic_cluster
from meshwright.hardware.machine import this_machine
from meshwright.memory.offload.budget import ranks_on_this_host
from meshwright.plan.predict import predict_run
from meshwright.spec import RunSpec
from meshwright.units import show_bytes

_STATE = ("weights", "gradients", "optimizer")


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


def is_out_of_memory(error: BaseException) -> bool:
    """A device or a host that has no memory left; torch has no class of its own for the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
