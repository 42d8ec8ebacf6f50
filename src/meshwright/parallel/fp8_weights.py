"""Weights kept in fp8: written anew whenever the weights have changed, with scales agreed over tp."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.mesh import Mesh
from meshwright.ops.sharded import local
from meshwright.parallel.fp8 import fp8_sites
from meshwright.precision.fp8.quantise import unit_of
from meshwright.precision.fp8.recipes import E4M3


class Fp8Weights:
    """The fp8 copies of this rank's stages; empty where none are kept."""

    def __init__(self, stages: Sequence[nn.Module], mesh: Mesh) -> None:
        self._stages = stages
        self._group = mesh.group("tp") if mesh.parallel.tp > 1 else None

    @torch.no_grad()
    def write(self) -> None:
        """Cast the weights as they are now. All ranks call it; with tp one small all-reduce, no host sync."""
        kept = [
            (narrow.product.kept, [local(linear.weight) for linear in narrow.linears])
            for narrow in fp8_sites(self._stages)  # looked up each time: blocks may have fallen back
            if narrow.product.kept is not None
        ]
        if not kept:
            return
        largest = torch.stack([_largest(weights) for _, weights in kept])
        if self._group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        for (copy, weights), unit in zip(kept, unit_of(largest, E4M3), strict=True):
            copy.write(weights, unit)


def _largest(weights: Sequence[Tensor]) -> Tensor:
    """The largest magnitude, fp32, in one pass; nan where there is one."""
    return torch.stack([torch.linalg.vector_norm(weight, torch.inf) for weight in weights]).amax().float()
