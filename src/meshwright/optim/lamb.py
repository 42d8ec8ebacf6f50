"""LAMB: Adam whose step is proportional to the norm of each parameter.

    r = m / (sqrt(v) + eps) + decay x w,   w <- w - lr x (|w| / |r|) x r

The norms are those of the full parameter. Vectors (norms, biases) and zero parameters have ratio 1.
"""

import torch
from torch import Tensor

from meshwright.optim.full_parameter import FullParameter, full_norms
from meshwright.optim.sharded import (
    OptimizerShards,
    ShardedOptimizer,
    ShardUpdate,
    adam_directions,
    add_weight_decay,
    apply_directions,
    state_zeros,
)


class Lamb(ShardedOptimizer):
    """LAMB (You et al. 2019)."""

    def __init__(
        self,
        shards: OptimizerShards,
        *,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self._betas, self._eps = betas, eps
        super().__init__(shards)

    def new_state(self, shard: Tensor, full: FullParameter) -> dict[str, Tensor]:
        """Two moments of zeros."""
        return {"exp_avg": state_zeros(shard), "exp_avg_sq": state_zeros(shard)}

    def update(self, parts: list[ShardUpdate]) -> None:
        """Update all shards; two norms per matrix, in one all-reduce per set of axes."""
        adam = adam_directions(parts, betas=self._betas, eps=self._eps, num_updates=self.num_updates)
        directions = add_weight_decay(parts, adam)
        matrices = [pair for pair in zip(parts, directions, strict=True) if pair[0].shard.ndim >= 2]
        norms = full_norms(
            [(tensor, part.full) for part, direction in matrices for tensor in (part.shard, direction)]
        )
        for (_, direction), weight, length in zip(matrices, norms[::2], norms[1::2], strict=True):
            direction.mul_(torch.where((weight > 0) & (length > 0), weight / length, torch.ones_like(weight)))
        apply_directions(parts, directions, has_decay=False)
