"""Delayed scaling: the scales of a step come from the steps before it.

    unit of x and dy    from the largest magnitude of the last H steps
    unit of W           from W itself, once per update

Inside a step the scales are constants: casting needs no pass over the tensor before it, every micro-batch
and a recomputed forward round alike, and noting the largest magnitude twice changes nothing. What outgrows
its history saturates for one step. A layer without a history yet takes its scales from the tensors at hand.
"""

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.precision.fp8.linear import Cuts, scaled_linear
from meshwright.precision.fp8.quantise import unit_of
from meshwright.precision.fp8.recipes import RECIPES

X, GRADIENT = 0, 1


class DelayedProduct(nn.Module):
    """In the place of a plain product, like Fp8Product. Between steps somebody calls `advance`."""

    history_2H: Tensor
    seen_2: Tensor
    units_3: Tensor

    def __init__(
        self, recipe: str, *, dtype: torch.dtype, native: bool, cuts: Cuts, history_steps: int
    ) -> None:
        super().__init__()
        self.recipe, self.dtype, self.native, self.cuts = recipe, dtype, native, cuts
        self.has_history = False
        # Not part of the model: a checkpoint without them is complete.
        for name, shape in {"history_2H": (2, history_steps), "seen_2": (2,), "units_3": (3,)}.items():
            self.register_buffer(name, torch.zeros(shape, device="meta"), persistent=False)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + b over the last dim of x, in the dtype of the other matmuls."""
        x_TK = x.flatten(0, -2).to(self.dtype)
        if self.training:  # held-out data leaves no trace
            _note(self.seen_2, X, x_TK)
        y_TN = scaled_linear(
            x_TK,
            weight,
            self.recipe,
            native=self.native,
            cuts=self.cuts,
            units_3=self.units_3 if self.has_history else None,
        )
        noted: Tensor = _NoteGradient.apply(y_TN, self.seen_2)  # pyright: ignore[reportAssignmentType]
        y = noted.unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias.to(y.dtype)

    @torch.no_grad()
    def advance(self, seen_2: Tensor, weight_amax: Tensor) -> None:
        """Enter what the step has seen (agreed by all ranks) and set the scales of the next one."""
        self.history_2H.copy_(torch.cat((seen_2.unsqueeze(1), self.history_2H[:, :-1]), dim=1))
        self.seen_2.zero_()
        self.set_units(weight_amax)

    @torch.no_grad()
    def set_units(self, weight_amax: Tensor) -> None:
        """The scales that follow from the history and the weight. Host sync only before the first step."""
        self.has_history = self.has_history or bool(self.history_2H.any())
        rule, (x_amax, gradient_amax) = RECIPES[self.recipe], self.history_2H.amax(1)
        units = [unit_of(x_amax, rule.operand), unit_of(weight_amax, rule.operand)]
        self.units_3.copy_(torch.stack([*units, unit_of(gradient_amax, rule.gradient)]))


@torch.no_grad()
def _note(seen_2: Tensor, index: int, x: Tensor) -> None:
    seen_2[index].copy_(torch.maximum(seen_2[index], x.detach().abs().amax().float()))


class _NoteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, seen_2: Tensor) -> Tensor:
        ctx.seen_2 = seen_2  # not saved: that would forbid to change it
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _note(ctx.seen_2, GRADIENT, grad)
        return grad, None
