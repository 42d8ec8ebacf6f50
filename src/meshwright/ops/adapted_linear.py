"""Frozen matrices on one input with their low-rank adapters (LoRA) in one operator.

    forward    y[T, N]  = x[T, K] W^T                 of all matrices, concatenated by rows
               u[T, R]  = x A^T                       one matmul for the A of all adapters
               y_i     += u_i B_i^T                   added in the matmul, into the columns of matrix i
    dgrad      du_i     = dy_i B_i,  dx = dy W,  dx += du A
    wgrad      dA = du^T x,  dB_i = dy_i^T u_i        W is frozen and has none

Written with separate operators, every adapter would write and read an output of the size of y and a gradient
of the size of x once more, and recompute (activation checkpointing) would save them. B comes multiplied by
the adapter's scale.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from meshwright.ops.fused_linear import concatenated
from meshwright.ops.nf4 import concatenated_nf4
from meshwright.ops.nf4_nested import NestedPlace, unnest_absmax

_Layout = tuple[tuple[int, int], list[int]]
"""Numbers of adapters and of weights among the tensors, and three numbers of each nested table's place."""


def adapted_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    factors: Sequence[tuple[Tensor, Tensor] | None],
    dtype: torch.dtype,
    *,
    absmax: Sequence[Tensor] = (),
    nested: Sequence[tuple[Tensor, NestedPlace]] = (),
) -> Tensor:
    """x W^T + (x A^T) B^T over the last dim of x, computed in `dtype`: all matrices, concatenated.

    `factors` has (A, scaled B) of each matrix, or None for a matrix without an adapter. With `absmax` the
    weights are packed NF4, and are dequantised in each pass; with `nested` the absmax is codes, and these are
    the table and the place of each.
    """
    pairs = [pair for pair in factors if pair is not None]
    x_TK = x.flatten(0, -2).to(dtype)
    a_RK = torch.cat([a for a, _ in pairs]).to(dtype) if pairs else x_TK.new_empty((0, x_TK.shape[1]))
    bs = [b.to(dtype) for _, b in pairs]
    counts = (len(bs), len(weights))
    tables, places = [table for table, _ in nested], [number for _, place in nested for number in place]
    y_TN: Tensor = _AdaptedLinear.apply(  # pyright: ignore[reportAssignmentType]
        x_TK, a_RK, _places(weights, factors), (counts, places), *bs, *weights, *absmax, *tables
    )
    return y_TN.unflatten(0, x.shape[:-1])


def _places(weights: Sequence[Tensor], factors: Sequence[tuple[Tensor, Tensor] | None]) -> list[int]:
    """The first column of y of each matrix with an adapter."""
    starts, start = [], 0
    for weight, pair in zip(weights, factors, strict=True):
        if pair is not None:
            starts.append(start)
        start += len(weight)
    return starts


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, a_RK: Tensor, places: list[int], layout: _Layout, *rest: Tensor
    ) -> Tensor:
        bs, weights, absmax, tables = _parts(rest, layout)
        y_TN, u_TR = adapted_matmul(x_TK, a_RK, places, bs, weights, absmax, tables, layout[1])
        ctx.save_for_backward(x_TK if bs else None, a_RK, u_TR, *rest)
        ctx.places, ctx.layout = places, layout
        return y_TN

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TK, a_RK, u_TR, *rest = ctx.saved_tensors
        bs, weights, absmax, tables = _parts(rest, ctx.layout)
        dx_TK, du_TR = adapted_dgrad(dy_TN, a_RK, ctx.places, bs, weights, absmax, tables, ctx.layout[1])
        frozen = [None for _ in (*weights, *absmax, *tables)]
        if not bs:
            return dx_TK, None, None, None, *frozen
        da_RK, *dbs = adapted_wgrad(dy_TN, x_TK, u_TR, du_TR, ctx.places, bs)
        return dx_TK, da_RK, None, None, *dbs, *frozen


def _parts(rest: Sequence[Tensor], layout: _Layout) -> tuple[Sequence[Tensor], ...]:
    """B of the adapters, the weights, their absmax where they are NF4, and the tables of nested NF4."""
    num_adapters, num_weights = layout[0]
    ends = num_adapters, num_adapters + num_weights, num_adapters + 2 * num_weights
    return rest[: ends[0]], rest[ends[0] : ends[1]], rest[ends[1] : ends[2]], rest[ends[2] :]


def _matrix(
    weights: Sequence[Tensor],
    absmax: Sequence[Tensor],
    tables: Sequence[Tensor],
    where: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """W[N, K] in `dtype`: the rows of all matrices, dequantised where they are NF4."""
    if not absmax:
        return concatenated(weights, dtype)
    if tables:
        absmax = [
            unnest_absmax(codes, table, NestedPlace(*where[3 * index : 3 * index + 3])).view(torch.int32)
            for index, (codes, table) in enumerate(zip(absmax, tables, strict=True))
        ]
    return concatenated_nf4(weights, absmax, dtype)


@torch.library.custom_op("meshwright::adapted_matmul", mutates_args=())
def adapted_matmul(
    x_TK: Tensor,
    a_RK: Tensor,
    places: Sequence[int],
    bs: Sequence[Tensor],
    weights: Sequence[Tensor],
    absmax: Sequence[Tensor],
    tables: Sequence[Tensor],
    where: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """y[T, N] and u[T, R]."""
    y_TN, u_TR = x_TK @ _matrix(weights, absmax, tables, where, x_TK.dtype).mT, x_TK @ a_RK.mT
    for (part_TN, b), u in zip(_columns(y_TN, places, bs), _ranks(u_TR, bs), strict=True):
        part_TN.addmm_(u, b.mT)
    return y_TN, u_TR


@adapted_matmul.register_fake
def _(
    x_TK: Tensor, a_RK: Tensor, places: Any, bs: Any, weights: Sequence[Tensor], *_: Any
) -> tuple[Tensor, Tensor]:
    num_rows = sum(weight.shape[0] for weight in weights)
    return x_TK.new_empty((x_TK.shape[0], num_rows)), x_TK.new_empty((x_TK.shape[0], a_RK.shape[0]))


@torch.library.custom_op("meshwright::adapted_dgrad", mutates_args=())
def adapted_dgrad(
    dy_TN: Tensor,
    a_RK: Tensor,
    places: Sequence[int],
    bs: Sequence[Tensor],
    weights: Sequence[Tensor],
    absmax: Sequence[Tensor],
    tables: Sequence[Tensor],
    where: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """dx[T, K] and du[T, R]."""
    du_TR = dy_TN.new_empty((dy_TN.shape[0], a_RK.shape[0]))
    for (part_TN, b), du in zip(_columns(dy_TN, places, bs), _ranks(du_TR, bs), strict=True):
        torch.mm(part_TN, b, out=du)
    dx_TK = dy_TN @ _matrix(weights, absmax, tables, where, dy_TN.dtype)
    return dx_TK.addmm_(du_TR, a_RK), du_TR


@adapted_dgrad.register_fake
def _(
    dy_TN: Tensor, a_RK: Tensor, places: Any, bs: Any, weights: Sequence[Tensor], *_: Any
) -> tuple[Tensor, Tensor]:
    num_tokens = dy_TN.shape[0]
    return dy_TN.new_empty((num_tokens, a_RK.shape[1])), dy_TN.new_empty((num_tokens, a_RK.shape[0]))


@torch.library.custom_op("meshwright::adapted_wgrad", mutates_args=())
def adapted_wgrad(
    dy_TN: Tensor, x_TK: Tensor, u_TR: Tensor, du_TR: Tensor, places: Sequence[int], bs: Sequence[Tensor]
) -> list[Tensor]:
    """dA[R, K], then dB of each adapter."""
    pairs = zip(_columns(dy_TN, places, bs), _ranks(u_TR, bs), strict=True)
    return [du_TR.mT @ x_TK, *((part_TN.mT @ u).contiguous() for (part_TN, _), u in pairs)]


@adapted_wgrad.register_fake
def _(
    dy_TN: Tensor, x_TK: Tensor, u_TR: Tensor, du_TR: Tensor, places: Any, bs: Sequence[Tensor]
) -> list[Tensor]:
    return [x_TK.new_empty((u_TR.shape[1], x_TK.shape[1])), *(torch.empty_like(b) for b in bs)]


def _columns(y_TN: Tensor, places: Sequence[int], bs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The columns of each matrix with an adapter, as a view, and its B."""
    return [(y_TN[:, start : start + len(b)], b) for start, b in zip(places, bs, strict=True)]


def _ranks(u_TR: Tensor, bs: Sequence[Tensor]) -> Sequence[Tensor]:
    return u_TR.split([b.shape[1] for b in bs], dim=1)


@register_flop_formula([torch.ops.meshwright.adapted_matmul, torch.ops.meshwright.adapted_dgrad])
def _(rows: torch.Size, a_RK: torch.Size, places: Any, bs: Any, weights: Any, *rest: Any, **_: Any) -> int:
    in_adapters = a_RK.numel() + sum(b.numel() for b in bs)
    num_rows = sum(weight[0] for weight in weights)
    return 2 * rows[0] * (num_rows * a_RK[1] + in_adapters)


@register_flop_formula(torch.ops.meshwright.adapted_wgrad)
def _(
    dy_TN: torch.Size, x_TK: torch.Size, u_TR: torch.Size, du_TR: Any, places: Any, bs: Any, **_: Any
) -> int:
    return 2 * dy_TN[0] * (x_TK[1] * u_TR[1] + sum(b.numel() for b in bs))


# The forward matmul, whose output selective recompute saves.
ADAPTED_OPERATORS = (torch.ops.meshwright.adapted_matmul.default,)
