"""The model as this rank runs it: one call accumulates the gradients of one step."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.data.microbatch import Microbatch
from meshwright.parallel.dp import Reducer
from meshwright.parallel.fp8_weights import Fp8Weights
from meshwright.parallel.gradient_hashes import GradientHashes
from meshwright.parallel.shards import ParameterShard
from meshwright.parallel.wait_clock import WaitClock
from meshwright.parallel.wgrad_fusion import WgradFusion

Localise = Callable[[Microbatch, float], Microbatch]
"""(micro-batch, scale) -> this rank's part of it, with its loss weights multiplied by the scale."""


class Program(Protocol):
    """What a step sees of a model: the same with and without a pipeline, for our families and user modules.

    Micro-batches are of the kind that the program was built for.
    """

    stages: list[nn.Module]
    """The pipeline stages of this rank; without a pipeline one module, the model."""
    shards: list[ParameterShard]
    """The parameter shards that this rank updates."""
    reduction_wait: WaitClock | None
    """Time that this rank has waited for the gradients of other ranks; None where it is not measured."""
    gradient_hashes: GradientHashes
    """Hashes of this rank's gradients before the reduction; those of ZeRO-3 are not seen."""

    def accumulate(self, microbatches: Sequence[Any], *, scale: float = 1.0) -> Tensor:
        """Run forward and backward of all micro-batches, and reduce the gradients of the scaled loss into
        `shard.grad`. Returns this rank's part of the unscaled loss. Communicates; no host sync."""
        ...

    def evaluate(self, microbatches: Sequence[Any]) -> Tensor:
        """This rank's part of the loss, without gradients."""
        ...

    def gather_parameters(self) -> None:
        """Make the model compute with the new values, after the shards were updated or loaded."""
        ...


def model_arguments(microbatch: Microbatch) -> dict[str, Tensor | int]:
    """The keyword arguments of `Decoder.forward` other than the tokens; None values are left out."""
    fields = microbatch._asdict()
    del fields["tokens_BS"]
    return {name: value for name, value in fields.items() if value is not None}


def scaled(microbatch: Microbatch, scale: float) -> Microbatch:
    """The micro-batch with every loss weight times `scale`, which reaches auxiliary losses too."""
    if scale == 1.0:
        return microbatch
    changed = microbatch._replace(sequence_weights_B=microbatch.sequence_weights_B * scale)
    if microbatch.pairs_BPF is None:
        return changed._replace(weights_BS=microbatch.weights_BS * scale)
    pairs_BPF = microbatch.pairs_BPF.clone()
    pairs_BPF[..., 0] *= scale  # the weight of a pair; those of tokens only sum log-probs
    return changed._replace(pairs_BPF=pairs_BPF)


class SingleProgram:
    """The program of a rank that holds all layers: micro-batches run one after the other."""

    def __init__(
        self,
        model: nn.Module,
        *,
        shards: list[ParameterShard],
        reducer: Reducer,
        wgrad_fusion: WgradFusion,
        fp8_weights: Fp8Weights,
        localise: Localise,
    ) -> None:
        self.stages, self.shards = [model], shards
        self._model, self._reducer, self._localise = model, reducer, localise
        self._wgrad_fusion, self._fp8_weights = wgrad_fusion, fp8_weights
        self.reduction_wait, self.gradient_hashes = reducer.wait, reducer.hashes

    def accumulate(self, microbatches: Sequence[Microbatch], *, scale: float = 1.0) -> Tensor:
        """Implements `Program.accumulate`."""
        parts = []
        for index, microbatch in enumerate(microbatches):
            is_last = index == len(microbatches) - 1
            with self._reducer.microbatch(is_last=is_last), self._wgrad_fusion.microbatch():
                part = self._loss(microbatch, scale)
                part.backward()
            parts.append(part.detach())
        return torch.stack(parts).sum() / scale

    def evaluate(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Implements `Program.evaluate`."""
        self._model.eval()
        with torch.no_grad():
            loss = torch.stack([self._loss(microbatch, 1.0) for microbatch in microbatches]).sum()
        self._model.train()
        return loss

    def gather_parameters(self) -> None:
        """Implements `Program.gather_parameters`."""
        self._reducer.gather_parameters()
        self._fp8_weights.cast()

    def _loss(self, microbatch: Microbatch, scale: float) -> Tensor:
        local = self._localise(microbatch, scale)
        return self._model(local.tokens_BS, **model_arguments(local))
