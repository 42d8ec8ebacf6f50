"""Several optimizers over different shards that look like one."""

from collections.abc import Sequence

import torch
from torch import nn


class JoinedOptimizer(torch.optim.Optimizer):
    """Groups and states are those of its parts, the very same objects; whoever inherits says how to step."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.part_of: dict[nn.Parameter, torch.optim.Optimizer] = {}
        for part in parts:
            self.state.update(part.state)
            self.part_of |= {shard: part for group in part.param_groups for shard in group["params"]}


def part_of(optimizer: torch.optim.Optimizer, shard: nn.Parameter) -> torch.optim.Optimizer:
    """The optimizer that updates a shard: the given one, or the part of it that does."""
    return optimizer.part_of[shard] if isinstance(optimizer, JoinedOptimizer) else optimizer
