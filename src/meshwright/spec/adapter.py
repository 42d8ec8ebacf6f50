"""Adapters: low-rank updates of frozen matrices (LoRA), and which parameters of a run are trained.

    y = x W^T + scale (drop(x) A^T) B^T            W frozen; A[rank, in] and B[out, rank] trained

scale is alpha / rank (lora, dora) or alpha / sqrt(rank) (rslora). It is plain data: `adapters/` builds the
modules, `parallel/` shards them, and `plan/` prices them.

The embedding W[vocabulary, width] has the same update W + scale B A with B[vocabulary, rank], which starts at
zero, and A[rank, width]: peft calls these lora_embedding_A^T and lora_embedding_B^T. Rows of single tokens
are trained as a change that is added to them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

from meshwright.spec.base import Fraction, NonNegative, Positive, PositiveNumber, Spec
from meshwright.spec.huggingface.projections import hf_projection
from meshwright.spec.model import ModelSpec
from meshwright.spec.parameters import Parameter, parameters

AdapterKind = Literal["lora", "rslora", "dora"]
BaseFormat = Literal["weights", "bf16", "fp8", "nf4", "nf4_nested"]
NF4_BLOCK = 64
NF4_FORMATS = ("nf4", "nf4_nested")
NESTED_BLOCK = 256
"""Absmax of nested NF4 that share a scale."""
ALL_LINEAR = "all-linear"
_ENDS = {"embedding": ("embedding", "embed_tokens"), "head": ("head", "lm_head")}
"""Names of embedding and head as targets, by kind."""
LORA_A, LORA_B, MAGNITUDE = "lora_A", "lora_B", "magnitude"
EMBEDDING, HEAD = "embedding.tokens.weight", "head.weight"
TOKEN_ROWS, CHANGE = "token_rows", "change"
"""The module with the trained rows of an embedding or head, and its parameter [tokens, width]."""


class AdapterRankSpec(Spec):
    """Matrices, by name, whose adapters have another rank or alpha."""

    pattern: str
    """A name or shell pattern, as in `adapter.targets`."""
    rank: Positive
    """Rank of their adapters."""
    alpha: PositiveNumber | None = None
    """Alpha of their adapters; absent: `adapter.alpha`."""


class AdapterSpec(Spec):
    """Low-rank adapters (LoRA) beside frozen linears: only the adapters are trained."""

    kind: AdapterKind = "lora"
    """lora: scale alpha / rank. rslora: alpha / sqrt(rank). dora: lora with a trained magnitude for each
    output, for linears and routed experts of the blocks."""
    rank: Positive
    """Rank of A and B; larger ranks can learn more and take more memory."""
    alpha: PositiveNumber
    """Numerator of the scale. Common values are once and twice the rank."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Linears with an adapter: `all-linear` (every linear and routed expert of the blocks; not router, head
    and embedding), names such as `query` or `q_proj`, `embedding` and `head`, or shell patterns over full
    names such as `blocks.[0-7].attention.*`."""
    tokens: tuple[NonNegative, ...] = ()
    """Ids of tokens whose rows of the embedding and the head are trained, such as new or reserved tokens
    (trainable_token_indices in peft); the other rows stay frozen."""
    ranks: tuple[AdapterRankSpec, ...] = ()
    """Other ranks by name; where several match a matrix, the last one applies."""
    dropout: Fraction = 0.0
    """Dropout on the input of every adapter but that of the embedding, in training. Each adapter has its own
    mask; masks follow from `seed` and the step, and are the same on any mesh."""
    base: BaseFormat = "weights"
    """Format of the frozen weights. weights: that of `precision.weights`. bf16: 2 bytes per weight, while
    adapters keep the format of `precision.weights`. fp8: 1 byte per weight of the blocks' linears and routed
    experts, which also compute in fp8. nf4 (QLoRA): half a byte per weight of the blocks' linears and routed
    experts and 4 bytes per 64 of them, as in bitsandbytes. nf4_nested (double quantisation): 1 byte per 64 of
    them in place of 4. With fp8 and nf4 the other frozen weights are in bf16."""
    start_from: str | None = None
    """Initial adapters: a peft folder, or a run directory or checkpoint with adapters; null starts with A
    random and B zero."""


@dataclass(frozen=True)
class AdaptedMatrix:
    """A frozen matrix, or the stacked matrices of routed experts, with an adapter."""

    weight: Parameter
    rank: int
    alpha: float
    kind: AdapterKind

    @property
    def scale(self) -> float:
        """Factor on B A x."""
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rslora" else self.rank)

    @property
    def is_expert(self) -> bool:
        """Whether these are the matrices of routed experts: A and B then have an expert dim first."""
        return self.weight.kind == "expert"

    @property
    def name(self) -> str:
        """Prefix of the names of the adapter's parameters."""
        module, _, own = self.weight.name.rpartition(".")
        return f"{module}.adapters.{own}" if self.is_expert else f"{module}.adapter"

    @property
    def parameters(self) -> list[Parameter]:
        """A, B and with dora the magnitude, in the order of the built module."""
        *stacked, out_width, in_width = self.weight.shape
        shapes: dict[str, tuple[int, ...]] = {
            LORA_A: (*stacked, self.rank, in_width),
            LORA_B: (*stacked, out_width, self.rank),
        }
        if self.kind == "dora":
            shapes[MAGNITUDE] = (*stacked, out_width)
        return [
            Parameter(f"{self.name}.{own}", shape, own, self.weight.layer)  # pyright: ignore[reportArgumentType]
            for own, shape in shapes.items()
        ]


def adaptable(model: ModelSpec) -> list[Parameter]:
    """The matrices of the blocks that can have an adapter: linears and routed experts."""
    return list(_adaptable(model))  # pyright: ignore[reportArgumentType]  frozen, so hashable


@lru_cache(maxsize=8)
def _adaptable(model: ModelSpec) -> tuple[Parameter, ...]:
    return tuple(one for one in parameters(model) if one.kind in ("matrix", "expert"))


def ends(model: ModelSpec) -> list[Parameter]:
    """Embedding and head, which can have an adapter too; a tied head has one of its own."""
    shape = model.vocab_size, model.width
    return [Parameter(EMBEDDING, shape, "embedding"), Parameter(HEAD, shape, "head")]


def all_adaptable(model: ModelSpec) -> list[Parameter]:
    """All matrices that can have an adapter, in the order of the model."""
    embedding, head = ends(model)
    return [embedding, *adaptable(model), head]


def adapted_matrices(model: ModelSpec, adapter: AdapterSpec) -> list[AdaptedMatrix]:
    """The matrices with an adapter, in the order of the model."""
    return list(_adapted_matrices(model, adapter))  # pyright: ignore[reportArgumentType]  frozen, so hashable


@lru_cache(maxsize=8)
def _adapted_matrices(model: ModelSpec, adapter: AdapterSpec) -> tuple[AdaptedMatrix, ...]:
    """Several rules of a run ask for them, and the planner checks the rules for many layouts."""
    listed = all_adaptable(model)
    found = [one for one in listed if any(matches(model, one, each) for each in adapter.targets)]
    return tuple(_adapted(model, adapter, one) for one in found)


def token_tables(model: ModelSpec) -> list[Parameter]:
    """The tables that have a row of their own for each token: the embedding, and a head that is not tied."""
    return ends(model)[: 1 if model.tied_head else 2]


def token_changes(model: ModelSpec, adapter: AdapterSpec) -> list[Parameter]:
    """The trained changes of single tokens' rows."""
    shape = len(adapter.tokens), model.width
    return [
        Parameter(f"{one.name.removesuffix('weight')}{TOKEN_ROWS}.{CHANGE}", shape, TOKEN_ROWS)
        for one in token_tables(model)
        if adapter.tokens
    ]


def _adapted(model: ModelSpec, adapter: AdapterSpec, weight: Parameter) -> AdaptedMatrix:
    own = [each for each in adapter.ranks if matches(model, weight, each.pattern)]
    rank = own[-1].rank if own else adapter.rank
    alpha = own[-1].alpha if own else None
    return AdaptedMatrix(weight, rank, adapter.alpha if alpha is None else alpha, adapter.kind)


def adapter_parameters(model: ModelSpec, adapter: AdapterSpec | None) -> list[Parameter]:
    """All parameters of all adapters, in the order of the model; none without an adapter."""
    if adapter is None:
        return []
    of_matrices = [one for matrix in adapted_matrices(model, adapter) for one in matrix.parameters]
    return [*of_matrices, *token_changes(model, adapter)]


def matches(model: ModelSpec, weight: Parameter, target: str) -> bool:
    """Whether a target names a matrix: by all-linear, its own name, its Hugging Face name, or a pattern."""
    module = weight.name.removesuffix(".weight")
    if weight.kind in _ENDS:
        return target in _ENDS[weight.kind] or fnmatchcase(module, target)
    names = (module.rpartition(".")[2], hf_projection(model, weight.name))
    return target in (ALL_LINEAR, *names) or fnmatchcase(module, target)


def target_names(model: ModelSpec) -> list[str]:
    """Every name that a target may have, without patterns."""
    return list(_target_names(model))  # pyright: ignore[reportArgumentType]  frozen, so hashable


@lru_cache(maxsize=8)
def _target_names(model: ModelSpec) -> tuple[str, ...]:
    listed = adaptable(model)
    own = [one.name.removesuffix(".weight").rpartition(".")[2] for one in listed]
    theirs = [hf_projection(model, one.name) for one in listed]
    of_ends = [name for names in _ENDS.values() for name in names]
    return tuple(dict.fromkeys([ALL_LINEAR, *own, *theirs, *of_ends]))


def adapted_weight(name: str) -> tuple[str, str] | None:
    """(name of the frozen matrix, own name such as lora_A) of an adapter's parameter; None for others."""
    module, _, own = name.rpartition(".")
    if own == CHANGE and module.endswith(f".{TOKEN_ROWS}"):
        return module.removesuffix(TOKEN_ROWS) + "weight", own
    if own not in (LORA_A, LORA_B, MAGNITUDE):
        return None
    if module.endswith(".adapter"):
        return module.removesuffix("adapter") + "weight", own
    experts, _, projection = module.rpartition(".")
    return f"{experts.removesuffix('.adapters')}.{projection}", own


def is_trained(name: str, adapter: AdapterSpec | None, train_only: Sequence[str]) -> bool:
    """Whether a parameter gets a gradient and an update; all others are frozen."""
    if adapter is not None and adapted_weight(name) is not None:
        return True
    if any(fnmatchcase(name, pattern) for pattern in train_only):
        return True
    return adapter is None and not train_only


def trained_in_full(model: ModelSpec, adapter: AdapterSpec | None, train_only: Sequence[str]) -> list[str]:
    """Names of the model's own parameters that are trained; with adapters those beside them."""
    return [one.name for one in parameters(model) if is_trained(one.name, adapter, train_only)]


def num_trained_parameters(
    model: ModelSpec, adapter: AdapterSpec | None, train_only: Sequence[str] = ()
) -> int:
    """Number of parameters that get an update; adapters come on top of the model's own parameters."""
    listed = [*parameters(model), *adapter_parameters(model, adapter)]
    return sum(one.num_elements for one in listed if is_trained(one.name, adapter, train_only))
