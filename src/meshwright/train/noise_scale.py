"""The gradient noise scale: the batch, in tokens, beyond which more tokens per step help little.

    |g_part|^2 = |G|^2 + S / part_tokens,    |g|^2 = |G|^2 + S / batch_tokens        on average
    noise scale = S / |G|^2                                                          McCandlish et al. 2018

G is the gradient of all data and S the variance of one token's gradient, summed over parameters. The part is
the first half of the step's batch. Its gradient takes one more forward and backward, with loss weights of
zero for the other half, so it is right on every mesh. Training itself is not changed.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.data.microbatch import Batch, Microbatch
from meshwright.mesh import Mesh
from meshwright.models.balance import pop_routing_records
from meshwright.optim.clip import global_norm
from meshwright.parallel.program import scaled
from meshwright.train.step import Training


@dataclass(frozen=True)
class NoiseEstimate:
    """Signal and noise estimated from one step, very noisy: average both over steps, then divide."""

    signal: float
    """Estimate of |G|^2."""
    noise: float
    """Estimate of S, per token."""


@dataclass(frozen=True)
class HalfBatchGradient:
    """Gradient of half a batch, as device scalars; reading them waits for the device."""

    norm: Tensor
    """Norm of the gradient of (sum over the half's tokens / tokens of the full batch)."""
    share: Tensor
    """Tokens of the half / tokens of the batch."""
    num_tokens: int
    """Tokens of the batch."""

    def estimate(self, grad_norm: float) -> NoiseEstimate | None:
        """Solve the two equations above; `grad_norm` is that of the full batch. Host sync.

        None where one half has no target at all, as in the last batch of the data.
        """
        share = float(self.share)
        if not 0.0 < share < 1.0 - 1e-6:
            return None
        part_square, square = (float(self.norm) / share) ** 2, grad_norm**2
        noise = self.num_tokens * (part_square - square) / (1.0 / share - 1.0)
        return NoiseEstimate(signal=(square - share * part_square) / (1.0 - share), noise=noise)


def measure_half_batch(training: Training, batch: Batch, mesh: Mesh) -> HalfBatchGradient:
    """The gradient norm of the first half of a batch; all ranks call it. No host sync."""
    part = _first_half(batch.microbatches, mesh)
    scale = training.loss_scale.scale if training.loss_scale else 1.0
    training.program.accumulate(part, scale=scale)
    norm = global_norm(training.shards, training.device) / scale
    training.optimizer.zero_grad()
    for stage in training.program.stages:
        pop_routing_records(stage)  # what routers recorded here must not count in the step
    # A weight is 1 / tokens of the batch; ranks that differ only in cp, tp or pp have the same sequences.
    share = torch.stack([one.weights_BS.double().sum() for one in part]).sum()
    dist.all_reduce(share)
    copies = mesh.parallel.num_ranks // mesh.parallel.dp
    return HalfBatchGradient(norm=norm, share=share / copies, num_tokens=batch.num_tokens)


def _first_half(microbatches: tuple[Microbatch, ...], mesh: Mesh) -> list[Microbatch]:
    """The first micro-batches of every rank or, where there is only one, those of the first ranks."""
    count = len(microbatches)
    if count == 1:
        return [scaled(microbatches[0], float(mesh.dp_rank < mesh.parallel.dp // 2))]
    return [scaled(one, float(index < count // 2)) for index, one in enumerate(microbatches)]
