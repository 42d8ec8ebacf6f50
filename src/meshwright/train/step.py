"""One optimizer step."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.memory.offload.weights import HostedWeights
from meshwright.optim.build import set_learning_rate
from meshwright.optim.clip import clip_gradients
from meshwright.optim.ema import Ema
from meshwright.parallel.expert_balance import ExpertBalance
from meshwright.parallel.fp8_scales import DelayedScales
from meshwright.parallel.program import Program
from meshwright.precision.loss_scale import LossScale


@dataclasses.dataclass
class Training:
    """What a step works on. Nothing here knows how the model is cut."""

    program: Program
    optimizer: torch.optim.Optimizer
    device: torch.device
    max_grad_norm: float | None
    weights: HostedWeights
    """Blocks whose weights live on the host; its link counts all that `memory.offload` moved and holds."""
    loss_scale: LossScale | None = None
    ema: Ema | None = None
    experts: ExpertBalance | None = None
    fp8_scales: DelayedScales | None = None

    def __post_init__(self) -> None:
        trainable = [one for one in self.program.shards if one.parameter.requires_grad]
        self.shards = [(one.shard, one.norm_share) for one in trainable]
        self.named_shards = {one.name: one.shard for one in trainable}

    @property
    def scale(self) -> float:
        """What the loss is multiplied by before backward: above 1 for fp16."""
        return self.loss_scale.scale if self.loss_scale else 1.0


@dataclasses.dataclass(frozen=True)
class StepOutcome:
    """Device tensors: reading them waits for the step."""

    loss: Tensor
    """This rank's part of the loss; the sum over ranks is the loss."""
    grad_norm: Tensor
    is_skipped: bool = False


class StepBatch(Protocol):
    """What a step takes from a loader: micro-batches of the kind that the program was built for."""

    @property
    def microbatches(self) -> Sequence[Any]:
        """This rank's, in order."""
        ...


def train_step(training: Training, batch: StepBatch, *, learning_rate: float) -> StepOutcome:
    """Gradients of the whole batch, clipped, one update. No host sync except for fp16's overflow check."""
    loss = training.program.accumulate(batch.microbatches, scale=training.scale)
    grad_norm, is_sound = update(training, learning_rate=learning_rate)
    return StepOutcome(loss, grad_norm, is_skipped=not is_sound)


def update(training: Training, *, learning_rate: float | None) -> tuple[Tensor, bool]:
    """Clip the accumulated gradients and move the weights: the norm, and whether the step was made.

    Without a rate the optimizer keeps its own.
    """
    scale = training.scale
    grad_norm = clip_gradients(
        training.shards,
        training.max_grad_norm,
        training.device,
        scale=scale,
        optimizer=training.optimizer,
    )
    is_sound = training.loss_scale is None or training.loss_scale.update(
        float(grad_norm)
    )  # host sync: fp16 only
    if is_sound:
        if learning_rate is not None:
            set_learning_rate(training.optimizer, learning_rate)
        training.optimizer.step()
        training.program.gather_parameters()
        if training.ema is not None:
            training.ema.update()
        if training.fp8_scales is not None:
            training.fp8_scales.after_step()
    if training.experts is not None:
        training.experts.after_step(scale=scale, is_sound=is_sound)
    training.optimizer.zero_grad()
    return grad_norm, is_sound
