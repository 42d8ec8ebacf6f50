"""SGD with momentum for weights stored in bf16; in fp32 torch's SGD is used.

m <- momentum x m + g + decay x w,   w <- w - lr x m
"""

from collections.abc import Sequence

from torch import Tensor

from meshwright.ops import torch_foreach as foreach
from meshwright.optim.full_parameter import FullParameter
from meshwright.optim.sharded import (
    OptimizerShards,
    ShardedOptimizer,
    ShardUpdate,
    add_weight_decay,
    apply_directions,
    state_zeros,
)


class Sgd(ShardedOptimizer):
    """SGD with momentum, as in torch, element by element."""

    def __init__(self, shards: OptimizerShards, *, momentum: float) -> None:
        self._momentum = momentum
        super().__init__(shards)

    def new_state(self, shard: Tensor, full: FullParameter) -> dict[str, Tensor]:
        """A momentum buffer, unless the momentum is 0."""
        return {"momentum_buffer": state_zeros(shard)} if self._momentum else {}

    def update(self, parts: list[ShardUpdate]) -> None:
        """Update all shards."""
        directions = add_weight_decay(parts, [part.gradient for part in parts])
        if self._momentum:
            directions = apply_momentum(parts, directions, self._momentum)
        apply_directions(parts, directions, has_decay=False)


def apply_momentum(parts: Sequence[ShardUpdate], directions: list[Tensor], momentum: float) -> list[Tensor]:
    """momentum x buffer + direction, written to the buffers and to `directions`, which are returned."""
    buffers = [part.state["momentum_buffer"] for part in parts]
    foreach.mul_(buffers, momentum)
    foreach.add_(buffers, directions)
    foreach.copy_(directions, buffers)
    return list(directions)
