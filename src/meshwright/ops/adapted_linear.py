"""Frozen matrices on one input with their low-rank adapters (LoRA).

    forward    u[T, R]  = x[T, K] A^T                 one matmul for the A of all adapters
               y[T, N]  = u B^T,  y += x W^T          of all matrices, concatenated by rows
    dgrad      du = dy B,  dx = du A,  dx += dy W
    wgrad      dA = du^T x,  dB = dy^T u              W is frozen and has none

B is block-diagonal: every matrix has its own ranks. The FLOPs of its zeros are few: the small matmuls are
bound by the memory traffic of y and dy. What the adapter adds is written first, and the frozen matmul adds to
it in its epilogue. The other way round, y and dx are written, read and written again (H200, 8192 tokens, the
gate-up projection of Llama-3.1-8B: 0.40 instead of 0.16 ms). B comes multiplied by the adapter's scale.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula

from meshwright.ops.autograd_function import applied
from meshwright.ops.fused_linear import concatenated
from meshwright.ops.nf4 import concatenated_nf4
from meshwright.ops.nf4_nested import NestedPlace, unnest_absmax

_Layout = tuple[int, list[int]]
"""Number of weights among the tensors, and the numbers of each nested table's place, one after the other."""


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
    x_TK = x.flatten(0, -2).to(dtype)
    a_RK, b_NR = joined_factors(weights, factors, x_TK)
    tables, places = [table for table, _ in nested], [number for _, place in nested for number in place]
    layout = (len(weights), places)
    y_TN: Tensor = applied(_AdaptedLinear, x_TK, a_RK, b_NR, layout, *weights, *absmax, *tables)
    return y_TN.unflatten(0, x.shape[:-1])


def joined_factors(
    weights: Sequence[Tensor], factors: Sequence[tuple[Tensor, Tensor] | None], x_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """A[R, K] of all adapters and the block-diagonal B[N, R], in the dtype of x; R = 0 without adapters."""
    pairs = [pair for pair in factors if pair is not None]
    num_ranks = sum(len(a) for a, _ in pairs)
    if num_ranks == 0:
        return x_TK.new_empty((0, x_TK.shape[1])), x_TK.new_empty((sum(len(one) for one in weights), 0))
    blocks, left = [], 0
    for weight, pair in zip(weights, factors, strict=True):
        b = x_TK.new_zeros((len(weight), 0)) if pair is None else pair[1].to(x_TK.dtype)
        blocks.append(pad(b, (left, num_ranks - left - b.shape[1])))
        left += b.shape[1]
    return torch.cat([a for a, _ in pairs]).to(x_TK.dtype), torch.cat(blocks)


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, a_RK: Tensor, b_NR: Tensor, layout: _Layout, *frozen: Tensor
    ) -> Tensor:
        y_TN, u_TR = adapted_matmul(x_TK, a_RK, b_NR, *_parts(frozen, layout), layout[1])
        ctx.save_for_backward(x_TK if len(a_RK) else None, a_RK, b_NR, u_TR, *frozen)
        ctx.layout = layout
        return y_TN

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TK, a_RK, b_NR, u_TR, *frozen = ctx.saved_tensors
        du_TR = dy_TN @ b_NR
        dx_TK = adapted_dgrad(dy_TN, du_TR, a_RK, *_parts(frozen, ctx.layout), ctx.layout[1])
        no_gradients = [None for _ in frozen]
        if x_TK is None:
            return dx_TK, None, None, None, *no_gradients
        return dx_TK, du_TR.mT @ x_TK, dy_TN.mT @ u_TR, None, *no_gradients


def _parts(frozen: Sequence[Tensor], layout: _Layout) -> tuple[Sequence[Tensor], ...]:
    """The weights, their absmax where they are NF4, and the tables of nested NF4."""
    num_weights, _ = layout
    return frozen[:num_weights], frozen[num_weights : 2 * num_weights], frozen[2 * num_weights :]


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
        size = len(NestedPlace._fields)
        places = [where[start : start + size] for start in range(0, len(where), size)]
        absmax = [
            unnest_absmax(codes, table, NestedPlace(*place)).view(torch.int32)
            for codes, table, place in zip(absmax, tables, places, strict=True)
        ]
    return concatenated_nf4(weights, absmax, dtype)


@torch.library.custom_op("meshwright::adapted_matmul", mutates_args=())
def adapted_matmul(
    x_TK: Tensor,
    a_RK: Tensor,
    b_NR: Tensor,
    weights: Sequence[Tensor],
    absmax: Sequence[Tensor],
    tables: Sequence[Tensor],
    where: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """y[T, N] and u[T, R]."""
    u_TR = x_TK @ a_RK.mT
    weight_NK = _matrix(weights, absmax, tables, where, x_TK.dtype)
    if not len(a_RK):
        return x_TK @ weight_NK.mT, u_TR
    return (u_TR @ b_NR.mT).addmm_(x_TK, weight_NK.mT), u_TR


@adapted_matmul.register_fake
def _(x_TK: Tensor, a_RK: Tensor, b_NR: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x_TK.new_empty((len(x_TK), len(b_NR))), x_TK.new_empty((len(x_TK), len(a_RK)))


@torch.library.custom_op("meshwright::adapted_dgrad", mutates_args=())
def adapted_dgrad(
    dy_TN: Tensor,
    du_TR: Tensor,
    a_RK: Tensor,
    weights: Sequence[Tensor],
    absmax: Sequence[Tensor],
    tables: Sequence[Tensor],
    where: Sequence[int],
) -> Tensor:
    """dx[T, K]."""
    weight_NK = _matrix(weights, absmax, tables, where, dy_TN.dtype)
    return (du_TR @ a_RK).addmm_(dy_TN, weight_NK) if len(a_RK) else dy_TN @ weight_NK


@adapted_dgrad.register_fake
def _(dy_TN: Tensor, du_TR: Tensor, a_RK: Tensor, *_: Any) -> Tensor:
    return dy_TN.new_empty((len(dy_TN), a_RK.shape[1]))


@register_flop_formula(torch.ops.meshwright.adapted_matmul)
def _(x_TK: torch.Size, a_RK: torch.Size, b_NR: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * x_TK[0] * (b_NR[0] * x_TK[1] + a_RK.numel() + b_NR.numel())


@register_flop_formula(torch.ops.meshwright.adapted_dgrad)
def _(dy_TN: torch.Size, du_TR: torch.Size, a_RK: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * dy_TN[0] * (dy_TN[1] * a_RK[1] + a_RK.numel())


# The forward matmul, whose output selective recompute saves.
ADAPTED_OPERATORS = (torch.ops.meshwright.adapted_matmul.default,)
