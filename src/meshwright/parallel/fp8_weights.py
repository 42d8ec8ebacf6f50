"""Cached fp8 weights: cast once after every weight update, with the amax all-reduced (MAX) over tp."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.mesh import Mesh
from meshwright.ops.sharded import local
from meshwright.parallel.fp8 import fp8_sites
from meshwright.parallel.fp8_experts import expert_sites
from meshwright.precision.fp8.quantise import power_of_two_scale
from meshwright.precision.fp8.recipes import E4M3


class Fp8Weights:
    """The cached fp8 weights of this rank's stages; none unless `fp8.cast_weights=per_step`."""

    def __init__(self, stages: Sequence[nn.Module], mesh: Mesh) -> None:
        self._stages = stages
        self._group = mesh.group("tp") if mesh.parallel.tp > 1 else None

    @torch.no_grad()
    def cast(self) -> None:
        """Cast the current weights. All ranks call it; with tp small all-reduces, no host sync."""
        for site in expert_sites(self._stages):
            site.matmul.cast(site.weights)
        cached = [
            (site.matmul.cached_weight, [local(linear.weight) for linear in site.linears])
            for site in fp8_sites(self._stages)  # looked up each time: blocks may have fallen back to bf16
            if site.matmul.cached_weight is not None
        ]
        if not cached:
            return
        amax = torch.stack([_amax(weights) for _, weights in cached])
        if self._group is not None:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self._group)
        for (copy, weights), scale in zip(cached, power_of_two_scale(amax, E4M3), strict=True):
            copy.cast(weights, scale)


def _amax(weights: Sequence[Tensor]) -> Tensor:
    """The largest magnitude, fp32, in one pass; nan where there is one."""
    return torch.stack([torch.linalg.vector_norm(weight, torch.inf) for weight in weights]).amax().float()
