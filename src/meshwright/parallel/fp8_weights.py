"""Cached fp8 weights: cast once after every weight update, with the amax all-reduced (MAX) over tp."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.mesh import Mesh
from meshwright.ops.sharded import local
from meshwright.parallel.fp8 import Fp8Site, fp8_sites
from meshwright.parallel.fp8_experts import expert_sites
from meshwright.precision.fp8.quantise import power_of_two_scale
from meshwright.precision.fp8.recipes import E4M3


class Fp8Weights:
    """The cached fp8 weights of this rank's stages; none unless `fp8.cast_weights=per_step`."""

    def __init__(self, stages: Sequence[nn.Module], mesh: Mesh) -> None:
        self._stages = stages
        self._group = mesh.group("tp") if mesh.parallel.tp > 1 else None
        self._frozen_versions: dict[str, tuple[int, ...]] = {}
        """Of sites whose weights are frozen: the versions of the weights that were cast."""

    @torch.no_grad()
    def cast(self) -> None:
        """Cast the current weights. All ranks call it; with tp small all-reduces, no host sync."""
        for site in expert_sites(self._stages):
            site.matmul.cast(site.weights)
        cached = [
            (site.matmul.cached_weight, [local(linear.weight) for linear in site.linears])
            for site in fp8_sites(self._stages)  # looked up each time: blocks may have fallen back to bf16
            if site.matmul.cached_weight is not None and self._is_due(site)
        ]
        if not cached:
            return
        amax = torch.stack([_amax(weights) for _, weights in cached])
        if self._group is not None:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self._group)
        for (copy, weights), scale in zip(cached, power_of_two_scale(amax, E4M3), strict=True):
            copy.cast(weights, scale)

    def _is_due(self, site: Fp8Site) -> bool:
        """Whether the weights of a site may differ from the cached ones; frozen ones change when loaded."""
        weights = [linear.weight for linear in site.linears]
        if any(weight.requires_grad for weight in weights):
            return True
        versions = tuple(local(weight)._version for weight in weights)
        is_due = self._frozen_versions.get(site.name) != versions
        self._frozen_versions[site.name] = versions
        return is_due


def _amax(weights: Sequence[Tensor]) -> Tensor:
    """The largest magnitude, fp32, in one pass; nan where there is one."""
    return torch.stack([torch.linalg.vector_norm(weight, torch.inf) for weight in weights]).amax().float()
