"""Delayed scaling: the scales of a step come from the amax history of earlier steps.

    scale of x and dy    from the amax of the last H steps
    scale of W           from the amax of W itself, once per update

Within a step the scales are constants. So a cast needs no amax pass before it, all micro-batches and a
recomputed forward round to the same bits, and recording an amax twice changes nothing. A value beyond the
range of its history saturates for one step. A layer without a history uses the amax of its current tensors.
"""

import torch
from torch import Tensor, nn


class Fp8Scales(nn.Module):
    """The amax of one fp8 matmul's operands in this step, and their scales from the steps before."""

    amax_x: Tensor
    amax_gradient: Tensor
    scale_x: Tensor
    scale_weight: Tensor
    scale_gradient: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.has_history = False
        # One tensor each: torch's compiler takes no slice of a tensor as a scale, and cannot split a graph
        # whose forward and backward write to one tensor. Not persistent: a checkpoint is complete without
        # them.
        for name in ("amax_x", "amax_gradient", "scale_x", "scale_weight", "scale_gradient"):
            self.register_buffer(name, torch.zeros((), device="meta"), persistent=False)

    def of_operands(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Scales of x, W and dy; None while there is no history."""
        if not self.has_history:
            return None, None, None
        return self.scale_x, self.scale_weight, self.scale_gradient


@torch.no_grad()
def update_amax(amax: Tensor, tile_amax: Tensor) -> None:
    """Raise a running amax to the largest of the tiles' values, in place."""
    amax.copy_(torch.maximum(amax, tile_amax.amax()))
