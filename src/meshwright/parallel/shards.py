"""The parameter shards of this rank: what it updates, and where each shard lies in the full parameter.

Every way to shard state (ZeRO stages, tp, ep, pipeline stages) ends in the same list. The optimizer, the
gradient norm and checkpoints read nothing else, so they know no axis by name.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from meshwright.mesh import Mesh
from meshwright.ops.collectives import all_gather_no_grad
from meshwright.optim.full_parameter import FullParameter
from meshwright.parallel.torch_strided_shard import is_strided, moved_to_dim, row_shard, sharded_dim
from meshwright.spec.placement import is_routed_expert


@dataclasses.dataclass
class ParameterShard:
    """A parameter of this rank's pipeline stages, and the shard of it that this rank updates."""

    name: str
    parameter: nn.Parameter
    """The parameter that the model computes with; a DTensor when tp, ep or ZeRO-3 shard it."""
    shard: nn.Parameter
    """A plain tensor that shares storage with `parameter`. The optimizer updates it."""
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    """Shape of the full parameter."""
    norm_share: float
    """1 / the number of ranks that hold this very shard; 0 for a second copy of a tied weight."""

    def as_global(self, tensor: Tensor, dims: Sequence[int | None] | None = None) -> DTensor:
        """A tensor of the shard's shape as a DTensor of the full shape, for checkpoints and tests.

        For a tensor of another shape, `dims` gives the parameter dim that each of its dims is sharded with; a
        dim with None is unsharded.
        """
        dims = range(len(self.shape)) if dims is None else dims
        pairs = zip(dims, tensor.shape, strict=True)
        shape = torch.Size([size if dim is None else self.shape[dim] for dim, size in pairs])
        return DTensor.from_local(
            tensor.detach(),
            self.mesh if tensor.device.type == self.mesh.device_type else host_mesh(self.mesh),
            [_placement_along(placement, dims) for placement in self.placements],
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )


@functools.cache
def host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks and groups for tensors in host memory: a device mesh would copy them to the device."""
    groups = mesh.get_all_groups()
    return DeviceMesh.from_group(
        groups if mesh.ndim > 1 else groups[0], "cpu", mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names
    )


def _placement_along(placement: Placement, dims: Sequence[int | None]) -> Placement:
    """The placement of a tensor whose dims are sharded with these dims of the parameter."""
    if placement.is_replicate() or sharded_dim(placement) not in dims:
        return Replicate()
    return moved_to_dim(placement, dims.index(sharded_dim(placement)))


def global_slices(one: ParameterShard) -> tuple[slice, ...]:
    """Where this rank's shard lies in the full parameter; a shard is one contiguous box."""
    slices = _local_slices(one.mesh, one.placements, one.shape)
    found = tuple(part.stop - part.start for part in slices)
    assert found == tuple(one.shard.shape), f"{one.name}: {found} of {one.shape}, holds {one.shard.shape}"
    return slices


def dtensor_slices(tensor: DTensor) -> tuple[slice, ...]:
    """Where the local tensor of a DTensor lies in the full tensor."""
    return _local_slices(tensor.device_mesh, tensor.placements, tensor.shape)


def _local_slices(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> tuple[slice, ...]:
    """The box of this rank. Axes shard in the order of the mesh, except that a strided placement (ZeRO over
    rows that tp or ep have sharded already) comes after the others."""
    bounds = [(0, size) for size in shape]
    for axis in _sharding_axes(placements):
        dim = sharded_dim(placements[axis])
        begin, end = bounds[dim]
        first, last = chunk_rows(end - begin, mesh.size(axis), mesh.get_local_rank(axis))
        bounds[dim] = (begin + first, begin + last)
    return tuple(slice(begin, end) for begin, end in bounds)


def _sharding_axes(placements: Sequence[Placement]) -> list[int]:
    """The mesh axes that shard a tensor, in the order in which they shard it."""
    axes = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    return sorted(axes, key=lambda axis: is_strided(placements[axis]))


def unshard(tensor: DTensor) -> Tensor:
    """The full tensor on every rank: one all-gather for each axis that shards it. Communicates.

    `DTensor.full_tensor` searches for the cheapest sequence of redistributions where a dim is sharded twice,
    which takes seconds for each new combination of shape and placements on a mesh of four axes.
    """
    mesh, placements, local = tensor.device_mesh, tensor.placements, tensor.to_local()
    axes = [axis for axis in _sharding_axes(placements) if mesh.size(axis) > 1]
    for index in reversed(range(len(axes))):
        axis = axes[index]
        outer = [one if number in axes[:index] else Replicate() for number, one in enumerate(placements)]
        dim = sharded_dim(placements[axis])
        rows = _local_slices(mesh, outer, tensor.shape)[dim]
        local = _gather_rows(local, dim, rows.stop - rows.start, mesh.get_group(axis))
    return local


def _gather_rows(local: Tensor, dim: int, num_rows: int, group: dist.ProcessGroup) -> Tensor:
    """The chunks of all ranks of a group along `dim`; the last chunks may be short or empty."""
    size = -(-num_rows // group.size())
    missing = list(local.shape)
    missing[dim] = size - local.shape[dim]
    padded = torch.cat([local, local.new_zeros(missing)], dim) if missing[dim] else local
    return all_gather_no_grad(padded, dim, group).narrow(dim, 0, num_rows).contiguous()


def full_parameter_of(one: ParameterShard) -> FullParameter:
    """What update rules may know of the full parameter behind a shard."""
    sharded = tuple(
        (sharded_dim(placement), one.mesh.get_group(axis))
        for axis, placement in enumerate(one.placements)
        if not placement.is_replicate() and one.mesh.size(axis) > 1
    )
    return FullParameter(
        one.name, one.shape, global_slices(one), sharded, lambda tensor: unshard(one.as_global(tensor))
    )


def state_axes(name: str, mesh: Mesh) -> tuple[DeviceMesh, str]:
    """The mesh that shards the state of a parameter, and the axis of it that ZeRO shards over."""
    if is_routed_expert(name) and mesh.parallel.ep > 1:
        return mesh.expert, "expert_shard"
    return mesh.dense, "shard"


def chunk_rows(num_rows: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Begin and end of one chunk of dim 0; as with torch.chunk, the last chunks may be short or empty."""
    size = -(-num_rows // num_chunks)
    return min(index * size, num_rows), min((index + 1) * size, num_rows)


def parameter_shard(
    name: str, parameter: nn.Parameter, mesh: Mesh, *, is_counted: bool = True
) -> ParameterShard:
    """The shard of one parameter on this rank, by the ZeRO stage of the mesh.

    `is_counted` is False for a second copy of a tied weight, which must not count in the gradient norm.
    """
    found = _fsdp_shard(name, parameter) if mesh.parallel.zero == 3 else _row_chunk(name, parameter, mesh)
    ranks_per_stage = mesh.parallel.num_ranks // mesh.parallel.pp
    distinct = math.prod(
        size
        for size, placement in zip(found.mesh.shape, found.placements, strict=True)
        if not placement.is_replicate()
    )
    return dataclasses.replace(found, norm_share=is_counted * distinct / ranks_per_stage)


def _fsdp_shard(name: str, parameter: nn.Parameter) -> ParameterShard:
    """ZeRO-3: FSDP2 made the parameter a DTensor whose local tensor is the shard."""
    assert isinstance(parameter, DTensor)
    shard = _share_storage(parameter.to_local(), parameter)
    return ParameterShard(
        name, parameter, shard, parameter.device_mesh, parameter.placements, parameter.shape, 1.0
    )


def _row_chunk(name: str, parameter: nn.Parameter, mesh: Mesh) -> ParameterShard:
    """ZeRO-0..2: the model holds the full (tp-local) parameter; the shard is a chunk of its rows."""
    axes, shard_axis = state_axes(name, mesh)
    inner_names, inner = _inner_placements(parameter)
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    state_mesh = mesh.state_mesh(("dp_replicate", shard_axis, *inner_names))
    # A scalar has no rows to shard. A frozen parameter has no state, and no bucket would gather its rows.
    if mesh.parallel.zero == 0 or local.ndim == 0 or not parameter.requires_grad:
        shard = _share_storage(local.detach(), parameter)
        return ParameterShard(
            name, parameter, shard, state_mesh, (Replicate(), Replicate(), *inner), parameter.shape, 1.0
        )
    begin, end = chunk_rows(local.shape[0], axes[shard_axis].size(), axes.get_local_rank(shard_axis))
    shard = _share_storage(local.detach()[begin:end], parameter)
    placements = (Replicate(), _row_placement(inner, state_mesh), *inner)
    return ParameterShard(name, parameter, shard, state_mesh, placements, parameter.shape, 1.0)


def _inner_placements(parameter: nn.Parameter) -> tuple[tuple[str, ...], tuple[Placement, ...]]:
    """Names and placements of the axes inside data parallelism (tp, ep) that a parameter lives on."""
    if not isinstance(parameter, DTensor):
        return (), ()
    return parameter.device_mesh.mesh_dim_names or (), parameter.placements


def _row_placement(inner: tuple[Placement, ...], state_mesh: DeviceMesh) -> Placement:
    """ZeRO shards rows after the inner axes: strided where one of them sharded rows too."""
    sizes = state_mesh.shape[2:]
    return row_shard(
        math.prod(size for size, placement in zip(sizes, inner, strict=True) if placement.is_shard(0))
    )


def set_gradient_dtype(shards: Sequence[ParameterShard], dtype: torch.dtype, *, by_fsdp: bool) -> None:
    """Let gradients of bf16 weights be accumulated in fp32; FSDP keeps its own in the weights' dtype."""
    for one in shards:
        if one.parameter.requires_grad and one.shard.dtype != dtype:
            one.shard.grad_dtype = dtype
            if not by_fsdp:
                one.parameter.grad_dtype = dtype


def _share_storage(tensor: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=parameter.requires_grad)
