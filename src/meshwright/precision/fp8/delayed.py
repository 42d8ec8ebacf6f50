"""Delayed scaling: the scales of a step come from the steps before it.

    unit of x and dy    from the largest magnitude of the last H steps
    unit of W           from W itself, once per update

Inside a step the scales are constants: casting needs no pass over the tensor before it, every micro-batch
and a recomputed forward round alike, and noting the largest magnitude twice changes nothing. What outgrows
its history saturates for one step. A layer without a history yet takes its scales from the tensors at hand.
"""

import torch
from torch import Tensor, nn


class KnownScales(nn.Module):
    """What one product has seen in this step, and its scales from the steps before."""

    seen_x: Tensor
    seen_gradient: Tensor
    unit_x: Tensor
    unit_weight: Tensor
    unit_gradient: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.is_known = False
        # Each a tensor of its own: torch's compiler takes no part of a tensor for a scale, and cannot split a
        # graph whose forward and backward write to one tensor. Not part of the model: a checkpoint without
        # them is complete.
        for name in ("seen_x", "seen_gradient", "unit_x", "unit_weight", "unit_gradient"):
            self.register_buffer(name, torch.zeros((), device="meta"), persistent=False)

    def units(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of x, W and dy; none while there is no history."""
        return (self.unit_x, self.unit_weight, self.unit_gradient) if self.is_known else (None, None, None)


@torch.no_grad()
def note(seen: Tensor, magnitudes: Tensor) -> None:
    """Remember the largest of these."""
    seen.copy_(torch.maximum(seen, magnitudes.amax()))
