"""The whole parameter behind a shard, for update rules that look beyond their own elements.

A norm, a row mean or a block's largest value is of the whole parameter: each rank computes its part, and
the parts are joined over the axes that cut the parameter. Axes that only replicate it are left alone, so
every copy goes the same way without communication.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

Axes = tuple[dist.ProcessGroup, ...]


@dataclass(frozen=True)
class Whole:
    """Where a shard lies in its parameter, and how ranks that hold the rest are reached."""

    name: str
    shape: torch.Size
    """Of the whole parameter."""
    box: tuple[slice, ...]
    """This rank's part of it."""
    cuts: tuple[tuple[int, dist.ProcessGroup], ...]
    """(dim, group) of each axis that cuts it."""
    gather: Callable[[Tensor], Tensor]
    """A tensor of the shard's shape on every rank -> the whole one, on every rank."""

    def axes(self, *dims: int) -> Axes:
        """The groups that cut one of these dims (negative ones count from the end); none given: all."""
        wanted = {dim % len(self.shape) for dim in dims} if dims else set(range(len(self.shape)))
        return tuple(group for dim, group in self.cuts if dim in wanted)


def uncut(name: str, shard: Tensor) -> Whole:
    """A parameter that lies here whole."""
    box = tuple(slice(0, size) for size in shard.shape)
    return Whole(name, shard.shape, box, (), lambda tensor: tensor)


def reduce_together(
    parts: Sequence[tuple[Tensor, Axes]], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> list[Tensor]:
    """Each tensor reduced over its own axes; those with the same axes travel in one all-reduce.

    Every rank of a group must give its tensors in the same order and with the same shapes.
    """
    together: dict[tuple[str, ...], list[int]] = {}
    for index, (_, axes) in enumerate(parts):
        together.setdefault(tuple(group.group_name for group in axes), []).append(index)
    results = [tensor for tensor, _ in parts]
    for indices in together.values():
        axes = parts[indices[0]][1]
        if not axes:
            continue
        flat = torch.cat([results[index].reshape(-1) for index in indices])
        for group in axes:
            dist.all_reduce(flat, op=op, group=group)
        sizes = [results[index].numel() for index in indices]
        for index, piece in zip(indices, flat.split(sizes), strict=True):
            results[index] = piece.view_as(results[index])
    return results


def whole_norms(parts: Sequence[tuple[Tensor, Whole]]) -> list[Tensor]:
    """The Euclidean norm of each whole tensor, of which a shard is given; fp64 scalars, no host sync."""
    # Squares of fp32 values are summed in fp64: a norm near fp32's limits must not overflow.
    squares = [(torch.linalg.vector_norm(tensor).double().square(), whole.axes()) for tensor, whole in parts]
    return [square.sqrt() for square in reduce_together(squares)]
