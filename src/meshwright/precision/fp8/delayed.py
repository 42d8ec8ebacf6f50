"""Delayed scaling: the scales of a step come from the steps before it.

    unit of x and dy    from the largest magnitude of the last H steps
    unit of W           from W itself, once per update

Inside a step the scales are constants: casting needs no pass over the tensor before it, every micro-batch
and a recomputed forward round alike, and noting the largest magnitude twice changes nothing. What outgrows
its history saturates for one step. A layer without a history yet takes its scales from the tensors at hand.
"""

import torch
from torch import Tensor, nn

from meshwright.precision.fp8.quantise import unit_of
from meshwright.precision.fp8.recipes import RECIPES


class ScaleHistory(nn.Module):
    """Magnitudes that one product has seen, and the scales that follow. Between steps call `advance`."""

    history_2H: Tensor
    seen_x: Tensor
    seen_gradient: Tensor
    unit_x: Tensor
    unit_weight: Tensor
    unit_gradient: Tensor

    def __init__(self, recipe: str, num_steps: int) -> None:
        super().__init__()
        self.recipe = recipe
        self.is_known = False
        # Not part of the model: a checkpoint without them is complete.
        self.register_buffer("history_2H", torch.zeros(2, num_steps, device="meta"), persistent=False)
        # Each a tensor of its own: torch's compiler takes no part of a tensor for a scale, and cannot split a
        # graph whose forward and backward write to one tensor.
        for name in ("seen_x", "seen_gradient", "unit_x", "unit_weight", "unit_gradient"):
            self.register_buffer(name, torch.zeros((), device="meta"), persistent=False)

    def units(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of x, W and dy; none while there is no history."""
        return (self.unit_x, self.unit_weight, self.unit_gradient) if self.is_known else (None, None, None)

    @torch.no_grad()
    def advance(self, seen_2: Tensor, weight_amax: Tensor) -> None:
        """Enter what the step has seen (agreed by all ranks) and set the scales of the next one."""
        self.history_2H.copy_(torch.cat((seen_2.unsqueeze(1), self.history_2H[:, :-1]), dim=1))
        self.seen_x.zero_()
        self.seen_gradient.zero_()
        self.set_units(weight_amax)

    @torch.no_grad()
    def set_units(self, weight_amax: Tensor) -> None:
        """The scales that follow from the history and the weight. Host sync only before the first step."""
        self.is_known = self.is_known or bool(self.history_2H.any())
        rule, (x_amax, gradient_amax) = RECIPES[self.recipe], self.history_2H.amax(1)
        self.unit_x.copy_(unit_of(x_amax, rule.operand))
        self.unit_weight.copy_(unit_of(weight_amax, rule.operand))
        self.unit_gradient.copy_(unit_of(gradient_amax, rule.gradient))


@torch.no_grad()
def note(seen: Tensor, magnitudes: Tensor) -> None:
    """Remember the largest of these."""
    seen.copy_(torch.maximum(seen, magnitudes.amax()))
