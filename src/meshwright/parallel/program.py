"""The model as this rank runs it: one call accumulates the gradients of one step."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.data.batches import Microbatch
from meshwright.parallel.dp import Reducer
from meshwright.parallel.fp8_weights import Fp8Weights
from meshwright.parallel.shards import ParameterShard
from meshwright.parallel.wgrad_fusion import WgradFusion

Localise = Callable[[Microbatch, float], Microbatch]
"""This rank's part of a micro-batch, with its loss weights multiplied by a scale."""


class Program(Protocol):
    """With and without a pipeline, a model of ours or not: the step sees only this.

    Micro-batches are of the kind that the program was built for.
    """

    stages: list[nn.Module]
    shards: list[ParameterShard]

    def accumulate(self, microbatches: Sequence[Any], *, scale: float = 1.0) -> Tensor:
        """Forward and backward of all micro-batches; gradients of the scaled loss are then reduced and in
        `shard.grad`. Returns this rank's part of the unscaled loss. Communicates; no host sync."""
        ...

    def evaluate(self, microbatches: Sequence[Any]) -> Tensor:
        """This rank's part of the loss, without gradients."""
        ...

    def gather_parameters(self) -> None:
        """After the shards were updated or loaded: the model computes with the new values."""
        ...


def model_arguments(microbatch: Microbatch) -> dict[str, Tensor]:
    """The keyword arguments of `Decoder.forward` besides the tokens; absent ones are left out."""
    fields = microbatch._asdict()
    del fields["tokens_BS"]
    return {name: value for name, value in fields.items() if value is not None}


def scaled(microbatch: Microbatch, scale: float) -> Microbatch:
    """Every loss term times `scale`: scaling the weights reaches auxiliary losses too."""
    if scale == 1.0:
        return microbatch
    return microbatch._replace(
        weights_BS=microbatch.weights_BS * scale, sequence_weights_B=microbatch.sequence_weights_B * scale
    )


class SingleProgram:
    """All layers on this rank: micro-batches one after the other."""

    def __init__(
        self,
        model: nn.Module,
        *,
        shards: list[ParameterShard],
        reducer: Reducer,
        summed: WgradFusion,
        narrow: Fp8Weights,
        localise: Localise,
    ) -> None:
        self.stages, self.shards = [model], shards
        self._model, self._reducer, self._localise = model, reducer, localise
        self._summed, self._narrow = summed, narrow

    def accumulate(self, microbatches: Sequence[Microbatch], *, scale: float = 1.0) -> Tensor:
        """See Program."""
        parts = []
        for index, microbatch in enumerate(microbatches):
            is_last = index == len(microbatches) - 1
            with self._reducer.microbatch(is_last=is_last), self._summed.microbatch():
                part = self._loss(microbatch, scale)
                part.backward()
            parts.append(part.detach())
        return torch.stack(parts).sum() / scale

    def evaluate(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """See Program."""
        self._model.eval()
        with torch.no_grad():
            loss = torch.stack([self._loss(microbatch, 1.0) for microbatch in microbatches]).sum()
        self._model.train()
        return loss

    def gather_parameters(self) -> None:
        """See Program."""
        self._reducer.gather_parameters()
        self._narrow.write()

    def _loss(self, microbatch: Microbatch, scale: float) -> Tensor:
        local = self._localise(microbatch, scale)
        return self._model(local.tokens_BS, **model_arguments(local))
