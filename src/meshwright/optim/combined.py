"""Several optimizers over different shards that act as one."""

from collections.abc import Sequence

import torch
from torch import nn


class CombinedOptimizer(torch.optim.Optimizer):
    """Its groups and states are the very objects of its parts; subclasses define `step`."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.part_by_shard: dict[nn.Parameter, torch.optim.Optimizer] = {}
        for part in parts:
            self.state.update(part.state)
            self.part_by_shard |= {shard: part for group in part.param_groups for shard in group["params"]}


def optimizer_of(optimizer: torch.optim.Optimizer, shard: nn.Parameter) -> torch.optim.Optimizer:
    """The optimizer that updates a shard: the given one, or the part of it that does."""
    return optimizer.part_by_shard[shard] if isinstance(optimizer, CombinedOptimizer) else optimizer
