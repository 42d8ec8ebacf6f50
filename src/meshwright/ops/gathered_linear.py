"""Linears on an input that is all-gathered over ranks and not saved: backward gathers it again.

    forward    x[S_n, D] -> x[S, D];  y = x W^T for each W of the module;  only x[S_n, D] is saved
    backward   x[S_n, D] -> x[S, D] again, once for all W;  dW = dy^T x;  dx = dy W

It communicates (n - 1) x bytes of x[S_n, D] more, and saves 1/n of the activation memory of x. Megatron's
sequence parallel does the same.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from meshwright.ops.collectives import all_gather, all_gather_no_grad
from meshwright.ops.dropout import DropoutMask, dropped, dropped_in_backward

_NO_MASK = None, 0, 0.0


class BackwardGather:
    """The gathered input that the linears of one forward pass share in backward."""

    def __init__(self, dim: int, group: ProcessGroup) -> None:
        self._dim, self._group = dim, group
        self._full: Tensor | None = None
        self._num_consumers = 0

    def add_consumer(self) -> None:
        """One more linear will call `gather` in backward."""
        self._num_consumers += 1

    def gather(self, shard: Tensor) -> Tensor:
        """The full input: gathered by the first consumer, freed after the last one."""
        if self._full is None:
            self._full = all_gather_no_grad(shard, self._dim, self._group)
        full, self._num_consumers = self._full, self._num_consumers - 1
        if self._num_consumers == 0:
            self._full = None
        return full


class GatheredLinears:
    """The linears of a module that multiply its gathered input."""

    def __init__(self, dim: int, group: ProcessGroup) -> None:
        self._dim, self._group = dim, group
        self._current: tuple[Tensor, Tensor, BackwardGather] | None = None

    def enter(self, shard: Tensor) -> Tensor:
        """Called before the module's forward: the gathered input."""
        full = all_gather(shard, self._dim, self._group)
        self._current = (full, shard.detach(), BackwardGather(self._dim, self._group))
        return full

    def leave(self) -> None:
        """Called after the module's forward: drop the gathered input."""
        self._current = None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, mask: DropoutMask | None) -> Tensor:
        """As `Matmul`; of the gathered input only this rank's shard is saved."""
        if self._current is None or x is not self._current[0]:
            return functional.linear(x, weight, bias) if mask is None else mask.linear(x, weight)
        full, shard, backward_gather = self._current
        y: Tensor = _GatheredLinear.apply(full, shard, weight, backward_gather, *(mask or _NO_MASK))  # pyright: ignore[reportAssignmentType]
        return y if bias is None else y + bias


class GatheredMatmul(nn.Module):
    """Replaces the matmul of one linear layer."""

    def __init__(self, linears: GatheredLinears) -> None:
        super().__init__()
        self.linears = linears

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, mask: DropoutMask | None = None
    ) -> Tensor:
        """x W^T + b, over the last dim of x; with a mask drop(x) W^T."""
        return self.linears.linear(x, weight, bias, mask)


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        full: Tensor,
        shard: Tensor,
        weight: Tensor,
        backward_gather: BackwardGather,
        keys: Tensor | None,
        first_feature: int,
        probability: float,
    ) -> Tensor:
        ctx.save_for_backward(shard, weight, keys)
        ctx.backward_gather, ctx.mask = backward_gather, (first_feature, probability)
        if ctx.needs_input_grad[2]:  # a frozen weight needs no input in backward
            backward_gather.add_consumer()
        if keys is not None:
            full = dropped(full, keys, first_feature, probability)
        return functional.linear(full, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        shard, weight, keys = ctx.saved_tensors
        dx = (grad @ weight.to(grad.dtype)).to(shard.dtype)
        dx = dx if keys is None else dropped_in_backward(dx, keys, *ctx.mask, dy=grad)
        if not ctx.needs_input_grad[2]:
            return dx, *(None,) * 6
        full = ctx.backward_gather.gather(shard)
        full = full if keys is None else dropped_in_backward(full, keys, *ctx.mask, dy=grad)
        dw = grad.flatten(0, -2).mT @ full.flatten(0, -2).to(grad.dtype)
        return dx, None, dw.to(weight.dtype), *(None,) * 4
