"""SGD with momentum for weights kept in bf16; in fp32 torch's own is used.

m <- momentum x m + g + decay x w,   w <- w - lr x m
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.optim.full_parameter import Whole
from meshwright.optim.sharded import Part, ShardedOptimizer, Shards, step_along, wide_zeros, with_decay


class Sgd(ShardedOptimizer):
    """Element by element, as torch's."""

    def __init__(self, shards: Shards, *, momentum: float) -> None:
        self._momentum = momentum
        super().__init__(shards)

    def new_state(self, shard: Tensor, whole: Whole) -> dict[str, Tensor]:
        """One momentum, unless it is 0."""
        return {"momentum_buffer": wide_zeros(shard)} if self._momentum else {}

    def update(self, parts: list[Part]) -> None:
        """See above."""
        along = with_decay(parts, [part.gradient for part in parts])
        if self._momentum:
            along = carried(parts, along, self._momentum)
        step_along(parts, along, has_decay=False)


def carried(parts: Sequence[Part], along: list[Tensor], momentum: float) -> list[Tensor]:
    """momentum x buffer + direction, in the buffers and as a copy to step along."""
    buffers = [part.state["momentum_buffer"] for part in parts]
    torch._foreach_mul_(buffers, momentum)
    torch._foreach_add_(buffers, along)
    torch._foreach_copy_(along, buffers)
    return list(along)
