"""One optimizer step."""

import dataclasses

import torch
from torch import Tensor

from meshwright.data.batches import Batch
from meshwright.optim.build import set_learning_rate
from meshwright.optim.clip import clip_gradients
from meshwright.optim.ema import Ema
from meshwright.parallel.program import Program
from meshwright.precision.loss_scale import LossScale
from meshwright.train.balance import ExpertBalance


@dataclasses.dataclass
class Training:
    """What a step works on. Nothing here knows how the model is cut."""

    program: Program
    optimizer: torch.optim.Optimizer
    device: torch.device
    max_grad_norm: float | None
    loss_scale: LossScale | None = None
    ema: Ema | None = None
    experts: ExpertBalance | None = None

    def __post_init__(self) -> None:
        trainable = [one for one in self.program.owned if one.parameter.requires_grad]
        self.shards = [(one.shard, one.norm_share) for one in trainable]
        self.named_shards = {one.name: one.shard for one in trainable}


@dataclasses.dataclass(frozen=True)
class StepOutcome:
    """Device tensors: reading them waits for the step."""

    loss: Tensor
    """This rank's part of the loss; the sum over ranks is the loss."""
    grad_norm: Tensor
    is_skipped: bool = False


def train_step(training: Training, batch: Batch, *, learning_rate: float) -> StepOutcome:
    """Gradients of the whole batch, clipped, one update. No host sync except for fp16's overflow check."""
    scale = training.loss_scale.scale if training.loss_scale else 1.0
    loss = training.program.accumulate(batch.microbatches, scale=scale)
    grad_norm = clip_gradients(training.shards, training.max_grad_norm, training.device, scale=scale)
    is_sound = training.loss_scale is None or training.loss_scale.update(
        float(grad_norm)
    )  # host sync: fp16 only
    if is_sound:
        set_learning_rate(training.optimizer, learning_rate)
        training.optimizer.step()
        training.program.gather_parameters()
        if training.ema is not None:
            training.ema.update()
    if training.experts is not None:
        training.experts.after_step(scale=scale, is_sound=is_sound)
    training.optimizer.zero_grad()
    return StepOutcome(loss, grad_norm, is_skipped=not is_sound)
