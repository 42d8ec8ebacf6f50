"""A matrix, with or without a bias, and several of them on the same input."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.ops.fused_linear import joint_linear
from meshwright.ops.loss import compute_dtype
from meshwright.ops.sharded import local


class Product(nn.Module):
    """x W^T + b; replaced where the product is made in another format."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Over the last dim of x."""
        return functional.linear(x, weight, bias)


class Linear(nn.Module):
    """y = x W^T + b; the weight is (to, of) as in torch."""

    def __init__(self, of: int, to: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(to, of))
        self.bias = nn.Parameter(torch.empty(to)) if bias else None
        self.product: nn.Module = Product()
        # Set where the input dim is cut: sums the partial products before the bias joins, once.
        self.collect: nn.Module | None = None
        # Set while backward is to add the weight's gradient to what is there already: to this one tensor.
        self.totals: Sequence[Tensor] = ()

    def forward(self, x: Tensor) -> Tensor:
        """The product over the last dim."""
        if self.totals:
            return joint_linear(x, [self.weight], compute_dtype(x), self.totals)
        bias = None if self.bias is None else local(self.bias)
        if self.collect is None:
            return self.product(x, local(self.weight), bias)
        y = self.collect(self.product(x, local(self.weight)))
        return y if bias is None else y + bias


class Projections(nn.Module):
    """Several linears on the same input, one after the other; replaced where they are one product."""

    def forward(self, x: Tensor, linears: Sequence[Linear]) -> list[Tensor]:
        """The product of each."""
        return [linear(x) for linear in linears]
