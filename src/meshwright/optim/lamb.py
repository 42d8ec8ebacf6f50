"""LAMB: Adam whose step is in proportion to the norm of each parameter.

    r = m / (sqrt(v) + eps) + decay x w,   w <- w - lr x (|w| / |r|) x r

The norms are of the whole parameter. Vectors (norms, biases) and parameters that are zero keep ratio 1.
"""

import torch
from torch import Tensor

from meshwright.optim.full_parameter import Whole, whole_norms
from meshwright.optim.sharded import (
    Part,
    ShardedOptimizer,
    Shards,
    adam_directions,
    step_along,
    wide_zeros,
    with_decay,
)


class Lamb(ShardedOptimizer):
    """You et al. 2019."""

    def __init__(
        self,
        shards: Shards,
        *,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self._betas, self._eps = betas, eps
        super().__init__(shards)

    def new_state(self, shard: Tensor, whole: Whole) -> dict[str, Tensor]:
        """Two moments."""
        return {"exp_avg": wide_zeros(shard), "exp_avg_sq": wide_zeros(shard)}

    def update(self, parts: list[Part]) -> None:
        """See above; two norms per matrix in one all-reduce per set of axes."""
        moved = adam_directions(parts, betas=self._betas, eps=self._eps, num_updates=self.num_updates)
        directions = with_decay(parts, moved)
        matrices = [pair for pair in zip(parts, directions, strict=True) if pair[0].shard.ndim >= 2]
        norms = whole_norms(
            [(tensor, part.whole) for part, along in matrices for tensor in (part.shard, along)]
        )
        for (_, along), weight, length in zip(matrices, norms[::2], norms[1::2], strict=True):
            along.mul_(torch.where((weight > 0) & (length > 0), weight / length, torch.ones_like(weight)))
        step_along(parts, directions, has_decay=False)
