"""LARS: SGD with momentum whose step is proportional to the norm of each parameter.

    d = g + decay x w,   ratio = trust x |w| / (|g| + decay x |w|)
    m <- momentum x m + ratio x d,   w <- w - lr x m

The norms are those of the full parameter. Vectors (norms, biases) and zero parameters have ratio 1.
"""

import torch
from torch import Tensor

from meshwright.optim.full_parameter import FullParameter, full_norms
from meshwright.optim.sgd import apply_momentum
from meshwright.optim.sharded import (
    OptimizerShards,
    ShardedOptimizer,
    ShardUpdate,
    add_weight_decay,
    apply_directions,
    state_zeros,
)


class Lars(ShardedOptimizer):
    """LARS (You, Gitman and Ginsburg 2017)."""

    def __init__(
        self,
        shards: OptimizerShards,
        *,
        momentum: float,
        trust: float,
    ) -> None:
        self._momentum, self._trust = momentum, trust
        super().__init__(shards)

    def new_state(self, shard: Tensor, full: FullParameter) -> dict[str, Tensor]:
        """A momentum buffer, unless the momentum is 0."""
        return {"momentum_buffer": state_zeros(shard)} if self._momentum else {}

    def update(self, parts: list[ShardUpdate]) -> None:
        """Update all shards; two norms per matrix, in one all-reduce per set of axes."""
        matrices = [part for part in parts if part.shard.ndim >= 2]
        norms = full_norms(
            [(tensor, part.full) for part in matrices for tensor in (part.shard, part.gradient)]
        )
        ratios = {
            id(part.shard): self._ratio(weight, gradient, part.weight_decay)
            for part, weight, gradient in zip(matrices, norms[::2], norms[1::2], strict=True)
        }
        directions = add_weight_decay(parts, [part.gradient for part in parts])
        for part, direction in zip(parts, directions, strict=True):
            if id(part.shard) in ratios:
                direction.mul_(ratios[id(part.shard)])
        if self._momentum:
            directions = apply_momentum(parts, directions, self._momentum)
        apply_directions(parts, directions, has_decay=False)

    def _ratio(self, weight: Tensor, gradient: Tensor, decay: float) -> Tensor:
        ratio = self._trust * weight / (gradient + decay * weight)
        return torch.where((weight > 0) & (gradient > 0), ratio, torch.ones_like(ratio))
