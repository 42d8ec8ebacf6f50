"""y = x W^T with every operand in fp8, for one matrix W or for several that share the input x.

    forward    y[T, N]  =  x[T, K]   W[N, K]^T
    dgrad      dx[T, K] = dy[T, N]   W^T[K, N]^T
    wgrad      dW[N, K] = dy^T[N, T] x^T[K, T]^T

Hopper's fp8 GEMM wants the contracted dim of both operands contiguous, so x, W and dy are each cast twice: as
they are and transposed. x^T is saved for backward in fp8. W is cast in every micro-batch from the weight,
which is in memory anyway, or once per update into a cached fp8 copy.

Several matrices are concatenated by rows, W[N1 + N2 + ..., K], and have one scale; their y and dy are
concatenated by columns. So x is cast once, and each of the three GEMMs runs once (fused QKV, fused gate-up).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.precision.fp8.cached_weights import CachedFp8Weight
from meshwright.precision.fp8.cast import cast_transpose, deferred_cast_transpose
from meshwright.precision.fp8.delayed import Fp8Scales, update_amax
from meshwright.precision.fp8.matmul import matmul
from meshwright.precision.fp8.quantise import (
    Groups,
    Quantised,
    all_reduce_amax,
    block_amax,
    encode,
    power_of_two_scale,
    quantise,
)
from meshwright.precision.fp8.recipes import RECIPES, Block, Recipe
from meshwright.precision.fp8.transpose import deferred_transpose, transpose


class AmaxGroups(NamedTuple):
    """Groups over which each operand of a linear is sharded; a per-tensor amax is all-reduced over them."""

    x: Groups = ()
    weight: Groups = ()
    gradient: Groups = ()


NO_AMAX_GROUPS = AmaxGroups()


class Fp8Options(NamedTuple):
    """The recipe, whether the device's tensor cores take it, and where an amax is all-reduced."""

    recipe: str
    native: bool
    amax_groups: AmaxGroups


class Fp8Matmul(nn.Module):
    """Replaces the matmul of a linear: every operand is rounded to fp8."""

    def __init__(
        self,
        recipe: str,
        *,
        dtype: torch.dtype,
        native: bool,
        amax_groups: AmaxGroups = NO_AMAX_GROUPS,
        cached_weight: CachedFp8Weight | None = None,
        scales: Fp8Scales | None = None,
    ) -> None:
        super().__init__()
        self.options, self.dtype = Fp8Options(recipe, native, amax_groups), dtype
        self.cached_weight, self.scales = cached_weight, scales

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + b over the last dim of x, in the dtype of the other matmuls."""
        (y,) = self.fused(x, (weight,))
        return y if bias is None else y + bias.to(y.dtype)

    def fused(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """x W^T of each W, over the last dim of x, in one GEMM."""
        x_TK, scales = x.flatten(0, -2).to(self.dtype), self.scales
        ys_TN, amax = fp8_linears(
            x_TK, weights, self.options, cached_weight=self.cached_weight, scales=scales
        )
        if scales is not None and self.training:  # evaluation data must not change the scales
            update_amax(scales.amax_x, amax)
        return tuple(y_TN.unflatten(0, x.shape[:-1]) for y_TN in ys_TN)


def fp8_linears(
    x_TK: Tensor,
    weights: Sequence[Tensor],
    options: Fp8Options,
    *,
    cached_weight: CachedFp8Weight | None = None,
    scales: Fp8Scales | None = None,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """x W^T of each W, and for delayed scaling the amax of tiles of x."""
    delayed = scales.of_operands() if scales is not None else (None, None, None)
    amax_gradient = scales.amax_gradient if scales is not None else None
    cached = (None,) * 4 if cached_weight is None else cached_weight.tensors()
    if not torch.is_grad_enabled():
        return _without_gradient(x_TK, weights, delayed, cached[:2], options)
    is_frozen = not any(weight.requires_grad for weight in weights) and not RECIPES[options.recipe].is_delayed
    linears = _FrozenFp8Linears if is_frozen else _Fp8Linears
    *ys_TN, amax = linears.apply(  # pyright: ignore[reportGeneralTypeIssues]
        x_TK, options, *delayed, amax_gradient, *cached, *weights
    )
    return tuple(ys_TN), amax


def _without_gradient(
    x_TK: Tensor,
    weights: Sequence[Tensor],
    delayed: tuple[Tensor | None, ...],
    cached: tuple[Tensor | None, ...],
    options: Fp8Options,
) -> tuple[tuple[Tensor, ...], Tensor]:
    recipe = RECIPES[options.recipe]
    x = _quantised(x_TK, delayed[0], recipe.operand, recipe.token_block, options.amax_groups.x)
    weight = _weight(weights, delayed[1], cached, options)
    y_TN = matmul(x, weight, to=x_TK.dtype, native=options.native, fast_accumulation=True)
    return y_TN.split([len(each) for each in weights], dim=1), block_amax(x_TK, None)


def _weight(
    weights: Sequence[Tensor], scale: Tensor | None, cached: Sequence[Tensor | None], options: Fp8Options
) -> Quantised:
    """W for the forward GEMM."""
    values_NK, cached_scale = cached
    if values_NK is not None and cached_scale is not None:
        return Quantised(values_NK, cached_scale)
    recipe = RECIPES[options.recipe]
    weight_NK = _concatenated(weights)
    return _quantised(weight_NK, scale, recipe.operand, recipe.weight_block, options.amax_groups.weight)


class _Fp8Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, options: Fp8Options, *tensors: Tensor) -> tuple[Tensor, ...]:
        scale_x, scale_weight, scale_gradient, amax_gradient, *rest = tensors
        values_NK, cached_scale, transposed_KN, transposed_scale, *weights = rest
        recipe = RECIPES[options.recipe]
        x, x_transposed, amax = _cast_both([x_TK], scale_x, recipe.operand, recipe, options.amax_groups.x)
        weight = _weight(weights, scale_weight, (values_NK, cached_scale), options)
        cached = (transposed_KN, transposed_scale) if transposed_KN is not None else (None, weight.scale)
        ctx.save_for_backward(*x_transposed, *cached, scale_gradient, *weights)
        ctx.options = options
        ctx.amax_gradient = amax_gradient  # not saved for backward, which changes it in place
        ctx.mark_non_differentiable(amax)
        y_TN = matmul(x, weight, to=x_TK.dtype, native=options.native, fast_accumulation=True)
        return *y_TN.split([len(each) for each in weights], dim=1), amax

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        recipe, native = RECIPES[ctx.options.recipe], ctx.options.native
        x_values_KT, x_scale, transposed_KN, transposed_scale, scale_gradient, *weights = ctx.saved_tensors
        grads_TN, dtype = grads[:-1], grads[0].dtype  # the last one belongs to the amax
        grad, grad_transposed, amax = _cast_both(
            grads_TN, scale_gradient, recipe.gradient, recipe, ctx.options.amax_groups.gradient
        )
        if ctx.amax_gradient is not None:
            update_amax(ctx.amax_gradient, amax)
        weight_transposed = (
            Quantised(transposed_KN, transposed_scale)
            if transposed_KN is not None
            else _weight_transposed(weights, transposed_scale, recipe, after=grad.values_MK)
        )
        grad_x_TK = matmul(grad, weight_transposed, to=dtype, native=native)
        grad_weight_NK = matmul(
            grad_transposed, Quantised(x_values_KT, x_scale), to=weights[0].dtype, native=native
        )
        return grad_x_TK, *(None,) * 9, *grad_weight_NK.split([len(each) for each in weights])


class _FrozenFp8Linears(torch.autograd.Function):
    """Frozen weights: forward and dgrad only, so x and dy are not cast transposed, and x is not saved.

    Not for delayed scaling, which reads the amax of both casts.
    """

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, options: Fp8Options, *tensors: Tensor) -> tuple[Tensor, ...]:
        values_NK, cached_scale, transposed_KN, transposed_scale, *weights = tensors[4:]
        recipe = RECIPES[options.recipe]
        x = quantise(x_TK, recipe.operand, recipe.token_block, options.amax_groups.x)
        weight = _weight(weights, None, (values_NK, cached_scale), options)
        cached = (transposed_KN, transposed_scale) if transposed_KN is not None else (None, weight.scale)
        ctx.save_for_backward(*cached, *weights)
        ctx.options = options
        amax = x.scale.new_empty(0)
        ctx.mark_non_differentiable(amax)
        y_TN = matmul(x, weight, to=x_TK.dtype, native=options.native, fast_accumulation=True)
        return *y_TN.split([len(each) for each in weights], dim=1), amax

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        recipe, groups = RECIPES[ctx.options.recipe], ctx.options.amax_groups
        transposed_KN, transposed_scale, *weights = ctx.saved_tensors
        dy_TN = _concatenated_columns(grads[:-1])  # the last one belongs to the amax
        grad = quantise(dy_TN, recipe.gradient, recipe.token_block, groups.gradient)
        weight_transposed = (
            Quantised(transposed_KN, transposed_scale)
            if transposed_KN is not None
            else _weight_transposed(weights, transposed_scale, recipe, after=grad.values_MK)
        )
        dx_TK = matmul(grad, weight_transposed, to=dy_TN.dtype, native=ctx.options.native)
        return dx_TK, *(None,) * (9 + len(weights))


def _concatenated_columns(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


def _quantised(
    x_MK: Tensor, scale: Tensor | None, dtype: torch.dtype, block: Block, groups: Groups
) -> Quantised:
    return quantise(x_MK, dtype, block, groups) if scale is None else encode(x_MK, scale, dtype, block)


def _cast_both(
    parts: Sequence[Tensor], scale: Tensor | None, dtype: torch.dtype, recipe: Recipe, groups: Groups
) -> tuple[Quantised, Quantised, Tensor]:
    """x[T, K] of column-concatenated parts in fp8, its transpose, and for delayed scaling its tile amax.

    The transpose has the same scale, or scales of its own where blocks run along the contracted dim.
    """
    block = recipe.token_block
    if block is not None:
        x_TK = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
        x, x_transposed = quantise(x_TK, dtype, block), quantise(transpose(x_TK), dtype, block)
        return x, x_transposed, x.scale.new_empty(0)
    if scale is None:
        maxima = [block_amax(part, None) for part in parts]
        amax = maxima[0] if len(parts) == 1 else torch.stack(maxima).amax()
        scale = power_of_two_scale(all_reduce_amax(amax, groups), dtype)
    cast = cast_transpose(parts, scale, dtype, with_amax=recipe.is_delayed)
    return Quantised(cast.values_MK, scale), Quantised(cast.transposed_KM, scale), cast.tile_amax


def _weight_transposed(
    weights: Sequence[Tensor], scale: Tensor, recipe: Recipe, *, after: Tensor
) -> Quantised:
    """W^T[K, N], cast in backward: saved from forward it would keep gathered weights and undo ZeRO-3."""
    if recipe.weight_block is None:
        return Quantised(deferred_cast_transpose(list(weights), scale, recipe.operand, after), scale)
    return quantise(deferred_transpose(list(weights), after), recipe.operand, recipe.weight_block)


def _concatenated(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))
