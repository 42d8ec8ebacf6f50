"""SGD with momentum for weights kept in bf16; in fp32 torch's own is used.

m <- momentum x m + g + decay x w,   w <- w - lr x m
"""

from torch import Tensor

from meshwright.optim.sharded import Part, ShardedOptimizer, Shards, wide_zeros
from meshwright.optim.whole import Whole


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
        for part in parts:
            along = part.gradient.add(part.shard, alpha=part.weight_decay)
            if self._momentum:
                along = part.state["momentum_buffer"].mul_(self._momentum).add_(along)
            part.shard.add_(along, alpha=-part.lr)
