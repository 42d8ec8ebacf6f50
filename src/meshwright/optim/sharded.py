"""What update rules over whole parameters have in common: parts, their state, the count of updates."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.optim.whole import Whole


class Part(NamedTuple):
    """One shard as an update sees it."""

    shard: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    whole: Whole
    lr: float
    weight_decay: float


class ShardedOptimizer(torch.optim.Optimizer):
    """Updates shards as the whole parameters would be; its state is allocated at once."""

    num_updates: int = 0

    def __init__(
        self, groups: list[dict[str, Any]], wholes: Mapping[nn.Parameter, Whole], *, lr: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self._wholes = wholes
        for group in self.param_groups:
            for shard in group["params"]:
                self.state[shard] = self.new_state(shard.detach(), wholes[shard])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every shard; all ranks call it together."""
        assert closure is None, "gradients are accumulated before the step"
        self.num_updates += 1
        self.update([part for group in self.param_groups for part in self._parts(group)])

    def _parts(self, group: dict[str, Any]) -> list[Part]:
        return [
            Part(
                shard, shard.grad, self.state[shard], self._wholes[shard], group["lr"], group["weight_decay"]
            )
            for shard in group["params"]
            if shard.grad is not None
        ]

    @abstractmethod
    def new_state(self, shard: Tensor, whole: Whole) -> dict[str, Tensor]:
        """The state of one shard before the first update."""

    @abstractmethod
    def update(self, parts: list[Part]) -> None:
        """Change every shard and its state in place; `num_updates` counts this update already."""


def adam_direction(
    exp_avg: Tensor, exp_avg_sq: Tensor, *, betas: tuple[float, float], eps: float, num_updates: int
) -> Tensor:
    """First moment over the root of the second, both corrected for having started at zero."""
    beta1, beta2 = betas
    root = exp_avg_sq.sqrt().div_((1.0 - beta2**num_updates) ** 0.5).add_(eps)
    return (exp_avg / root).div_(1.0 - beta1**num_updates)


def blend(average: Tensor, new: Tensor, beta: float) -> Tensor:
    """average <- beta x average + (1 - beta) x new, in place."""
    return average.mul_(beta).add_(new, alpha=1.0 - beta)
