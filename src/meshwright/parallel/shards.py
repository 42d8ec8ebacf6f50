"""What this rank updates: for each parameter the shard it owns, and where that shard lies in the whole.

Every way of cutting state (ZeRO stages, tp, ep, pipeline stages) ends in the same list. The optimizer,
the gradient norm and checkpoints read nothing else, so they know no axis by name.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

# The order of cuts on one dim is not in the public Shard: when tp has cut dim 0 and ZeRO cuts the rest of it
# again, the shards of one ZeRO rank are not contiguous in the whole. FSDP2 uses the same class for this.
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.mesh import Mesh
from meshwright.optim.full_parameter import Whole
from meshwright.spec.placement import is_routed_expert


@dataclasses.dataclass
class OwnedParameter:
    """A parameter of this rank's pipeline stage(s) and the part of it that this rank updates."""

    name: str
    parameter: nn.Parameter
    """What the model computes with; a DTensor when tp, ep or ZeRO-3 cut it."""
    shard: nn.Parameter
    """Plain tensor that shares storage with `parameter`: what the optimizer updates."""
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    """Of the whole parameter."""
    norm_share: float
    """1 / ranks that hold this very shard; 0 for a second copy of a tied weight."""

    def as_global(self, tensor: Tensor, dims: Sequence[int | None] | None = None) -> DTensor:
        """A tensor of the shard's shape as its part of the whole: what checkpoints and tests see.

        A tensor of another shape tells by `dims` which dim of the parameter each of its own is cut with;
        None: that one is whole on every rank.
        """
        dims = range(len(self.shape)) if dims is None else dims
        pairs = zip(dims, tensor.shape, strict=True)
        shape = torch.Size([size if dim is None else self.shape[dim] for dim, size in pairs])
        return DTensor.from_local(
            tensor.detach(),
            self.mesh if tensor.device.type == self.mesh.device_type else host_mesh(self.mesh),
            [_along(place, dims) for place in self.placements],
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )


@functools.cache
def host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks and groups for tensors in host memory: a mesh of the device would copy them to it."""
    groups = mesh.get_all_groups()
    return DeviceMesh.from_group(
        groups if mesh.ndim > 1 else groups[0], "cpu", mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names
    )


def _along(place: Placement, dims: Sequence[int | None]) -> Placement:
    """The placement of a tensor whose dims go along with these dims of the parameter."""
    if place.is_replicate() or _cut_dim(place) not in dims:
        return Replicate()
    dim = dims.index(_cut_dim(place))
    return (
        _StridedShard(dim, split_factor=place.split_factor)
        if isinstance(place, _StridedShard)
        else Shard(dim)
    )


def _cut_dim(place: Placement) -> int:
    return place.dim  # pyright: ignore[reportAttributeAccessIssue]  every cut has one


def held_slices(one: OwnedParameter) -> tuple[slice, ...]:
    """Where this rank's shard lies in the whole parameter; a shard is one contiguous box.

    Cuts are made in the order of the mesh, except that a strided one (ZeRO over rows that tp or ep
    have cut already) comes after the others.
    """
    bounds = [(0, size) for size in one.shape]
    for axis in sorted(range(one.mesh.ndim), key=lambda axis: not isinstance(one.placements[axis], Shard)):
        place = one.placements[axis]
        if place.is_replicate():
            continue
        dim = _cut_dim(place)
        begin, end = bounds[dim]
        first, last = chunk_rows(end - begin, one.mesh.size(axis), one.mesh.get_local_rank(axis))
        bounds[dim] = (begin + first, begin + last)
    slices = tuple(slice(begin, end) for begin, end in bounds)
    held = tuple(part.stop - part.start for part in slices)
    assert held == tuple(one.shard.shape), f"{one.name}: {held} of {one.shape}, holds {one.shard.shape}"
    return slices


def whole_of(one: OwnedParameter) -> Whole:
    """What update rules may know of the parameter behind a shard."""
    cuts = tuple(
        (_cut_dim(place), one.mesh.get_group(axis))
        for axis, place in enumerate(one.placements)
        if not place.is_replicate() and one.mesh.size(axis) > 1
    )
    return Whole(
        one.name, one.shape, held_slices(one), cuts, lambda tensor: one.as_global(tensor).full_tensor()
    )


def state_axes(name: str, mesh: Mesh) -> tuple[DeviceMesh, str]:
    """The mesh that cuts the state of a parameter, and the axis of it that ZeRO divides over."""
    if is_routed_expert(name) and mesh.parallel.ep > 1:
        return mesh.expert, "expert_shard"
    return mesh.dense, "shard"


def chunk_rows(num_rows: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Begin and end of one chunk of dim 0; like torch.chunk, the last chunks may be short or empty."""
    size = -(-num_rows // num_chunks)
    return min(index * size, num_rows), min((index + 1) * size, num_rows)


def own(name: str, parameter: nn.Parameter, mesh: Mesh, *, is_counted: bool = True) -> OwnedParameter:
    """The owned form of one parameter, by the ZeRO stage of the mesh."""
    axes, shard_axis = state_axes(name, mesh)
    if mesh.parallel.zero == 3:
        owned = _own_fsdp(name, parameter)
    else:
        owned = _own_chunk(name, parameter, axes, shard_axis, is_cut=mesh.parallel.zero in (1, 2))
    ranks_per_stage = mesh.parallel.num_ranks // mesh.parallel.pp
    distinct = math.prod(
        size
        for size, place in zip(owned.mesh.shape, owned.placements, strict=True)
        if not place.is_replicate()
    )
    return dataclasses.replace(owned, norm_share=is_counted * distinct / ranks_per_stage)


def _own_fsdp(name: str, parameter: nn.Parameter) -> OwnedParameter:
    """ZeRO-3: FSDP2 made the parameter a DTensor whose local part is the shard."""
    assert isinstance(parameter, DTensor)
    shard = _share_storage(parameter.to_local(), parameter)
    return OwnedParameter(
        name, parameter, shard, parameter.device_mesh, parameter.placements, parameter.shape, 1.0
    )


def _own_chunk(
    name: str, parameter: nn.Parameter, axes: DeviceMesh, shard_axis: str, *, is_cut: bool
) -> OwnedParameter:
    """ZeRO-0..2: the model holds the whole (tp-local) parameter; the shard is a chunk of its rows."""
    inner_names, inner = _inner_cuts(parameter)
    whole = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    state_mesh = axes[("dp_replicate", shard_axis, *inner_names)]
    if not is_cut or whole.ndim == 0:  # a single number has no rows to divide
        shard = _share_storage(whole.detach(), parameter)
        return OwnedParameter(
            name, parameter, shard, state_mesh, (Replicate(), Replicate(), *inner), parameter.shape, 1.0
        )
    begin, end = chunk_rows(whole.shape[0], axes[shard_axis].size(), axes.get_local_rank(shard_axis))
    shard = _share_storage(whole.detach()[begin:end], parameter)
    placements = (Replicate(), _row_cut(inner, state_mesh), *inner)
    return OwnedParameter(name, parameter, shard, state_mesh, placements, parameter.shape, 1.0)


def _inner_cuts(parameter: nn.Parameter) -> tuple[tuple[str, ...], tuple[Placement, ...]]:
    if not isinstance(parameter, DTensor):
        return (), ()
    return parameter.device_mesh.mesh_dim_names or (), parameter.placements


def _row_cut(inner: tuple[Placement, ...], state_mesh: DeviceMesh) -> Placement:
    """ZeRO cuts rows after the inner axes have: strided where one of them cut rows too."""
    sizes = state_mesh.shape[2:]
    split = math.prod(n for n, place in zip(sizes, inner, strict=True) if place.is_shard(0))
    return _StridedShard(0, split_factor=split) if split > 1 else Shard(0)


def set_gradient_dtype(owned: Sequence[OwnedParameter], dtype: torch.dtype, *, by_fsdp: bool) -> None:
    """Let gradients of bf16 weights be summed in fp32; FSDP keeps its own in the weights' dtype."""
    for one in owned:
        if one.parameter.requires_grad and one.shard.dtype != dtype:
            one.shard.grad_dtype = dtype
            if not by_fsdp:
                one.parameter.grad_dtype = dtype


def _share_storage(tensor: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=parameter.requires_grad)
