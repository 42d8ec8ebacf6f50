"""The local shard of a parameter that may be a DTensor."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor


def local(parameter: Tensor) -> Tensor:
    """This rank's shard of a parameter, as a plain tensor; gradients flow back to the parameter.

    Each rank uses a replicated parameter on another part of the sequence or of the heads, so its gradient is
    one term of a sum over ranks: Partial.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    grads = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
    return parameter.to_local(grad_placements=grads)


def local_slices(parameter: Tensor) -> tuple[slice, ...]:
    """The slices of the full tensor that this rank's shard holds. Does not communicate.

    torch shards an index along each dim the way it sharded the parameter, so torch itself answers for every
    placement, uneven and nested ones too; a shard is one contiguous box in all of them.
    """
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    return tuple(_local_slice(parameter, dim) for dim in range(parameter.ndim))


def _local_slice(parameter: DTensor, dim: int) -> slice:
    # Not is_shard(): nested sharding (FSDP over tp) has a placement class that returns False.
    placements = [p if getattr(p, "dim", None) == dim else Replicate() for p in parameter.placements]
    size = parameter.shape[dim]
    if all(placement.is_replicate() for placement in placements):
        return slice(0, size)
    shape = [size if each == dim else 1 for each in range(parameter.ndim)]
    index = torch.arange(size, device=parameter.device_mesh.device_type).view(shape)
    rows = (
        distribute_tensor(index, parameter.device_mesh, placements, src_data_rank=None).to_local().flatten()
    )
    if not len(rows):
        return slice(0, 0)
    first, last = int(rows[0]), int(rows[-1]) + 1
    assert last - first == len(rows), f"rows {rows.tolist()} of dim {dim} are not contiguous"
    return slice(first, last)
