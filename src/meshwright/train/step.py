"""One optimizer step."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.memory.offload.weights import OffloadedWeights
from meshwright.optim.build import set_learning_rate
from meshwright.optim.clip import clip_gradients
from meshwright.optim.ema import Ema
from meshwright.parallel.expert_balance import ExpertBalance
from meshwright.parallel.fp8_scales import DelayedScales
from meshwright.parallel.program import Program
from meshwright.precision.loss_scale import LossScale
from meshwright.train.step_replay import StepReplay

# No norm is below it.
_NO_UPDATE = -1.0


@dataclasses.dataclass
class Training:
    """What a step works on. Nothing here depends on how the model is sharded."""

    program: Program
    optimizer: torch.optim.Optimizer
    device: torch.device
    max_grad_norm: float | None
    weights: OffloadedWeights
    """Blocks whose weights live on the host; its link counts the bytes that `memory.offload` moves."""
    loss_scale: LossScale | None = None
    ema: Ema | None = None
    experts: ExpertBalance | None = None
    fp8_scales: DelayedScales | None = None
    has_pairs: bool = False
    """Whether the run trains on preference pairs."""

    def __post_init__(self) -> None:
        trainable = [one for one in self.program.shards if one.parameter.requires_grad]
        self.shards = [(one.shard, one.norm_share) for one in trainable]
        self.named_shards = {one.name: one.shard for one in trainable}

    @property
    def scale(self) -> float:
        """The factor of the loss before backward (loss scaling): above 1 for fp16."""
        return self.loss_scale.scale if self.loss_scale else 1.0


@dataclasses.dataclass(frozen=True)
class StepOutcome:
    """Loss and gradient norm of a step as device tensors: reading them waits for the step."""

    loss: Tensor
    """This rank's part of the loss; the sum over ranks is the loss."""
    grad_norm: Tensor
    is_skipped: bool = False
    """The gradients overflowed in fp16, or the norm or the loss was above its limit: the weights are as
    before."""
    global_loss: float | None = None
    """The loss over all ranks, where it has a limit."""
    replay_difference: str = ""
    """What differed from the first run of the step, where it was replayed and training goes on."""


@dataclasses.dataclass(frozen=True)
class LossLimit:
    """The largest loss over all ranks that makes an update."""

    value: float
    tp: int
    """tp ranks have the same tokens, and count once."""

    def global_loss(self, part: Tensor) -> float:
        """The loss over all ranks; all ranks call it. Communicates, host sync."""
        total = part.double().clone()
        dist.all_reduce(total)
        return float(total) / self.tp


class StepBatch(Protocol):
    """What a step takes from a loader: micro-batches of the kind that the program was built for."""

    @property
    def microbatches(self) -> Sequence[Any]:
        """The micro-batches of this rank, in order."""
        ...


def train_step(
    training: Training,
    batch: StepBatch,
    *,
    learning_rate: float,
    norm_limit: float | None = None,
    loss_limit: LossLimit | None = None,
    replay: StepReplay | None = None,
) -> StepOutcome:
    """Accumulate gradients over all micro-batches, clip, update. Host sync only for fp16's overflow check,
    with the limits, above which there is no update, and where the step is replayed."""
    loss = training.program.accumulate(batch.microbatches, scale=training.scale)
    difference = replay.compare(loss) if replay is not None else ""
    global_loss = loss_limit.global_loss(loss) if loss_limit is not None else None
    if global_loss is not None and loss_limit is not None and not global_loss <= loss_limit.value:
        norm_limit = _NO_UPDATE
    grad_norm, is_updated = update(training, learning_rate=learning_rate, norm_limit=norm_limit)
    return StepOutcome(
        loss,
        grad_norm,
        is_skipped=not is_updated,
        global_loss=global_loss,
        replay_difference=difference,
    )


def update(
    training: Training, *, learning_rate: float | None, norm_limit: float | None = None
) -> tuple[Tensor, bool]:
    """Clip the accumulated gradients and update the weights: the norm, and whether there was an update.

    Without a learning rate the optimizer keeps its own. A norm that is not finite or above `norm_limit` makes
    no update.
    """
    scale, optimizer = training.scale, training.optimizer
    grad_norm = clip_gradients(
        training.shards, training.max_grad_norm, training.device, scale=scale, optimizer=optimizer
    )
    loss_scale = training.loss_scale
    is_updated = loss_scale is None or loss_scale.update(float(grad_norm))  # host sync: fp16 only
    if norm_limit is not None:
        is_updated = is_updated and float(grad_norm) <= norm_limit  # host sync: resilience.bad_steps
    if is_updated:
        if learning_rate is not None:
            set_learning_rate(optimizer, learning_rate)
        optimizer.step()
        training.program.gather_parameters()
        if training.ema is not None:
            training.ema.update()
        if training.fp8_scales is not None:
            training.fp8_scales.after_step()
    if training.experts is not None:
        training.experts.after_step(scale=scale, is_sound=is_updated)
    optimizer.zero_grad()
    return grad_norm, is_updated
