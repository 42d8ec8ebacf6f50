"""Collectives that gradients flow through.

Each one is the transpose of its partner, so its backward is that partner (n ranks in the group):

    forward                                  backward
    all_gather            x[S_n] -> x[S]     reduce_scatter
    reduce_scatter        x{n}[S] -> x[S_n]  all_gather
    all_to_all            x[S_n, H] -> x[S, H_n]  all_to_all with the dims exchanged
    all_reduce_forward    x{n} -> x          identity
    all_reduce_backward   x -> x             all_reduce

S_n is a dim cut over the group; x{n} is a sum whose terms still lie on the n ranks. Ranks of the group
call in the same order with equal shapes. Bytes are per rank and count what it sends.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.errors import MeshError

# torch 2.13 renamed both and warns about the old names; 2.11 knows only the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The parts of every rank, joined along `dim` in rank order; (n - 1) x bytes of x."""
    return _AllGather.apply(x, dim, group)  # pyright: ignore[reportReturnType]


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's part along `dim` of the sum over ranks; (n - 1) / n x bytes of x."""
    return _ReduceScatter.apply(x, dim, group)  # pyright: ignore[reportReturnType]


def all_to_all(x: Tensor, split_dim: int, concat_dim: int, group: ProcessGroup) -> Tensor:
    """Whole along `concat_dim`, cut along `split_dim` instead; (n - 1) / n x bytes of x."""
    return _AllToAll.apply(x, split_dim, concat_dim, group)  # pyright: ignore[reportReturnType]


def all_reduce_forward(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over ranks; for a result that every rank then uses alike. 2 (n - 1) / n x bytes of x."""
    return _AllReduceForward.apply(x, group)  # pyright: ignore[reportReturnType]


def all_reduce_backward(x: Tensor, group: ProcessGroup) -> Tensor:
    """x itself; its gradient is summed over ranks, for an input that each rank uses differently."""
    return _AllReduceBackward.apply(x, group)  # pyright: ignore[reportReturnType]


def _even_parts(x: Tensor, dim: int, group: ProcessGroup) -> int:
    num_parts = group.size()
    if x.shape[dim] % num_parts:
        raise MeshError(
            f"dim {dim} of shape {tuple(x.shape)} does not divide into {num_parts} equal parts",
            where="collective",
            hint="choose a degree that divides this size",
        )
    return num_parts


def _gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    part = x.movedim(dim, 0).contiguous()
    whole = part.new_empty((group.size() * part.shape[0], *part.shape[1:]))
    _all_gather_single(whole, part, group=group)
    return whole.movedim(0, dim)


def _scatter_sum(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    num_parts = _even_parts(x, dim, group)
    whole = x.movedim(dim, 0).contiguous()
    part = whole.new_empty((whole.shape[0] // num_parts, *whole.shape[1:]))
    _reduce_scatter_single(part, whole, group=group)
    return part.movedim(0, dim)


def _exchange(x: Tensor, split_dim: int, concat_dim: int, group: ProcessGroup) -> Tensor:
    num_parts = _even_parts(x, split_dim, group)
    # x[.., n * s, ..] -> sent[n, .., s, ..]: part i goes to rank i, part i of `received` came from rank i.
    sent = torch.stack(x.chunk(num_parts, dim=split_dim))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), dim=concat_dim)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _scatter_sum(grad, ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _scatter_sum(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gather(grad, ctx.dim, ctx.group), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split_dim: int, concat_dim: int, group: ProcessGroup) -> Tensor:
        ctx.split_dim, ctx.concat_dim, ctx.group = split_dim, concat_dim, group
        return _exchange(x, split_dim, concat_dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchange(grad, ctx.concat_dim, ctx.split_dim, ctx.group), None, None, None


class _AllReduceForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


class _AllReduceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
