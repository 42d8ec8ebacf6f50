"""Shards a model's parameters over tp and ep by the placement table (`spec/placement.py`)."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from meshwright.mesh import Mesh
from meshwright.spec.placement import ep_dim, is_routed_expert, tp_dim


def shard_parameters(model: nn.Module, mesh: Mesh) -> None:
    """Make every parameter a DTensor over its inner axes (tp, ep); one without inner axes stays as it is.

    The model is on the meta device, so nothing is moved.
    """
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            axes, placements = inner_placements(f"{module_name}.{name}" if module_name else name, mesh)
            if axes is not None:
                sharded = distribute_tensor(parameter, axes, placements, src_data_rank=None)
                module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def inner_placements(name: str, mesh: Mesh) -> tuple[DeviceMesh | None, list[Placement]]:
    """The axes inside data parallelism that a parameter lives on, and its placement on each."""
    parallel = mesh.parallel
    dim = tp_dim(name, parallel)
    over_tp: Placement = Replicate() if dim is None else Shard(dim)
    if is_routed_expert(name) and parallel.ep > 1:
        over_ep = Shard(ep_dim(name) or 0)
        if parallel.tp > 1:
            return mesh.expert[("ep", "tp")], [over_ep, over_tp]
        return mesh.expert["ep"], [over_ep]
    return (mesh.dense["tp"], [over_tp]) if parallel.tp > 1 else (None, [])
