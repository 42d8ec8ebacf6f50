"""Collectives that gradients flow through.

Each one is the transpose of its partner, so its backward is that partner (n ranks in the group):

    forward                                           backward
    all_gather                x[S_n] -> x[S]          reduce_scatter
    reduce_scatter            x{n}[S] -> x[S_n]       all_gather
    all_to_all                x[S_n, H] -> x[S, H_n]  all_to_all with the dims swapped
    all_to_all_rows           rows to their ranks     all_to_all_rows back
    all_reduce_forward        x{n} -> x               identity
    all_reduce_backward       x -> x                  all_reduce
    gather_to_replicated      x[S_n] -> x[S]          this rank's part
    scatter_from_replicated   x[S] -> x[S_n]          all_gather

The last two are for a tensor that every rank uses identically, so that its gradient is complete and equal on
every rank; after `all_gather` each rank uses the tensor differently, and gradients are terms of a sum.

Collectives write into a view of what a Function returns, for the reason given in `ops.cast`.

S_n is a dim sharded over the group; x{n} is a partial sum with one term on each of the n ranks. Ranks of the
group call in the same order with equal shapes. Bytes are those that one rank sends.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.errors import MeshError

# torch 2.13 renamed both and warns about the old names; 2.11 has only the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The shards of all ranks, concatenated along `dim` in rank order; (n - 1) x bytes of x."""
    return _AllGather.apply(x, dim, group)  # pyright: ignore[reportReturnType]


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's shard along `dim` of the sum over ranks; (n - 1) / n x bytes of x."""
    return _ReduceScatter.apply(x, dim, group)  # pyright: ignore[reportReturnType]


def all_to_all(x: Tensor, split_dim: int, concat_dim: int, group: ProcessGroup) -> Tensor:
    """x, full along `concat_dim` and sharded along `split_dim` instead; (n - 1) / n x bytes of x."""
    return _AllToAll.apply(x, split_dim, concat_dim, group)  # pyright: ignore[reportReturnType]


def all_to_all_rows(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """Uneven all-to-all: the first sent[0] rows go to rank 0 and so on; received[r] rows come from rank r."""
    return _AllToAllRows.apply(x, sent, received, group)  # pyright: ignore[reportReturnType]


def all_reduce_forward(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over ranks, for a result that every rank uses identically; 2 (n - 1) / n x bytes of x."""
    return _AllReduceForward.apply(x, group)  # pyright: ignore[reportReturnType]


def all_reduce_backward(x: Tensor, group: ProcessGroup) -> Tensor:
    """x; its gradient is all-reduced, for an input that each rank uses differently."""
    return _AllReduceBackward.apply(x, group)  # pyright: ignore[reportReturnType]


def gather_to_replicated(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """As `all_gather`, for a result that every rank uses identically; (n - 1) x bytes of x."""
    return _GatherToReplicated.apply(x, dim, group)  # pyright: ignore[reportReturnType]


def scatter_from_replicated(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's shard along `dim` of a replicated tensor; forward does not communicate."""
    _require_even(x, dim, group)
    return _ScatterFromReplicated.apply(x, dim, group)  # pyright: ignore[reportReturnType]


def _require_even(x: Tensor, dim: int, group: ProcessGroup) -> int:
    num_parts = group.size()
    if x.shape[dim] % num_parts:
        raise MeshError(
            f"dim {dim} of shape {tuple(x.shape)} does not divide into {num_parts} equal parts",
            where="collective",
            hint="choose a degree that divides this size",
        )
    return num_parts


def all_gather_no_grad(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """As `all_gather`, without gradients."""
    num_parts = group.size()
    if _is_outermost(x, dim):  # the shards are contiguous in the result
        full = x.new_empty((*x.shape[:dim], num_parts * x.shape[dim], *x.shape[dim + 1 :]))
        all_gather_single(full.view(-1), x.contiguous().view(-1), group=group)
        return full
    parts = x.new_empty((num_parts, *x.shape))
    all_gather_single(parts.view(-1), x.contiguous().view(-1), group=group)
    return torch.cat(parts.unbind(), dim)


def _reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    num_parts = _require_even(x, dim, group)
    ordered = x.contiguous() if _is_outermost(x, dim) else torch.stack(x.chunk(num_parts, dim))
    part = x.new_empty((*x.shape[:dim], x.shape[dim] // num_parts, *x.shape[dim + 1 :]))
    reduce_scatter_single(part.view(-1), ordered.view(-1), group=group)
    return part


def _is_outermost(x: Tensor, dim: int) -> bool:
    return x.shape[:dim].numel() == 1


def _all_to_all(x: Tensor, split_dim: int, concat_dim: int, group: ProcessGroup) -> Tensor:
    num_parts = _require_even(x, split_dim, group)
    # x[.., n * s, ..] -> sent[n, .., s, ..]: part i goes to rank i, part i of `received` came from rank i.
    sent = torch.stack(x.chunk(num_parts, dim=split_dim))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), dim=concat_dim)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather_no_grad(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _reduce_scatter(grad, ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_gather_no_grad(grad, ctx.dim, ctx.group), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split_dim: int, concat_dim: int, group: ProcessGroup) -> Tensor:
        ctx.split_dim, ctx.concat_dim, ctx.group = split_dim, concat_dim, group
        return _all_to_all(x, split_dim, concat_dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_to_all(grad, ctx.concat_dim, ctx.split_dim, ctx.group), None, None, None


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all_rows(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_to_all_rows(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all_rows(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out.view_as(out), x.contiguous(), received, sent, group=group)
    return out


class _AllReduceForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total.view_as(total), group=group)
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


class _GatherToReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather_no_grad(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()].contiguous(), None, None


class _ScatterFromReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return x.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_gather_no_grad(grad, ctx.dim, ctx.group), None, None
