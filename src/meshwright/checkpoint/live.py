"""What a checkpoint is taken of and loaded into: the live objects of a training, as far as it sees them."""

from typing import Any, Protocol

import torch
from torch import nn

from meshwright.memory.offload.weights import HostedWeights
from meshwright.optim.ema import Ema
from meshwright.parallel.fp8_scales import DelayedScales
from meshwright.parallel.program import Program
from meshwright.precision.loss_scale import LossScale


class LiveTraining(Protocol):
    """Weights, optimizer and scales of this rank."""

    program: Program
    optimizer: torch.optim.Optimizer
    device: torch.device
    weights: HostedWeights
    loss_scale: LossScale | None
    ema: Ema | None
    fp8_scales: DelayedScales | None
    named_shards: dict[str, nn.Parameter]


class Progress(Protocol):
    """How far a run is."""

    @property
    def step(self) -> int:
        """Optimizer updates done."""
        ...

    def to_facts(self) -> dict[str, Any]:
        """All of it as plain values, for the manifest."""
        ...


class Resumable(Protocol):
    """Anything that gives its state as plain values and takes it back: a loader's position, for one."""

    def state(self) -> dict[str, Any]:
        """All that a resume needs."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` gave."""
        ...


class UserState(Resumable, Protocol):
    """State that a user brings to a run and wants back on a resume: an optimizer's counts, a scheduler."""

    def allocate(self) -> None:
        """Before tensors are read: allocate the tensors that they are read into."""
        ...


class Fp8Fallback(Protocol):
    """Which blocks of an fp8 run have fallen back to bf16."""

    @property
    def recipe(self) -> str:
        """The fp8 recipe of the run."""
        ...

    @property
    def fallen(self) -> list[int]:
        """Layers that compute in bf16 from now on."""
        ...

    def restore(self, fallen: list[int]) -> None:
        """Let these layers fall back again."""
        ...
