"""y = x W^T with every operand in fp8.

    forward    y[T, N]  =  x[T, K]   W[N, K]^T
    backward   dx[T, K] = dy[T, N]   W^T[K, N]^T
               dW[N, K] = dy^T[N, T] x^T[K, T]^T

Hopper multiplies fp8 only where both operands lie with the contracted dim last, so x, W and dy are each
written twice: as they are and turned. x is kept for backward in fp8, turned; W is cast anew from the
weight, which is kept anyway.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshwright.precision.fp8.matmul import matmul
from meshwright.precision.fp8.quantise import Quantised, encode, quantise
from meshwright.precision.fp8.recipes import RECIPES, Block
from meshwright.precision.fp8.turn import turned

Groups = tuple[ProcessGroup, ...]


class Cuts(NamedTuple):
    """Over which groups each operand of a linear is cut: a scale for a whole tensor is agreed over them."""

    x: Groups = ()
    weight: Groups = ()
    gradient: Groups = ()


UNCUT = Cuts()


class Fp8Product(nn.Module):
    """In the place of a plain product: the same numbers, each operand rounded to fp8."""

    def __init__(self, recipe: str, *, dtype: torch.dtype, native: bool, cuts: Cuts) -> None:
        super().__init__()
        self.recipe, self.dtype, self.native, self.cuts = recipe, dtype, native, cuts

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + b over the last dim of x, in the dtype of the other matmuls."""
        x_TK = x.flatten(0, -2).to(self.dtype)
        y_TN = scaled_linear(x_TK, weight, self.recipe, native=self.native, cuts=self.cuts)
        y = y_TN.unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias.to(y.dtype)


def scaled_linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    recipe: str,
    *,
    native: bool,
    cuts: Cuts = UNCUT,
    units_3: Tensor | None = None,
) -> Tensor:
    """x W^T by a recipe, with the scales that x, W and dy need themselves or with given ones."""
    if not torch.is_grad_enabled():
        return matmul(
            *_operands(x_TK, weight_NK, units_3, recipe, cuts), to=x_TK.dtype, native=native, fast=True
        )
    return _ScaledLinear.apply(x_TK, weight_NK, units_3, recipe, native, cuts)  # pyright: ignore[reportReturnType]


def _operands(
    x_TK: Tensor, weight_NK: Tensor, units_3: Tensor | None, recipe: str, cuts: Cuts
) -> tuple[Quantised, Quantised]:
    """x and W for the forward product."""
    rule = RECIPES[recipe]
    unit_x, unit_weight = (None, None) if units_3 is None else (units_3[0], units_3[1])
    return (
        _quantised(x_TK, unit_x, rule.operand, rule.token_block, cuts.x),
        _quantised(weight_NK, unit_weight, rule.operand, rule.weight_block, cuts.weight),
    )


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        weight_NK: Tensor,
        units_3: Tensor | None,
        recipe: str,
        native: bool,  # noqa: FBT001 - `apply` takes no keywords
        cuts: Cuts,
    ) -> Tensor:
        x, weight = _operands(x_TK, weight_NK, units_3, recipe, cuts)
        x_turned = _turned(x_TK, x, RECIPES[recipe].token_block)
        unit_gradient = None if units_3 is None else units_3[2]
        ctx.save_for_backward(*x_turned, weight_NK, weight.unit, unit_gradient)
        ctx.recipe, ctx.native, ctx.cut_gradient = recipe, native, cuts.gradient
        return matmul(x, weight, to=x_TK.dtype, native=native, fast=True)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rule, native = RECIPES[ctx.recipe], ctx.native
        x_values_KT, x_unit, weight_NK, weight_unit, unit_gradient = ctx.saved_tensors
        grad = _quantised(grad_TN, unit_gradient, rule.gradient, rule.token_block, ctx.cut_gradient)
        if rule.weight_block is None:
            weight = encode(weight_NK, weight_unit, rule.operand, None)
            weight_turned = Quantised(turned(weight.values_MK), weight.unit)
        else:
            weight_turned = quantise(turned(weight_NK), rule.operand, rule.weight_block)
        grad_x_TK = matmul(grad, weight_turned, to=grad_TN.dtype, native=native)
        grad_turned = _turned(grad_TN, grad, rule.token_block)
        x_turned = Quantised(x_values_KT, x_unit)
        grad_weight_NK = matmul(grad_turned, x_turned, to=weight_NK.dtype, native=native)
        return grad_x_TK, grad_weight_NK, None, None, None, None


def _quantised(
    x_TK: Tensor, unit: Tensor | None, dtype: torch.dtype, block: Block, groups: Groups
) -> Quantised:
    return quantise(x_TK, dtype, block, groups) if unit is None else encode(x_TK, unit, dtype, block)


def _turned(x_TK: Tensor, x: Quantised, block: Block) -> Quantised:
    """x^T[K, T]: with the same scale, or with scales of its own where they follow the contracted dim."""
    if block is None:
        return Quantised(turned(x.values_MK), x.unit)
    return quantise(turned(x_TK), x.values_MK.dtype, block)
