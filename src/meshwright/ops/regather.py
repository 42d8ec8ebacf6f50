"""Products with an input that is gathered over ranks and not kept: backward gathers it once more.

    forward    x[S_n, D] -> x[S, D];  y = x W^T for each matrix W of the crossing;  x[S_n, D] is kept
    backward   x[S_n, D] -> x[S, D] again, once for all of them;  dW = dy^T x;  dx = dy W

It sends (n - 1) x bytes of x[S_n, D] more, and keeps 1/n of what would be kept otherwise.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from meshwright.ops.collectives import all_gather, gather_whole


class Regathering:
    """What the products of one crossing share in backward: the whole input, for a moment."""

    def __init__(self, dim: int, group: ProcessGroup) -> None:
        self._dim, self._group = dim, group
        self._whole: Tensor | None = None
        self._num_left = 0

    def expect(self) -> None:
        """One product more will ask."""
        self._num_left += 1

    def whole(self, part: Tensor) -> Tensor:
        """Gathered when the first product asks, let go when the last one has asked."""
        if self._whole is None:
            self._whole = gather_whole(part, self._dim, self._group)
        whole, self._num_left = self._whole, self._num_left - 1
        if self._num_left == 0:
            self._whole = None
        return whole


class RegatheredProducts:
    """The linear layers of a module that multiply its gathered input."""

    def __init__(self, dim: int, group: ProcessGroup) -> None:
        self._dim, self._group = dim, group
        self._pass: tuple[Tensor, Tensor, Regathering] | None = None

    def enter(self, part: Tensor) -> Tensor:
        """The module begins: its whole input."""
        whole = all_gather(part, self._dim, self._group)
        self._pass = (whole, part.detach(), Regathering(self._dim, self._group))
        return whole

    def leave(self) -> None:
        """The module is done: nobody holds its whole input any more."""
        self._pass = None

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `functional.linear`; of the gathered input only this rank's part is kept."""
        if self._pass is None or x is not self._pass[0]:
            return functional.linear(x, weight, bias)
        product: Tensor = _Product.apply(x, self._pass[1], weight, self._pass[2])  # pyright: ignore[reportAssignmentType]
        return product if bias is None else product + bias


class RegatheredProduct(nn.Module):
    """The product of one linear layer."""

    def __init__(self, products: RegatheredProducts) -> None:
        super().__init__()
        self.products = products

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + b, over the last dim of x."""
        return self.products.multiply(x, weight, bias)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, part: Tensor, weight: Tensor, regathering: Regathering) -> Tensor:
        ctx.save_for_backward(part, weight)
        ctx.regathering = regathering
        regathering.expect()
        return functional.linear(whole, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        part, weight = ctx.saved_tensors
        whole = ctx.regathering.whole(part)
        of_weight = grad.flatten(0, -2).mT @ whole.flatten(0, -2).to(grad.dtype)
        return (grad @ weight.to(grad.dtype)).to(part.dtype), None, of_weight.to(weight.dtype), None
