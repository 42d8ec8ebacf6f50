"""The global gradient norm, each parameter counted once, and clipping by it."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.ops import torch_foreach as foreach
from meshwright.optim.combined import optimizer_of
from meshwright.optim.sharded import ShardedOptimizer

NORM_EPSILON = 1e-6  # as torch's own clipping


def global_norm(shards: Iterable[tuple[nn.Parameter, float]], device: torch.device) -> Tensor:
    """sqrt of the sum over all ranks of |gradient|^2 x share; equal on every rank.

    A shard that r ranks replicate has share 1/r, so replicas count once; a second copy of a tied weight has
    share 0. One all-reduce of one scalar; no host sync.
    """
    by_share: dict[float, list[Tensor]] = defaultdict(list)
    for shard, share in shards:
        if shard.grad is not None and share > 0:
            by_share[share].append(shard.grad)
    # Squares of fp32 gradients are summed in fp64, so an infinite norm means inf or nan in a gradient.
    total = torch.zeros((), dtype=torch.float64, device=device)
    for share, grads in by_share.items():
        norms = foreach.norm(grads, 2.0, dtype=torch.float64)
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

    Optimizers that can scale gradients as they read them do so in the next step, so that clipped gradients
    are never written.
    """
    grads = [shard.grad for shard, _ in shards if shard.grad is not None]
    if scale != 1.0 and grads:
        foreach.mul_(grads, 1.0 / scale)
    norm = global_norm(shards, device)
    if max_norm is not None:
        factor = (max_norm / (norm + NORM_EPSILON)).clamp(max=1.0)
        others = _pass_to_optimizer([shard for shard, _ in shards], factor, optimizer)
        scale_gradients([shard.grad for shard in others if shard.grad is not None], factor)
    return norm


def _pass_to_optimizer(
    shards: list[nn.Parameter], factor: Tensor, optimizer: torch.optim.Optimizer | None
) -> list[nn.Parameter]:
    """Set the factor of the optimizers that apply it themselves, and return the shards of all others."""
    if optimizer is None:
        return shards
    others: list[nn.Parameter] = []
    for shard in shards:
        part = optimizer_of(optimizer, shard)
        if isinstance(part, ShardedOptimizer) and part.applies_gradient_scale:
            part.gradient_scale = factor
        else:
            others.append(shard)
    return others


def scale_gradients(grads: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a scalar on the device; bf16 ones in fp32, rounded once."""
    others = [grad for grad in grads if grad.dtype != torch.bfloat16]
    if others:
        # The factor in the dtype of the gradients: otherwise torch multiplies them one by one.
        foreach.mul_(others, factor.to(others[0].dtype))
    for grad in grads:
        if grad.dtype == torch.bfloat16 and grad.numel():
            multiply = _compiled_multiply() if grad.is_cuda else multiply_bf16
            multiply(grad.view(-1), factor)


def multiply_bf16(grad: Tensor, factor: Tensor) -> None:
    """Multiply in fp32 and round once; torch would round the factor to bf16."""
    grad.copy_(grad.float() * factor.float())


@cache
def _compiled_multiply() -> Callable[[Tensor, Tensor], None]:
    return torch.compile(multiply_bf16, dynamic=True, fullgraph=True)
