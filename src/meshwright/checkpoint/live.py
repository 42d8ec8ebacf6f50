"""Protocols of the objects that a checkpoint saves and restores."""

from typing import Any, Protocol

import torch
from torch import nn

from meshwright.memory.offload.weights import OffloadedWeights
from meshwright.optim.ema import Ema
from meshwright.parallel.fp8_scales import DelayedScales
from meshwright.parallel.program import Program
from meshwright.precision.loss_scale import LossScale


class LiveTraining(Protocol):
    """Weights, optimizer and scales of this rank."""

    program: Program
    optimizer: torch.optim.Optimizer
    device: torch.device
    weights: OffloadedWeights
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
    """Anything whose state is plain values that can be loaded again, such as the position of a loader."""

    def state(self) -> dict[str, Any]:
        """Everything that a resume needs."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` gave."""
        ...


class DataPosition(Resumable, Protocol):
    """The position of a run in its samples."""

    @property
    def num_epochs(self) -> int:
        """Complete passes over the samples."""
        ...

    def restart(self, state: dict[str, Any]) -> None:
        """Begin other samples than those that a saved state counts in."""
        ...


class UserState(Resumable, Protocol):
    """State of a user's own objects that a resume restores: an optimizer's counts, a scheduler."""

    def allocate(self) -> None:
        """Allocate the tensors that are read into; called before tensors are read."""
        ...


class Fp8Fallback(Protocol):
    """Which blocks of an fp8 run have fallback_layers back to bf16."""

    @property
    def recipe(self) -> str:
        """The fp8 recipe of the run."""
        ...

    @property
    def fallback_layers(self) -> list[int]:
        """Layers that compute in bf16 from now on."""
        ...

    def restore(self, layers: list[int]) -> None:
        """Let these layers compute in bf16."""
        ...
