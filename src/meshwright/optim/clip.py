"""The global gradient norm, each parameter counted once, and clipping by it."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.optim.combined import part_of
from meshwright.optim.sharded import ShardedOptimizer

NORM_EPSILON = 1e-6  # as torch's own clipping


def global_norm(shards: Iterable[tuple[nn.Parameter, float]], device: torch.device) -> Tensor:
    """sqrt of the sum over the world of |gradient|^2 x share: the same number on every rank.

    A shard that r ranks hold alike enters with share 1/r, so replicas count once; a second copy of a
    tied weight enters with share 0. One all-reduce of one scalar; no host sync.
    """
    by_share: dict[float, list[Tensor]] = defaultdict(list)
    for shard, share in shards:
        if shard.grad is not None and share > 0:
            by_share[share].append(shard.grad)
    # Squares of fp32 gradients are summed in fp64, so an infinite norm means inf or nan in a gradient.
    total = torch.zeros((), dtype=torch.float64, device=device)
    for share, grads in by_share.items():
        norms = torch._foreach_norm(grads, 2.0, dtype=torch.float64)
        total += torch.stack(norms).square().sum() * share
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.sqrt()


def clip_gradients(
    shards: list[tuple[nn.Parameter, float]],
    max_norm: float | None,
    device: torch.device,
    *,
    scale: float = 1.0,
    optimizer: torch.optim.Optimizer | None = None,
) -> Tensor:
    """Undo the loss scale, then limit the global norm to `max_norm`; returns the norm before clipping.

    Rules of `optimizer` that multiply as they read a gradient do so in the next step: its clipped form is
    written nowhere.
    """
    if scale != 1.0:
        torch._foreach_mul_([shard.grad for shard, _ in shards if shard.grad is not None], 1.0 / scale)
    norm = global_norm(shards, device)
    if max_norm is not None:
        factor = (max_norm / (norm + NORM_EPSILON)).clamp(max=1.0)
        others = _hand_on([shard for shard, _ in shards], factor, optimizer)
        multiply([shard.grad for shard in others if shard.grad is not None], factor)
    return norm


def _hand_on(
    shards: list[nn.Parameter], factor: Tensor, optimizer: torch.optim.Optimizer | None
) -> list[nn.Parameter]:
    """Tell the rules that take a factor; the shards of all others."""
    if optimizer is None:
        return shards
    rules = [part_of(optimizer, shard) for shard in shards]
    for rule in rules:
        if isinstance(rule, ShardedOptimizer) and rule.takes_factor:
            rule.gradient_factor = factor
    return [
        shard
        for shard, rule in zip(shards, rules, strict=True)
        if not (isinstance(rule, ShardedOptimizer) and rule.takes_factor)
    ]


def multiply(grads: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a scalar on the device; bf16 ones in fp32, rounded once."""
    wide = [grad for grad in grads if grad.dtype != torch.bfloat16]
    if wide:
        # In the dtype of the gradients, or torch multiplies them one by one instead of all in one launch.
        torch._foreach_mul_(wide, factor.to(wide[0].dtype))
    for grad in grads:
        if grad.dtype == torch.bfloat16 and grad.numel():
            one_pass = _compiled_pass() if grad.is_cuda else multiply_narrow
            one_pass(grad.view(-1), factor)


def multiply_narrow(grad: Tensor, factor: Tensor) -> None:
    """torch would round the factor itself to bf16."""
    grad.copy_(grad.float() * factor.float())


@cache
def _compiled_pass() -> Callable[[Tensor, Tensor], None]:
    return torch.compile(multiply_narrow, dynamic=True, fullgraph=True)
