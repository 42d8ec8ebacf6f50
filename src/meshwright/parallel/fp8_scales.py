"""The histories of delayed scaling, kept equal on all ranks that hold parts of the same layers."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.mesh import Mesh
from meshwright.models.layers.linear import Linear
from meshwright.parallel.fp8 import fp8_sites
from meshwright.precision.fp8.quantise import unit_of
from meshwright.precision.fp8.recipes import RECIPES

RULE = RECIPES["delayed"]


class DelayedScales:
    """Every delayed product of this rank, all in one table; all ranks call its methods together."""

    def __init__(self, stages: Iterable[nn.Module], mesh: Mesh, *, history_steps: int) -> None:
        found = [narrow for narrow in fp8_sites(stages) if narrow.product.scales is not None]
        self._names = [narrow.name for narrow in found]
        self._scales = [narrow.product.scales for narrow in found if narrow.product.scales is not None]
        # Weights kept in fp8 have their scales already.
        self._weighed = [() if narrow.product.kept else narrow.linears for narrow in found]
        self._history_N2H = torch.zeros(len(found), 2, history_steps, device=mesh.device)
        groups = [mesh.data.get_group("data"), mesh.data.get_group("tp")]
        self._groups = [group for group in groups if group.size() > 1]
        self.set_units()

    @torch.no_grad()
    def after_step(self) -> None:
        """After the weights were updated: enter what the step has seen (agreed by all ranks), and set the
        scales of the next one. One small all-reduce for all layers; no host sync."""
        if not self._scales:
            return
        seen = [seen for scales in self._scales for seen in (scales.seen_x, scales.seen_gradient)]
        seen_N2 = self._agreed(torch.stack(seen).view(-1, 2))
        self._history_N2H.copy_(torch.cat((seen_N2.unsqueeze(2), self._history_N2H[:, :, :-1]), dim=2))
        torch._foreach_zero_(seen)
        self.set_units()

    @torch.no_grad()
    def set_units(self) -> None:
        """After weights or histories were loaded. Host sync only until every product has a history."""
        if not self._scales:
            return
        x_N, gradient_N = self._history_N2H.amax(2).unbind(1)
        weight_N = self._agreed(torch.stack([_largest(linears, x_N[0]) for linears in self._weighed]))
        if not all(scales.is_known for scales in self._scales):
            for scales, is_known in zip(self._scales, x_N.tolist(), strict=True):
                scales.is_known = bool(is_known)
        old = [unit for s in self._scales for unit in (s.unit_x, s.unit_weight, s.unit_gradient)]
        operands_N2 = unit_of(torch.stack((x_N, weight_N), dim=1), RULE.operand)
        gradients_N1 = unit_of(gradient_N.unsqueeze(1), RULE.gradient)
        torch._foreach_copy_(old, list(torch.cat((operands_N2, gradients_N1), dim=1).flatten()))

    def tensors(self) -> dict[str, Tensor]:
        """The histories, in the live storage, for a checkpoint."""
        return {
            f"fp8.{name}.history": history_2H
            for name, history_2H in zip(self._names, self._history_N2H, strict=True)
        }

    def _agreed(self, magnitudes: Tensor) -> Tensor:
        """The largest over all ranks, in place."""
        for group in self._groups:
            dist.all_reduce(magnitudes, op=dist.ReduceOp.MAX, group=group)
        return magnitudes


def _largest(linears: Sequence[Linear], like: Tensor) -> Tensor:
    """Of the parts of the weights that this rank holds; 0 for none."""
    largest = torch.zeros_like(like)
    for linear in linears:
        weight = linear.weight.to_local() if isinstance(linear.weight, DTensor) else linear.weight
        if weight.numel():
            largest = torch.maximum(largest, weight.detach().abs().amax().to(like))
    return largest
