"""A decoder with weights W + scale B A, merged before every forward: what adapters must equal."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshwright.adapters.attach import attach_adapters
from meshwright.models.decoder import Decoder, build_decoder
from meshwright.models.initialise import initialise
from meshwright.spec import AdapterSpec, RunSpec
from meshwright.spec.adapter import EMBEDDING, AdaptedMatrix, adapted_matrices, adapter_parameters


class MergedDecoder(nn.Module):
    """A frozen decoder and adapters with the package's initial values; nothing else is shared with it."""

    def __init__(self, base: Decoder, run: RunSpec) -> None:
        super().__init__()
        assert run.adapter is not None
        self.base, self.spec = base, run.model
        self.matrices = adapted_matrices(run.model, run.adapter)
        self.tokens = run.adapter.tokens
        # An adapter on one end of a tied model is on that end alone.
        has_end = any(one.weight.layer is None for one in self.matrices)
        self.untied = _untied(base) if run.model.tied_head and has_end else None
        initial = initial_adapters(run)
        self.adapters = {
            one.name: nn.Parameter(initial[one.name]) for one in adapter_parameters(run.model, run.adapter)
        }
        weights = dict(base.named_parameters())
        for matrix in self.matrices:
            if matrix.kind == "dora":
                norms = weights[matrix.weight.name].detach().norm(dim=-1)
                self.adapters[f"{matrix.name}.magnitude"] = nn.Parameter(norms)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The output of the base with merged weights."""
        weights = dict(self.base.named_parameters())
        if self.untied is not None:
            weights["head.weight"] = weights[EMBEDDING]
        merged = {one.weight.name: self._merged(one, weights[one.weight.name]) for one in self.matrices}
        for table in (EMBEDDING, "head.weight"):
            change = self.adapters.get(table.replace("weight", "token_rows.change"))
            if change is not None:
                merged[table] = self._with_rows(weights[table], change)
        if self.untied is None:
            return functional_call(self.base, merged, args, kwargs)
        return functional_call(self.untied, weights | merged, args, kwargs)

    def _with_rows(self, weight: Tensor, change: Tensor) -> Tensor:
        """The table with what was trained added to the rows of single tokens."""
        total = weight.clone()
        for place, token in enumerate(sorted(self.tokens)):
            total[token] = weight[token] + change[place]
        return total

    def _merged(self, matrix: AdaptedMatrix, weight: Tensor) -> Tensor:
        a, b = (self.adapters[f"{matrix.name}.{own}"] for own in ("lora_A", "lora_B"))
        total = weight + scale_of(matrix) * (b @ a)
        if matrix.kind != "dora":
            return total
        magnitude = self.adapters[f"{matrix.name}.magnitude"]
        return total * (magnitude / total.detach().norm(dim=-1))[..., None]


def _untied(base: Decoder) -> Decoder:
    """The same decoder with a head of its own; its weights are given in each call."""
    untied = copy.deepcopy(base)
    untied.spec = base.spec.with_(tied_head=False)
    assert untied.head is not None
    untied.head.weight = nn.Parameter(torch.empty(base.spec.vocab_size, base.spec.width, dtype=torch.float64))
    return untied


def scale_of(matrix: AdaptedMatrix) -> float:
    """alpha / rank, or alpha / sqrt(rank)."""
    return matrix.alpha / {"rslora": math.sqrt(matrix.rank)}.get(matrix.kind, matrix.rank)


def initial_adapters(run: RunSpec) -> dict[str, Tensor]:
    """The initial values of a run's adapters, in float64."""
    model = build_decoder(run.model, dtype=torch.float64)
    assert isinstance(run.adapter, AdapterSpec)
    attach_adapters(model, run.adapter, torch.float64)
    initialise(model, run.seed)
    named = dict(model.named_parameters())
    return {one.name: named[one.name].detach().clone() for one in adapter_parameters(run.model, run.adapter)}
