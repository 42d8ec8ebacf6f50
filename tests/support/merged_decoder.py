"""A decoder with weights W + scale B A, merged before every forward: what adapters must equal."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshwright.adapters.attach import attach_adapters
from meshwright.models.decoder import Decoder, build_decoder
from meshwright.models.initialise import initialise
from meshwright.spec import AdapterSpec, RunSpec
from meshwright.spec.adapter import AdaptedMatrix, adapted_matrices


class MergedDecoder(nn.Module):
    """A frozen decoder and adapters with the package's initial values; nothing else is shared with it."""

    def __init__(self, base: Decoder, run: RunSpec) -> None:
        super().__init__()
        assert run.adapter is not None
        self.base, self.spec = base, run.model
        self.matrices = adapted_matrices(run.model, run.adapter)
        initial = initial_adapters(run)
        self.adapters = {
            one.name: nn.Parameter(initial[one.name]) for matrix in self.matrices for one in matrix.parameters
        }
        weights = dict(base.named_parameters())
        for matrix in self.matrices:
            if matrix.kind == "dora":
                norms = weights[matrix.weight.name].detach().norm(dim=1)
                self.adapters[f"{matrix.name}.magnitude"] = nn.Parameter(norms)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The output of the base with merged weights."""
        weights = dict(self.base.named_parameters())
        merged = {one.weight.name: self._merged(one, weights[one.weight.name]) for one in self.matrices}
        return functional_call(self.base, merged, args, kwargs)

    def _merged(self, matrix: AdaptedMatrix, weight: Tensor) -> Tensor:
        a, b = (self.adapters[f"{matrix.name}.{own}"] for own in ("lora_A", "lora_B"))
        total = weight + scale_of(matrix) * (b @ a)
        if matrix.kind != "dora":
            return total
        magnitude = self.adapters[f"{matrix.name}.magnitude"]
        return total * (magnitude / total.detach().norm(dim=1))[:, None]


def scale_of(matrix: AdaptedMatrix) -> float:
    """alpha / rank, or alpha / sqrt(rank)."""
    return matrix.alpha / {"rslora": math.sqrt(matrix.rank)}.get(matrix.kind, matrix.rank)


def initial_adapters(run: RunSpec) -> dict[str, Tensor]:
    """The initial values of a run's adapters, in float64."""
    model = build_decoder(run.model, dtype=torch.float64)
    assert isinstance(run.adapter, AdapterSpec)
    attach_adapters(model, run.adapter, torch.float64)
    initialise(model, run.seed)
    return {name: p.detach().clone() for name, p in model.named_parameters() if "adapter" in name}
