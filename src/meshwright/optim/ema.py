"""An exponential moving average (EMA) of the weights, kept per shard."""

from collections.abc import Mapping

from torch import Tensor, nn

from meshwright.optim.sharded import state_zeros


class Ema:
    """average <- decay x average + (1 - decay) x weight, in fp32 (fp64 for fp64)."""

    def __init__(self, shards: Mapping[str, nn.Parameter], decay: float) -> None:
        self.decay = decay
        self._shards = dict(shards)
        self.averages: dict[str, Tensor] = {name: state_zeros(shard) for name, shard in shards.items()}
        self.restart()

    def restart(self) -> None:
        """Restart the average at the current weights (after initial weights were loaded)."""
        for name, average in self.averages.items():
            average.copy_(self._shards[name].detach())

    def update(self) -> None:
        """Update the averages after an optimizer step that was not skipped."""
        for name, average in self.averages.items():
            average.lerp_(self._shards[name].detach().to(average.dtype), 1.0 - self.decay)
