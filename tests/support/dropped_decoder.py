"""A decoder with adapters on dropped inputs, by the definition: what adapters with dropout must equal.

Masks come from integers of unlimited size, in plain Python and numpy; nothing of `ops/dropout*` is used.
"""

import functools
import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tests.support.merged_decoder import initial_adapters, scale_of
from torch import Tensor, nn
from torch.nn import functional

from meshwright.models.decoder import Decoder, Head
from meshwright.models.layers.embedding import Table
from meshwright.models.layers.linear import Linear
from meshwright.models.layers.moe import Experts, Moe, RowInputs
from meshwright.spec import RunSpec
from meshwright.spec.adapter import AdaptedMatrix, adapted_matrices, adapter_parameters, token_tables

Keys = NDArray[np.uint64]


def mix(key: Any, number: Any) -> Any:
    """The finaliser of splitmix64, of the key plus so many steps."""
    with np.errstate(over="ignore"):
        z = np.uint64(key) + np.uint64(number) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def keys_of_tokens(seed: int, step: int, num_sequences: int, length: int) -> Keys:
    """keys_BS of the global batch of a step."""
    of_step = mix(mix(seed, 0), step)
    of_sequences = mix(of_step, np.arange(num_sequences, dtype=np.uint64))
    return mix(of_sequences[:, None], np.arange(length, dtype=np.uint64))


def mask_of(keys: Keys, name: str, width: int, probability: float) -> Tensor:
    """0 or 1 / (1 - p) of each feature of rows with these keys; `name` is that of the matrix in its block."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    rows = mix(keys, number)[..., None]
    low, high = rows & np.uint64(0xFFFFFFFF), rows >> np.uint64(32)
    word = np.uint64(1 << 32)
    z = np.arange(width, dtype=np.uint64) ^ low
    z = ((z ^ (z >> np.uint64(16))) * np.uint64(0x7FEB352D) + high) % word
    z = ((z ^ (z >> np.uint64(15))) * np.uint64(0x846CA68B)) % word
    # 0 is the least signed integer, with the highest bit flipped.
    is_kept = (z ^ np.uint64(1 << 31)).astype(np.int64) >= round(probability * 2**32)
    return torch.from_numpy(is_kept / (1 - probability))


class DroppedDecoder(nn.Module):
    """A frozen decoder and adapters with the package's initial values, which read dropped inputs."""

    def __init__(self, base: Decoder, run: RunSpec) -> None:
        super().__init__()
        assert run.adapter is not None
        self.base, self.spec, self.run, self.step = base, run.model, run, 0
        self.keys_BS: Keys | None = None
        initial = initial_adapters(run)
        self.adapters = {
            one.name: nn.Parameter(initial[one.name]) for one in adapter_parameters(run.model, run.adapter)
        }
        weights, modules = dict(base.named_parameters()), dict(base.named_modules())
        experts: dict[str, dict[str, AdaptedMatrix]] = {}
        for matrix in adapted_matrices(run.model, run.adapter):
            if matrix.kind == "dora":
                norms = weights[matrix.weight.name].detach().norm(dim=-1)
                self.adapters[f"{matrix.name}.magnitude"] = nn.Parameter(norms)
            parent, _, own = matrix.weight.name.rpartition(".")
            if matrix.is_expert:
                experts.setdefault(parent, {})[own] = matrix
            else:
                modules[parent].register_forward_hook(partial(self._added, matrix))
        for table in token_tables(run.model) if run.adapter.tokens else []:
            modules[table.name.removesuffix(".weight")].register_forward_hook(self._with_tokens)
        if run.adapter.tokens and run.model.tied_head:
            modules["head"].register_forward_hook(self._with_tokens)
        for name, matrices in experts.items():
            moe = modules[name.rpartition(".")[0]]
            assert isinstance(moe, Moe)
            moe.dispatch = ByExpert(partial(self._projected, moe.experts, matrices))

    def forward(self, tokens_BS: Tensor, **kwargs: Any) -> Tensor:
        """The output of the base with adapters; in training with the masks of this step."""
        self.keys_BS = keys_of_tokens(self.run.seed, self.step, *tokens_BS.shape) if self.training else None
        return self.base(tokens_BS, **kwargs)

    def _added(self, matrix: AdaptedMatrix, module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> Tensor:
        x = inputs[0]
        if isinstance(module, Table):
            a, b = (self.adapters[f"{matrix.name}.{own}"] for own in ("lora_A", "lora_B"))
            return y + scale_of(matrix) * b[x] @ a
        assert isinstance(module, Linear | Head)
        keys = self._layer_keys(matrix)
        return y + self._change(matrix, x, keys, module.weight)

    def _with_tokens(self, module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> Tensor:
        """y with what the trained rows of single tokens add to embeddings, or to logits."""
        assert self.run.adapter is not None
        is_table = isinstance(module, Table)
        own = "embedding.tokens" if is_table or self.run.model.tied_head else "head"
        ids = torch.tensor(sorted(self.run.adapter.tokens))
        change = self.adapters[f"{own}.token_rows.change"]
        full = torch.zeros(self.run.model.vocab_size, change.shape[1], dtype=change.dtype)
        full = full.index_copy(0, ids, change)
        return y + (full[inputs[0]] if is_table else inputs[0] @ full.T)

    def _layer_keys(self, matrix: AdaptedMatrix) -> Keys | None:
        layer = matrix.weight.layer
        return self.keys_BS if self.keys_BS is None or layer is None else mix(self.keys_BS, layer)

    def _change(
        self,
        matrix: AdaptedMatrix,
        x: Tensor,
        keys: Keys | None,
        weight: Tensor | None,
        expert: int | None = None,
    ) -> Tensor:
        """What the adapter of one matrix adds to x W^T; peft's formula for dora."""
        one = () if expert is None else expert
        a, b = (self.adapters[f"{matrix.name}.{own}"][one] for own in ("lora_A", "lora_B"))
        if keys is not None:
            assert self.run.adapter is not None
            name = matrix.weight.name.removeprefix(f"blocks.{matrix.weight.layer}.")
            x = x * mask_of(keys, name, x.shape[-1], self.run.adapter.dropout)
        scaled_b = scale_of(matrix) * b
        if matrix.kind != "dora":
            return x @ a.T @ scaled_b.T
        assert weight is not None
        ratio = self.adapters[f"{matrix.name}.magnitude"][one] / (weight + scaled_b @ a).detach().norm(dim=-1)
        return (ratio - 1) * (x @ weight.T) + ratio * (x @ a.T @ scaled_b.T)

    def _projected(
        self,
        experts: Experts,
        matrices: dict[str, AdaptedMatrix],
        projection: str,
        x: Tensor,
        expert: int,
        tokens: Tensor,
    ) -> Tensor:
        """One projection of one expert for some tokens, given by their index in the batch."""
        weight = getattr(experts, projection)[expert]
        y, matrix = x @ weight.T, matrices.get(projection)
        if matrix is None:
            return y
        keys = self._layer_keys(matrix)
        rows = None if keys is None else mix(keys.reshape(-1)[tokens.numpy()], expert)
        return y + self._change(matrix, x, rows, weight, expert)


class ByExpert(nn.Module):
    """Replaces `Dispatch`: a loop over experts."""

    def __init__(self, project: Callable[..., Tensor]) -> None:
        super().__init__()
        self.project = project

    def forward(
        self, x_TD: Tensor, experts_TC: Tensor, inputs_TC: RowInputs, compute: Experts, shared: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Sum over each token's choices of weight x expert(x), and the output of the shared experts."""
        y_TD = torch.zeros_like(x_TD)
        for expert in range(len(compute.gate)):
            tokens, choices = (experts_TC == expert).nonzero(as_tuple=True)
            x = x_TD[tokens]
            project = functools.partial(self.project, expert=expert, tokens=tokens)
            h = functional.silu(project("gate", x)) * project("up", x)
            y = project("down", h) * inputs_TC.weights[tokens, choices][:, None]
            y_TD = y_TD.index_add(0, tokens, y)
        return y_TD, shared()
