"""LARS: SGD with momentum whose step is in proportion to the norm of each parameter.

    d = g + decay x w,   ratio = trust x |w| / (|g| + decay x |w|)
    m <- momentum x m + ratio x d,   w <- w - lr x m

The norms are of the whole parameter. Vectors (norms, biases) and parameters that are zero keep ratio 1.
"""

import torch
from torch import Tensor

from meshwright.optim.full_parameter import Whole, whole_norms
from meshwright.optim.sgd import carried
from meshwright.optim.sharded import Part, ShardedOptimizer, Shards, step_along, wide_zeros, with_decay


class Lars(ShardedOptimizer):
    """You, Gitman and Ginsburg 2017."""

    def __init__(
        self,
        shards: Shards,
        *,
        momentum: float,
        trust: float,
    ) -> None:
        self._momentum, self._trust = momentum, trust
        super().__init__(shards)

    def new_state(self, shard: Tensor, whole: Whole) -> dict[str, Tensor]:
        """One momentum, unless it is 0."""
        return {"momentum_buffer": wide_zeros(shard)} if self._momentum else {}

    def update(self, parts: list[Part]) -> None:
        """See above; two norms per matrix in one all-reduce per set of axes."""
        matrices = [part for part in parts if part.shard.ndim >= 2]
        norms = whole_norms(
            [(tensor, part.whole) for part in matrices for tensor in (part.shard, part.gradient)]
        )
        ratios = {
            id(part.shard): self._ratio(weight, gradient, part.weight_decay)
            for part, weight, gradient in zip(matrices, norms[::2], norms[1::2], strict=True)
        }
        along = with_decay(parts, [part.gradient for part in parts])
        for part, direction in zip(parts, along, strict=True):
            if id(part.shard) in ratios:
                direction.mul_(ratios[id(part.shard)])
        if self._momentum:
            along = carried(parts, along, self._momentum)
        step_along(parts, along, has_decay=False)

    def _ratio(self, weight: Tensor, gradient: Tensor, decay: float) -> Tensor:
        ratio = self._trust * weight / (gradient + decay * weight)
        return torch.where((weight > 0) & (gradient > 0), ratio, torch.ones_like(ratio))
