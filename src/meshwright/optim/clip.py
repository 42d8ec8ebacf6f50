"""The global gradient norm, each parameter counted once, and clipping by it."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_


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
) -> Tensor:
    """Undo the loss scale, then limit the global norm to `max_norm`; returns the norm before clipping."""
    if scale != 1.0:
        torch._foreach_mul_([shard.grad for shard, _ in shards if shard.grad is not None], 1.0 / scale)
    norm = global_norm(shards, device)
    if max_norm is not None:
        # In the dtype of the gradients, or torch multiplies them one by one instead of all in one launch.
        norm_like_grads = norm.to(torch.promote_types(shards[0][0].dtype, torch.float32)) if shards else norm
        clip_grads_with_norm_([shard for shard, _ in shards], max_norm, norm_like_grads)
    return norm
