"""The program of a user module: one step with a loss of (sum, count).

The loss of a micro-batch is (sum, count); the loss of the step is the sum of all sums / the sum of all
counts, over every micro-batch and data-parallel rank. The counts are known only after all forwards, so
gradients are those of the sums, and are divided once at the end of the step.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import SpecError
from meshwright.mesh import Mesh
from meshwright.modules.buffers import SharedBuffers
from meshwright.modules.dataset import DatasetMicrobatch
from meshwright.ops import torch_foreach as foreach
from meshwright.parallel.dp import Reducer
from meshwright.parallel.shards import ParameterShard

Loss = Callable[[Any, Any], tuple[Tensor, Tensor | float]]
"""(module, batch of the loader) -> (sum of losses, number of losses in the sum)."""


class ModuleProgram:
    """A module on each rank, without pipeline stages; micro-batches are whatever the loader returns."""

    def __init__(
        self,
        model: nn.Module,
        *,
        mesh: Mesh,
        shards: list[ParameterShard],
        reducer: Reducer,
        buffers: SharedBuffers,
        loss: Loss,
    ) -> None:
        self.stages, self.shards = [model], shards
        self._model, self._reducer, self._buffers, self._loss = model, reducer, buffers, loss
        self.reduction_wait, self.gradient_hashes = reducer.wait, reducer.hashes
        self._totals = LossTotals(mesh)

    def accumulate(self, microbatches: Sequence[DatasetMicrobatch], *, scale: float = 1.0) -> Tensor:
        """Implements `Program.accumulate`."""
        for index, microbatch in enumerate(microbatches):
            loss_sum, count = counted_loss(self._loss, self._model, microbatch)
            self.backward(loss_sum, count, is_last=index == len(microbatches) - 1, scale=scale)
        return self.finish()

    def backward(self, loss_sum: Tensor, count: Tensor | float, *, is_last: bool, scale: float = 1.0) -> None:
        """Compute the gradients of one micro-batch; after the last one they are reduced."""
        if not loss_sum.requires_grad:
            raise SpecError(
                "the loss sum depends on no parameter: it has no gradient",
                where="loss",
                hint="compute it from the model's output, without detach(), item() or no_grad()",
            )
        self._totals.add(loss_sum, count)
        with self._reducer.microbatch(is_last=is_last):
            (loss_sum * scale).backward()

    def finish(self) -> Tensor:
        """Divide the gradients by the count, after the last backward. Returns this rank's part of the loss.
        Communicates."""
        return self._totals.divide(self.shards)

    @property
    def loss(self) -> Tensor:
        """Loss of the last step, over all ranks."""
        return self._totals.loss

    def evaluate(self, microbatches: Iterable[DatasetMicrobatch]) -> Tensor:
        """Implements `Program.evaluate`: this rank's part of the loss sum / the global count."""
        self._model.eval()
        with torch.no_grad():
            for microbatch in microbatches:
                self._totals.add(*counted_loss(self._loss, self._model, microbatch))
        self._model.train()
        return self._totals.divide([])

    def gather_parameters(self) -> None:
        """Implements `Program.gather_parameters`."""
        self._reducer.gather_parameters()
        self._buffers.broadcast()


def counted_loss(
    loss: Loss, model: Callable[..., Any], microbatch: DatasetMicrobatch
) -> tuple[Tensor, Tensor | float]:
    """The loss of a micro-batch; a filler micro-batch adds nothing to sum, count or gradients."""
    loss_sum, count = require_pair(loss(model, microbatch.content))
    return (loss_sum, count) if microbatch.is_counted else (loss_sum * 0.0, count * 0.0)


def require_pair(found: Any) -> tuple[Tensor, Tensor | float]:
    """Refuse a loss that is not (sum, count): means of micro-batches cannot be combined."""
    is_pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor)
    if is_pair and found[0].ndim == 0 and isinstance(found[1], Tensor | int | float):
        return found
    described = f"({', '.join(map(_describe, found))})" if isinstance(found, tuple) else _describe(found)
    raise SpecError(
        f"the loss returned {described} where (sum, count) was expected",
        where="loss",
        hint="return the sum of the losses as a scalar tensor and how many were summed, "
        "such as cross_entropy(..., reduction='sum'), len(labels)",
    )


def _describe(found: Any) -> str:
    return f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__


class LossTotals:
    """Sum and count of the loss on this rank in the current step."""

    def __init__(self, mesh: Mesh) -> None:
        self._groups = [mesh.data.get_group("data"), mesh.group("pp")]
        self._sum_count = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        self.loss = self._sum_count[0]

    def add(self, loss_sum: Tensor, count: Tensor | float) -> None:
        """Add the loss of one micro-batch. No host sync."""
        self._sum_count[0] += loss_sum.detach()
        self._sum_count[1] += count

    def divide(self, shards: Sequence[ParameterShard]) -> Tensor:
        """Divide gradients by the count of all ranks; returns this rank's sum / that count. No host sync."""
        everywhere = self._sum_count.clone()
        for group in self._groups:
            dist.all_reduce(everywhere, group=group)
        count = everywhere[1].clamp(min=1.0)  # a step without any loss term has a loss of zero, not nan
        gradients = [one.shard.grad for one in shards if one.shard.grad is not None]
        if gradients:
            foreach.div_(gradients, count.to(gradients[0].dtype))
        part, self.loss = self._sum_count[0] / count, everywhere[0] / count
        self._sum_count = torch.zeros_like(self._sum_count)
        return part
