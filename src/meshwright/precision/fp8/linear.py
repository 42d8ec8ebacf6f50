"""y = x W^T with every operand in fp8, for one matrix W or for several that multiply the same x.

    forward    y[T, N]  =  x[T, K]   W[N, K]^T
    backward   dx[T, K] = dy[T, N]   W^T[K, N]^T
               dW[N, K] = dy^T[N, T] x^T[K, T]^T

Hopper multiplies fp8 only where both operands lie with the contracted dim last, so x, W and dy are each
written twice: as they are and turned. x is kept for backward in fp8, turned. W is cast anew from the weight,
which is kept anyway, or kept in fp8 from one update to the next.

Several matrices stand one below the other, W[N1 + N2 + ..., K], and are one tensor with one scale; so are
their y and dy, side by side. x is then cast once, and each of the three products is one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshwright.precision.fp8.cached_weights import KeptWeight
from meshwright.precision.fp8.cast import cast_and_turn, turned_cast_late
from meshwright.precision.fp8.delayed import KnownScales, note
from meshwright.precision.fp8.matmul import matmul
from meshwright.precision.fp8.quantise import Quantised, agreed, block_amax, encode, quantise, unit_of
from meshwright.precision.fp8.recipes import RECIPES, Block, Recipe
from meshwright.precision.fp8.transpose import turned, turned_late

Groups = tuple[ProcessGroup, ...]


class Cuts(NamedTuple):
    """Over which groups each operand of a linear is cut: a scale for a whole tensor is agreed over them."""

    x: Groups = ()
    weight: Groups = ()
    gradient: Groups = ()


UNCUT = Cuts()


class How(NamedTuple):
    """By which rules, and whether on tensor cores that take fp8."""

    recipe: str
    native: bool
    cuts: Cuts


class Fp8Product(nn.Module):
    """In the place of a plain product: the same numbers, each operand rounded to fp8."""

    def __init__(
        self,
        recipe: str,
        *,
        dtype: torch.dtype,
        native: bool,
        cuts: Cuts = UNCUT,
        kept: KeptWeight | None = None,
        scales: KnownScales | None = None,
    ) -> None:
        super().__init__()
        self.recipe, self.dtype, self.native, self.cuts = recipe, dtype, native, cuts
        self.kept, self.scales = kept, scales

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + b over the last dim of x, in the dtype of the other matmuls."""
        (y,) = self.together(x, (weight,))
        return y if bias is None else y + bias.to(y.dtype)

    def together(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """x W^T of each W, over the last dim of x."""
        x_TK, scales = x.flatten(0, -2).to(self.dtype), self.scales
        ys_TN, largest = scaled_linears(
            x_TK,
            weights,
            self.recipe,
            native=self.native,
            cuts=self.cuts,
            kept=self.kept,
            scales=scales,
        )
        if scales is not None and self.training:  # held-out data leaves no trace
            note(scales.seen_x, largest)
        return tuple(y_TN.unflatten(0, x.shape[:-1]) for y_TN in ys_TN)


def scaled_linear(
    x_TK: Tensor, weight_NK: Tensor, recipe: str, *, native: bool, cuts: Cuts = UNCUT
) -> Tensor:
    """x W^T by a recipe, with the scales that x, W and dy need themselves."""
    return scaled_linears(x_TK, (weight_NK,), recipe, native=native, cuts=cuts)[0][0]


def scaled_linears(
    x_TK: Tensor,
    weights: Sequence[Tensor],
    recipe: str,
    *,
    native: bool,
    cuts: Cuts = UNCUT,
    kept: KeptWeight | None = None,
    scales: KnownScales | None = None,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """x W^T of each W, and for delayed scaling the largest magnitudes of parts of x."""
    known = scales.units() if scales is not None else (None, None, None)
    seen = scales.seen_gradient if scales is not None else None
    held = (None,) * 4 if kept is None else (kept.values_NK, kept.unit, kept.turned_KN, kept.turned_unit)
    if not torch.is_grad_enabled():
        return _without_gradient(x_TK, weights, known, held[:2], recipe, native=native, cuts=cuts)
    *ys_TN, largest = _ScaledLinears.apply(  # pyright: ignore[reportGeneralTypeIssues]
        x_TK, How(recipe, native, cuts), *known, seen, *held, *weights
    )
    return tuple(ys_TN), largest


def _without_gradient(
    x_TK: Tensor,
    weights: Sequence[Tensor],
    known: tuple[Tensor | None, ...],
    held: tuple[Tensor | None, ...],
    recipe: str,
    *,
    native: bool,
    cuts: Cuts,
) -> tuple[tuple[Tensor, ...], Tensor]:
    rule = RECIPES[recipe]
    x = _quantised(x_TK, known[0], rule.operand, rule.token_block, cuts.x)
    weight = _weight(weights, known[1], held, recipe, cuts)
    y_TN = matmul(x, weight, to=x_TK.dtype, native=native, fast=True)
    return y_TN.split([len(each) for each in weights], dim=1), block_amax(x_TK, None)


def _weight(
    weights: Sequence[Tensor], unit: Tensor | None, held: Sequence[Tensor | None], recipe: str, cuts: Cuts
) -> Quantised:
    """W for the forward product."""
    values_NK, held_unit = held
    if values_NK is not None and held_unit is not None:
        return Quantised(values_NK, held_unit)
    rule = RECIPES[recipe]
    return _quantised(_stacked(weights), unit, rule.operand, rule.weight_block, cuts.weight)


class _ScaledLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, how: How, *tensors: Tensor) -> tuple[Tensor, ...]:
        recipe, native, cuts = how
        unit_x, unit_weight, unit_gradient, seen, *rest = tensors
        values_NK, held_unit, turned_KN, turned_unit, *weights = rest
        rule = RECIPES[recipe]
        x, x_turned, largest = _both([x_TK], unit_x, rule.operand, rule, cuts.x)
        weight = _weight(weights, unit_weight, (values_NK, held_unit), recipe, cuts)
        known = (turned_KN, turned_unit) if turned_KN is not None else (None, weight.unit)
        ctx.save_for_backward(*x_turned, *known, unit_gradient, *weights)
        ctx.recipe, ctx.native, ctx.cut_gradient = recipe, native, cuts.gradient
        ctx.seen = seen  # not saved: that would forbid to change it
        ctx.mark_non_differentiable(largest)
        y_TN = matmul(x, weight, to=x_TK.dtype, native=native, fast=True)
        return *y_TN.split([len(each) for each in weights], dim=1), largest

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rule, native = RECIPES[ctx.recipe], ctx.native
        x_values_KT, x_unit, turned_KN, turned_unit, unit_gradient, *weights = ctx.saved_tensors
        grads_TN, dtype = grads[:-1], grads[0].dtype  # the last is of the magnitudes
        grad, grad_turned, largest = _both(grads_TN, unit_gradient, rule.gradient, rule, ctx.cut_gradient)
        if ctx.seen is not None:
            note(ctx.seen, largest)
        weight_turned = (
            Quantised(turned_KN, turned_unit)
            if turned_KN is not None
            else _weight_turned(weights, turned_unit, ctx.recipe, after=grad.values_MK)
        )
        grad_x_TK = matmul(grad, weight_turned, to=dtype, native=native)
        grad_weight_NK = matmul(
            grad_turned, Quantised(x_values_KT, x_unit), to=weights[0].dtype, native=native
        )
        return grad_x_TK, *(None,) * 9, *grad_weight_NK.split([len(each) for each in weights])


def _quantised(
    x_MK: Tensor, unit: Tensor | None, dtype: torch.dtype, block: Block, groups: Groups
) -> Quantised:
    return quantise(x_MK, dtype, block, groups) if unit is None else encode(x_MK, unit, dtype, block)


def _both(
    parts: Sequence[Tensor], unit: Tensor | None, dtype: torch.dtype, rule: Recipe, groups: Groups
) -> tuple[Quantised, Quantised, Tensor]:
    """x[T, K] of parts side by side, as it is and turned, and for delayed scaling its magnitudes.

    Turned it has the same scale, or scales of its own where they follow the contracted dim.
    """
    block = rule.token_block
    if block is not None:
        x_TK = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
        x, x_turned = quantise(x_TK, dtype, block), quantise(turned(x_TK), dtype, block)
        return x, x_turned, x.unit.new_empty(0)
    if unit is None:
        magnitudes = [block_amax(part, None) for part in parts]
        amax = magnitudes[0] if len(parts) == 1 else torch.stack(magnitudes).amax()
        unit = unit_of(agreed(amax, groups), dtype)
    cast = cast_and_turn(parts, unit, dtype, noting=rule.is_delayed)
    return Quantised(cast.values_MK, unit), Quantised(cast.turned_KM, unit), cast.largest


def _weight_turned(weights: Sequence[Tensor], unit: Tensor, recipe: str, *, after: Tensor) -> Quantised:
    """W^T[K, N] made in backward: kept from forward it would undo ZeRO-3."""
    rule = RECIPES[recipe]
    if rule.weight_block is None:
        return Quantised(turned_cast_late(list(weights), unit, rule.operand, after), unit)
    return quantise(turned_late(list(weights), after), rule.operand, rule.weight_block)


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))
