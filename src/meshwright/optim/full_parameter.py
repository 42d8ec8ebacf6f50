"""The full parameter behind a shard, for optimizers that look beyond their own elements.

A norm, a row mean or a block's largest value is that of the full parameter: each rank computes it over its
shard, and the results are all-reduced over the axes that shard the parameter. Axes that only replicate it are
left out, so every replica gets the same update without communication.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

Axes = tuple[dist.ProcessGroup, ...]


@dataclass(frozen=True)
class FullParameter:
    """The place of a shard in its full parameter, and the groups of the ranks that hold the rest."""

    name: str
    shape: torch.Size
    """Shape of the full parameter."""
    local_slices: tuple[slice, ...]
    """Slices of the full parameter that this rank's shard holds."""
    sharded_dims: tuple[tuple[int, dist.ProcessGroup], ...]
    """(dim, group) of each axis that shards the parameter."""
    gather: Callable[[Tensor], Tensor]
    """All-gathers tensors of the shard's shape to the full one, on every rank."""

    def axes(self, *dims: int) -> Axes:
        """The groups that shard one of these dims (may be negative); without dims, all groups."""
        wanted = {dim % len(self.shape) for dim in dims} if dims else set(range(len(self.shape)))
        return tuple(group for dim, group in self.sharded_dims if dim in wanted)


def unsharded(name: str, shard: Tensor) -> FullParameter:
    """A parameter that this rank holds in full."""
    slices = tuple(slice(0, size) for size in shard.shape)
    return FullParameter(name, shard.shape, slices, (), lambda tensor: tensor)


def all_reduce_together(
    parts: Sequence[tuple[Tensor, Axes]], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> list[Tensor]:
    """Each tensor all-reduced over its own axes; tensors with the same axes share one all-reduce.

    Every rank of a group must pass its tensors in the same order and with the same shapes.
    """
    together: dict[tuple[str, ...], list[int]] = {}
    for index, (_, axes) in enumerate(parts):
        together.setdefault(tuple(group.group_name for group in axes), []).append(index)
    results = [tensor for tensor, _ in parts]
    for indices in together.values():
        axes = parts[indices[0]][1]
        if not axes:
            continue
        bucket = torch.cat([results[index].reshape(-1) for index in indices])
        for group in axes:
            dist.all_reduce(bucket, op=op, group=group)
        sizes = [results[index].numel() for index in indices]
        for index, piece in zip(indices, bucket.split(sizes), strict=True):
            results[index] = piece.view_as(results[index])
    return results


def full_norms(parts: Sequence[tuple[Tensor, FullParameter]]) -> list[Tensor]:
    """The Euclidean norm of the full tensor of each shard; fp64 scalars, no host sync."""
    # Squares of fp32 values are summed in fp64: a norm near fp32's limits must not overflow.
    squares = [(torch.linalg.vector_norm(tensor).double().square(), full.axes()) for tensor, full in parts]
    return [square.sqrt() for square in all_reduce_together(squares)]
