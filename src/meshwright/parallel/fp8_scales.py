"""The histories of delayed scaling, kept equal on all ranks that hold parts of the same layers."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.mesh import Mesh
from meshwright.models.layers.linear import Linear
from meshwright.precision.fp8.delayed import DelayedProduct


class DelayedScales:
    """Every delayed linear of this rank; all ranks call its methods together."""

    def __init__(self, stages: Iterable[nn.Module], mesh: Mesh) -> None:
        found = [named for stage in stages for named in stage.named_modules()]
        self._linears = {
            name: (linear, linear.product)
            for name, linear in found
            if isinstance(linear, Linear) and isinstance(linear.product, DelayedProduct)
        }
        groups = [mesh.data.get_group("data"), mesh.data.get_group("tp")]
        self._groups = [group for group in groups if group.size() > 1]
        self.set_units()

    def after_step(self) -> None:
        """After the weights were updated. One small all-reduce for all layers; no host sync."""
        for (_, product), (seen_2, weight_amax) in zip(self._products(), self._agreed(), strict=True):
            product.advance(seen_2, weight_amax)

    def set_units(self) -> None:
        """After weights or histories were loaded."""
        for (_, product), (_, weight_amax) in zip(self._products(), self._agreed(), strict=True):
            product.set_units(weight_amax)

    def tensors(self) -> dict[str, Tensor]:
        """The histories, in the live storage, for a checkpoint."""
        return {f"fp8.{name}.history": product.history_2H for name, (_, product) in self._linears.items()}

    def _products(self) -> list[tuple[Linear, DelayedProduct]]:
        return list(self._linears.values())

    def _agreed(self) -> list[tuple[Tensor, Tensor]]:
        """What the step has seen, and the largest weight, of each linear over all ranks."""
        if not self._linears:
            return []
        rows = [
            torch.cat((product.seen_2, _largest(linear.weight).view(1).to(product.seen_2.device)))
            for linear, product in self._products()
        ]
        table_N3 = torch.stack(rows)
        for group in self._groups:
            dist.all_reduce(table_N3, op=dist.ReduceOp.MAX, group=group)
        return [(row[:2], row[2]) for row in table_N3]


@torch.no_grad()
def _largest(weight: Tensor) -> Tensor:
    held = weight.to_local() if isinstance(weight, DTensor) else weight
    return held.abs().amax().float() if held.numel() else torch.zeros((), device=held.device)
