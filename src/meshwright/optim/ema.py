"""An exponential moving average of the weights, kept on the shards."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Ema:
    """average <- decay x average + (1 - decay) x weight, in the weights' own dtype (fp32)."""

    def __init__(self, shards: Mapping[str, nn.Parameter], decay: float) -> None:
        self.decay = decay
        self._shards = dict(shards)
        self.averages: dict[str, Tensor] = {name: shard.detach().clone() for name, shard in shards.items()}

    def restart(self) -> None:
        """Begin again at the present weights (after initial weights were loaded)."""
        for name, average in self.averages.items():
            average.copy_(self._shards[name].detach())

    def update(self) -> None:
        """After an optimizer step that was not skipped."""
        averages = list(self.averages.values())
        weights = [self._shards[name].detach() for name in self.averages]
        torch._foreach_lerp_(averages, weights, 1.0 - self.decay)
