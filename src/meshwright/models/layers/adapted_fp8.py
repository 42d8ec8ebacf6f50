"""Frozen matrices on one input, stored in fp8, with their low-rank adapters (LoRA) in bf16.

    forward    u[T, R]  = x[T, K] A^T,  y[T, N] = q(x) W^T,  y += u B^T       one GEMM for all matrices
    dgrad      du = dy B,  dx = q(dy) W,  dx += du A
    wgrad      dA = du^T x,  dB = dy^T u                                     W is frozen and has none

q() is the cast to fp8 of the recipe `current`. The adapters see x and dy as they are. y and dy of several
matrices are one tensor, so that backward casts and transposes once; the bytes of W are packed for that
(`pack_fused_weights`), and are copied where they are not.

Gate and up have h = silu(gate) up in the same function: the kernel that reads q(x) W^T for h adds u B^T
first, and the kernel that writes dy also finds its amax, which the cast needs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from meshwright.ops.adapted_linear import joined_factors
from meshwright.ops.adapted_swiglu import adapted_swiglu, swiglu_gradient_with_amax
from meshwright.ops.autograd_function import applied
from meshwright.ops.fused_linear import concatenated
from meshwright.precision.fp8.linear import Fp8Options
from meshwright.precision.fp8.matmul import matmul
from meshwright.precision.fp8.quantise import (
    Quantised,
    all_reduce_amax,
    block_amax,
    encode,
    power_of_two_scale,
    quantise,
)
from meshwright.precision.fp8.recipes import E4M3, RECIPES
from meshwright.precision.fp8.stored import StoredFp8Matmul
from meshwright.precision.fp8.transpose import transpose

Factors = Sequence[tuple[Tensor, Tensor] | None]
"""(A, scaled B) of each matrix, or None for a matrix without an adapter; at least one has some."""


def stored_adapted_linear(
    linears: StoredFp8Matmul, x: Tensor, weights: Sequence[Tensor], factors: Factors
) -> Tensor:
    """q(x) W^T + (x A^T) B^T over the last dim of x: all matrices, concatenated."""
    y_TN: Tensor = applied(_StoredAdapted, *_inputs(linears, x, weights, factors))
    return y_TN.unflatten(0, x.shape[:-1])


def stored_adapted_swiglu(
    linears: StoredFp8Matmul, x: Tensor, weights: Sequence[Tensor], factors: Factors
) -> Tensor:
    """silu(gate) x up of the two matrices, over the last dim of x."""
    h_TF: Tensor = applied(_StoredAdaptedSwiGlu, *_inputs(linears, x, weights, factors))
    return h_TF.unflatten(0, x.shape[:-1])


def _inputs(
    linears: StoredFp8Matmul, x: Tensor, weights: Sequence[Tensor], factors: Factors
) -> tuple[Any, ...]:
    x_TK = x.flatten(0, -2).to(linears.dtype)
    return x_TK, *joined_factors(weights, factors, x_TK), linears.scale.value, linears.options, *weights


class _StoredAdapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        a_RK: Tensor,
        b_NR: Tensor,
        scale: Tensor,
        options: Fp8Options,
        *weights: Tensor,
    ) -> Tensor:
        x, u_TR = _quantised(x_TK, options), x_TK @ a_RK.mT
        ctx.save_for_backward(x_TK, a_RK, b_NR, u_TR, scale, *weights)
        ctx.options = options
        return stored_adapted_matmul(x.values_MK, x.scale, u_TR, b_NR, weights, scale, options.native)

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gradients(dy_TN, block_amax(dy_TN, None), ctx.saved_tensors, ctx.options)


class _StoredAdaptedSwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        a_RK: Tensor,
        b_NR: Tensor,
        scale: Tensor,
        options: Fp8Options,
        *weights: Tensor,
    ) -> Tensor:
        x, u_TR = _quantised(x_TK, options), x_TK @ a_RK.mT
        plain_TN = stored_matmul(x.values_MK, x.scale, weights, scale, x_TK.dtype, options.native)
        y_TN, h_TF = adapted_swiglu(plain_TN, u_TR, b_NR)
        ctx.save_for_backward(x_TK, a_RK, b_NR, u_TR, scale, *weights, y_TN)
        ctx.options = options
        return h_TF

    @staticmethod
    def backward(ctx: Any, dh_TF: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *saved, y_TN = ctx.saved_tensors
        dy_TN, amax = swiglu_gradient_with_amax(dh_TF.contiguous(), y_TN)
        return _gradients(dy_TN, amax.amax(), saved, ctx.options)


def _quantised(x_TK: Tensor, options: Fp8Options) -> Quantised:
    recipe = RECIPES[options.recipe]
    return quantise(x_TK, recipe.operand, recipe.token_block, options.amax_groups.x)


def _gradients(
    dy_TN: Tensor, amax: Tensor, saved: Sequence[Tensor], options: Fp8Options
) -> tuple[Tensor | None, ...]:
    """The gradients of x, A and B; the frozen weights, their scale and the options have none."""
    x_TK, a_RK, b_NR, u_TR, scale, *weights = saved
    recipe = RECIPES[options.recipe]
    dy_scale = power_of_two_scale(all_reduce_amax(amax, options.amax_groups.gradient), recipe.gradient)
    dy = encode(dy_TN, dy_scale, recipe.gradient, recipe.token_block)
    transposed_KN, du_TR = stored_transpose(weights, dy.values_MK), dy_TN @ b_NR
    dx_TK = stored_adapted_dgrad(dy.values_MK, dy.scale, transposed_KN, scale, du_TR, a_RK, options.native)
    return dx_TK, du_TR.mT @ x_TK, dy_TN.mT @ u_TR, None, None, *(None for _ in weights)


@torch.library.custom_op("meshwright::stored_adapted_matmul", mutates_args=())
def stored_adapted_matmul(
    x_TK: Tensor,
    x_scale: Tensor,
    u_TR: Tensor,
    b_NR: Tensor,
    weights: Sequence[Tensor],
    scale: Tensor,
    native: bool,  # noqa: FBT001 - an operator's schema
) -> Tensor:
    """y[T, N] in the dtype of u. One operator, so that packing is checked when it runs, and y is added to."""
    y_TN = _forward(Quantised(x_TK, x_scale), weights, scale, u_TR.dtype, native=native)
    return y_TN.addmm_(u_TR, b_NR.mT)


def _forward(
    x: Quantised, weights: Sequence[Tensor], scale: Tensor, dtype: torch.dtype, *, native: bool
) -> Tensor:
    weight = Quantised(concatenated(weights, torch.uint8).view(E4M3), scale)
    return matmul(x, weight, to=dtype, native=native, fast_accumulation=True)


@stored_adapted_matmul.register_fake
def _(x_TK: Tensor, x_scale: Tensor, u_TR: Tensor, b_NR: Tensor, *_: Any) -> Tensor:
    del x_scale
    return u_TR.new_empty((len(x_TK), len(b_NR)))


@torch.library.custom_op("meshwright::stored_matmul", mutates_args=())
def stored_matmul(
    x_TK: Tensor,
    x_scale: Tensor,
    weights: Sequence[Tensor],
    scale: Tensor,
    dtype: torch.dtype,
    native: bool,  # noqa: FBT001 - an operator's schema
) -> Tensor:
    """y[T, N] without what adapters add."""
    return _forward(Quantised(x_TK, x_scale), weights, scale, dtype, native=native)


@stored_matmul.register_fake
def _(
    x_TK: Tensor, x_scale: Tensor, weights: Sequence[Tensor], scale: Tensor, dtype: torch.dtype, *_: Any
) -> Tensor:
    del x_scale, scale
    return x_TK.new_empty((len(x_TK), sum(len(weight) for weight in weights)), dtype=dtype)


@torch.library.custom_op("meshwright::stored_transpose", mutates_args=())
def stored_transpose(weights: Sequence[Tensor], after: Tensor) -> Tensor:
    """W^T[K, N] in E4M3, not before `after` exists: the compiler would compute it in forward and save it."""
    del after
    return transpose(concatenated(weights, torch.uint8)).view(E4M3)


@stored_transpose.register_fake
def _(weights: Sequence[Tensor], after: Tensor) -> Tensor:
    del after
    return weights[0].new_empty((weights[0].shape[1], sum(len(one) for one in weights)), dtype=E4M3)


@torch.library.custom_op("meshwright::stored_adapted_dgrad", mutates_args=())
def stored_adapted_dgrad(
    dy_TN: Tensor,
    dy_scale: Tensor,
    transposed_KN: Tensor,
    scale: Tensor,
    du_TR: Tensor,
    a_RK: Tensor,
    native: bool,  # noqa: FBT001 - an operator's schema
) -> Tensor:
    """dx[T, K] in the dtype of du. One operator: the compiler would copy what is added to."""
    dx_TK = matmul(Quantised(dy_TN, dy_scale), Quantised(transposed_KN, scale), to=du_TR.dtype, native=native)
    return dx_TK.addmm_(du_TR, a_RK)


@stored_adapted_dgrad.register_fake
def _(
    dy_TN: Tensor, dy_scale: Tensor, transposed_KN: Tensor, scale: Tensor, du_TR: Tensor, *_: Any
) -> Tensor:
    del dy_scale, scale
    return du_TR.new_empty((len(dy_TN), len(transposed_KN)))


_OPS = torch.ops.meshwright


@register_flop_formula(_OPS.stored_adapted_matmul)
def _(x_TK: torch.Size, x_scale: torch.Size, u_TR: torch.Size, b_NR: torch.Size, *_: Any, **__: Any) -> int:
    del x_scale, u_TR
    return 2 * x_TK[0] * (b_NR[0] * x_TK[1] + b_NR.numel())


@register_flop_formula(_OPS.stored_matmul)
def _(x_TK: torch.Size, x_scale: torch.Size, weights: Sequence[torch.Size], *_: Any, **__: Any) -> int:
    del x_scale
    return 2 * x_TK[0] * sum(weight.numel() for weight in weights)


@register_flop_formula(_OPS.stored_adapted_dgrad)
def _(dy_TN: torch.Size, dy_scale: torch.Size, transposed_KN: torch.Size, *rest: Any, **__: Any) -> int:
    del dy_scale
    return 2 * dy_TN[0] * (transposed_KN.numel() + rest[2].numel())


# The forward matmuls, whose outputs selective recompute saves.
STORED_ADAPTED_OPERATORS = (_OPS.stored_adapted_matmul.default, _OPS.stored_matmul.default)
