"""The histories of delayed scaling, kept equal on all ranks that hold parts of the same layers."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.mesh import Mesh
from meshwright.models.layers.linear import Linear
from meshwright.parallel.fp8 import narrow_products
from meshwright.precision.fp8.delayed import ScaleHistory


class DelayedScales:
    """Every delayed product of this rank; all ranks call its methods together."""

    def __init__(self, stages: Iterable[nn.Module], mesh: Mesh) -> None:
        self._found: dict[str, tuple[ScaleHistory, Sequence[Linear]]] = {
            narrow.name: (narrow.product.history, () if narrow.product.kept else narrow.linears)
            for narrow in narrow_products(stages)
            if narrow.product.history is not None
        }
        groups = [mesh.data.get_group("data"), mesh.data.get_group("tp")]
        self._groups = [group for group in groups if group.size() > 1]
        self.set_units()

    def after_step(self) -> None:
        """After the weights were updated. One small all-reduce for all layers; no host sync."""
        for (history, _), (seen_2, weight_amax) in zip(self._found.values(), self._agreed(), strict=True):
            history.advance(seen_2, weight_amax)

    def set_units(self) -> None:
        """After weights or histories were loaded."""
        for (history, _), (_, weight_amax) in zip(self._found.values(), self._agreed(), strict=True):
            history.set_units(weight_amax)

    def tensors(self) -> dict[str, Tensor]:
        """The histories, in the live storage, for a checkpoint."""
        return {f"fp8.{name}.history": history.history_2H for name, (history, _) in self._found.items()}

    def _agreed(self) -> list[tuple[Tensor, Tensor]]:
        """What the step has seen, and the largest weight, of each product over all ranks."""
        if not self._found:
            return []
        rows = [
            torch.stack((history.seen_x, history.seen_gradient, _largest(linears, history.seen_x)))
            for history, linears in self._found.values()
        ]
        table_N3 = torch.stack(rows)
        for group in self._groups:
            dist.all_reduce(table_N3, op=dist.ReduceOp.MAX, group=group)
        return [(row[:2], row[2]) for row in table_N3]


@torch.no_grad()
def _largest(linears: Sequence[Linear], like: Tensor) -> Tensor:
    """Of the parts of the weights that this rank holds; 0 where weights kept in fp8 have a scale already."""
    largest = torch.zeros_like(like)
    for linear in linears:
        weight = linear.weight.to_local() if isinstance(linear.weight, DTensor) else linear.weight
        if weight.numel():
            largest = torch.maximum(largest, weight.abs().amax().to(like))
    return largest
