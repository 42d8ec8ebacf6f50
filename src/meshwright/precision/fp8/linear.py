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
        self.recipe, self.dtype, self.native = recipe, dtype, native
        self.cut_x, self.cut_weight, self.cut_gradient = cuts

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + b over the last dim of x, in the dtype of the other matmuls."""
        x_TK = x.flatten(0, -2).to(self.dtype)
        y_TN = scaled_linear(
            x_TK, weight, self.recipe, native=self.native,
            cuts=Cuts(self.cut_x, self.cut_weight, self.cut_gradient),
        )  # fmt: skip
        y = y_TN.unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias.to(y.dtype)


def scaled_linear(
    x_TK: Tensor, weight_NK: Tensor, recipe: str, *, native: bool, cuts: Cuts = UNCUT
) -> Tensor:
    """x W^T by a recipe that takes its scales from the tensors at hand."""
    return _ScaledLinear.apply(x_TK, weight_NK, recipe, native, *cuts)  # pyright: ignore[reportReturnType]


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        weight_NK: Tensor,
        recipe: str,
        native: bool,  # noqa: FBT001 - `apply` takes no keywords
        cut_x: Groups,
        cut_weight: Groups,
        cut_gradient: Groups,
    ) -> Tensor:
        rule = RECIPES[recipe]
        x = quantise(x_TK, rule.operand, rule.token_block, cut_x)
        weight = quantise(weight_NK, rule.operand, rule.weight_block, cut_weight)
        ctx.save_for_backward(*_turned(x_TK, x, rule.token_block), weight_NK, weight.unit)
        ctx.recipe, ctx.native, ctx.cut_gradient = recipe, native, cut_gradient
        return matmul(x, weight, to=x_TK.dtype, native=native, fast=True)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rule, native = RECIPES[ctx.recipe], ctx.native
        x_values_KT, x_unit, weight_NK, weight_unit = ctx.saved_tensors
        grad = quantise(grad_TN, rule.gradient, rule.token_block, ctx.cut_gradient)
        if rule.weight_block is None:
            weight = encode(weight_NK, weight_unit, rule.operand, None)
            weight_turned = Quantised(turned(weight.values_MK), weight.unit)
        else:
            weight_turned = quantise(turned(weight_NK), rule.operand, rule.weight_block)
        grad_x_TK = matmul(grad, weight_turned, to=grad_TN.dtype, native=native)
        grad_turned = _turned(grad_TN, grad, rule.token_block)
        x_turned = Quantised(x_values_KT, x_unit)
        grad_weight_NK = matmul(grad_turned, x_turned, to=weight_NK.dtype, native=native)
        return grad_x_TK, grad_weight_NK, None, None, None, None, None


def _turned(x_TK: Tensor, x: Quantised, block: Block) -> Quantised:
    """x^T[K, T]: with the same scale, or with scales of its own where they follow the contracted dim."""
    if block is None:
        return Quantised(turned(x.values_MK), x.unit)
    return quantise(turned(x_TK), x.values_MK.dtype, block)
