"""The amax histories of delayed scaling, equal on all ranks that hold shards of the same layers."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.mesh import Mesh
from meshwright.models.layers.linear import Linear
from meshwright.ops import torch_foreach as foreach
from meshwright.parallel.fp8 import fp8_sites
from meshwright.precision.fp8.quantise import power_of_two_scale
from meshwright.precision.fp8.recipes import RECIPES

RULE = RECIPES["delayed"]


class DelayedScales:
    """The amax histories and scales of every delayed fp8 matmul of this rank; all ranks call its methods."""

    def __init__(self, stages: Iterable[nn.Module], mesh: Mesh, *, history_steps: int) -> None:
        found = [site for site in fp8_sites(stages) if site.matmul.scales is not None]
        self._names = [site.name for site in found]
        self._scales = [site.matmul.scales for site in found if site.matmul.scales is not None]
        # Cached fp8 weights have their scales already.
        self._scaled_linears = [() if site.matmul.cached_weight else site.linears for site in found]
        self._history_N2H = torch.zeros(len(found), 2, history_steps, device=mesh.device)
        groups = [mesh.data.get_group("data"), mesh.data.get_group("tp")]
        self._groups = [group for group in groups if group.size() > 1]
        self.set_scales()

    @torch.no_grad()
    def after_step(self) -> None:
        """Add the step's amax to the histories and set the scales of the next step, after a weight update.
        One small all-reduce for all layers; no host sync."""
        if not self._scales:
            return
        seen = [seen for scales in self._scales for seen in (scales.amax_x, scales.amax_gradient)]
        seen_N2 = self._reduce_max(torch.stack(seen).view(-1, 2))
        self._history_N2H.copy_(torch.cat((seen_N2.unsqueeze(2), self._history_N2H[:, :, :-1]), dim=2))
        foreach.zero_(seen)
        self.set_scales()

    @torch.no_grad()
    def set_scales(self) -> None:
        """Set the scales from weights and histories. Host sync only until every matmul has a history."""
        if not self._scales:
            return
        x_N, gradient_N = self._history_N2H.amax(2).unbind(1)
        weight_N = self._reduce_max(torch.stack([_amax(linears, x_N[0]) for linears in self._scaled_linears]))
        if not all(scales.has_history for scales in self._scales):
            for scales, has_history in zip(self._scales, x_N.tolist(), strict=True):
                scales.has_history = bool(has_history)
        old = [scale for s in self._scales for scale in (s.scale_x, s.scale_weight, s.scale_gradient)]
        operands_N2 = power_of_two_scale(torch.stack((x_N, weight_N), dim=1), RULE.operand)
        gradients_N1 = power_of_two_scale(gradient_N.unsqueeze(1), RULE.gradient)
        foreach.copy_(old, list(torch.cat((operands_N2, gradients_N1), dim=1).flatten()))

    def tensors(self) -> dict[str, Tensor]:
        """The histories, in the live storage, for a checkpoint."""
        return {
            f"fp8.{name}.history": history_2H
            for name, history_2H in zip(self._names, self._history_N2H, strict=True)
        }

    def _reduce_max(self, amax: Tensor) -> Tensor:
        """The largest over all ranks, in place."""
        for group in self._groups:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        return amax


def _amax(linears: Sequence[Linear], like: Tensor) -> Tensor:
    """The largest magnitude of the weight shards that this rank holds; 0 where it holds none."""
    largest = torch.zeros_like(like)
    for linear in linears:
        weight = linear.weight.to_local() if isinstance(linear.weight, DTensor) else linear.weight
        if weight.numel():
            largest = torch.maximum(largest, weight.detach().abs().amax().to(like))
    return largest
