"""A matrix, with or without a bias, and several that multiply the same vector."""

import torch
from torch import Tensor, nn
from torch.nn import functional

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

    def forward(self, x: Tensor) -> Tensor:
        """The product over the last dim."""
        bias = None if self.bias is None else local(self.bias)
        if self.collect is None:
            return self.product(x, local(self.weight), bias)
        y = self.collect(self.product(x, local(self.weight)))
        return y if bias is None else y + bias


class Together(nn.Module):
    """Linears of one input. Parameters stay with the linears; `product`, where set, multiplies them all."""

    def __init__(self, *linears: Linear) -> None:
        super().__init__()
        self.linears = linears  # in a tuple, which registers nothing
        # Set where one product for all is faster: has a method `together(x, weights)`.
        self.product: nn.Module | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """What each of them makes of x."""
        if self.product is None:
            return tuple(linear(x) for linear in self.linears)
        products = self.product.together(x, tuple(local(linear.weight) for linear in self.linears))
        return tuple(
            y if linear.bias is None else y + local(linear.bias).to(y.dtype)
            for y, linear in zip(products, self.linears, strict=True)
        )
