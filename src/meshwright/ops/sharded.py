"""How layers read a parameter that may be cut over tp."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, as a plain tensor; gradients flow back to the parameter.

    A parameter that an axis does not cut is used by each of its ranks on another part of the
    sequence or of the heads, so the gradient each rank finds is one term of a sum: Partial.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    grads = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
    return parameter.to_local(grad_placements=grads)


def held_part(parameter: Tensor) -> tuple[slice, ...]:
    """Where this rank's part of a parameter lies in the whole tensor. Does not communicate.

    torch cuts an index per dim the way it cut the parameter, so every kind of cut, uneven and nested
    ones too, is answered by torch itself; a part is one contiguous box in all of them.
    """
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    return tuple(_held_rows(parameter, dim) for dim in range(parameter.ndim))


def _held_rows(parameter: DTensor, dim: int) -> slice:
    # Not is_shard(): a nested cut (FSDP over tp) has a class of its own that answers no to it.
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
