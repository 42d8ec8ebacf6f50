"""The placement table: how each axis shards each parameter, and where tp communicates activations.

It is plain data that `parallel/` applies and `plan/` prices, so the prediction is about the program that
runs. Patterns are shell patterns over parameter and module names. A parameter in no row is replicated over
the axis.

tp shards the first matrix of a pair column-wise (its output dim, dim 0 of a torch weight) and the second
row-wise (its input dim, dim 1): between them each rank computes its own heads or MLP features. sp is the
other half of tp: outside those pairs the sequence is sharded instead, so a pair starts with an all-gather of
x[B, S_tp, D] and ends with a reduce-scatter of the partial sums.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from meshwright.spec.adapter import LORA_A, LORA_B, MAGNITUDE, adapted_weight
from meshwright.spec.parallel import ParallelSpec


@dataclass(frozen=True)
class ShardedDim:
    """The dim of a parameter that an axis shards."""

    pattern: str
    dim: int


@dataclass(frozen=True)
class TpBoundary:
    """A module with a tp collective of x[B, S, D], once forward and once (transposed) backward."""

    pattern: str
    kind: Literal["gather", "scatter"]
    """gather: the input is all-gathered along S; scatter: the output is reduce-scattered along S."""


TP_SHARDED_DIMS = (
    ShardedDim("embedding.tokens.weight", 0),
    ShardedDim("blocks.*.attention.query.*", 0),
    ShardedDim("blocks.*.attention.key.*", 0),
    ShardedDim("blocks.*.attention.value.*", 0),
    ShardedDim("blocks.*.attention.query_up.*", 0),
    ShardedDim("blocks.*.attention.kv_up.*", 0),
    ShardedDim("blocks.*.attention.output.weight", 1),
    ShardedDim("blocks.*.mlp.gate.*", 0),
    ShardedDim("blocks.*.mlp.up.*", 0),
    ShardedDim("blocks.*.mlp.down.weight", 1),
    ShardedDim("blocks.*.mlp.shared.gate.*", 0),
    ShardedDim("blocks.*.mlp.shared.up.*", 0),
    ShardedDim("blocks.*.mlp.shared.down.weight", 1),
    ShardedDim("head.weight", 0),
)
# Routed experts over tp when etp = tp; with etp = 1 every tp rank has full experts and its own tokens.
ETP_SHARDED_DIMS = (
    ShardedDim("blocks.*.mlp.experts.gate", 1),
    ShardedDim("blocks.*.mlp.experts.up", 1),
    ShardedDim("blocks.*.mlp.experts.down", 2),
)
EP_SHARDED_DIMS = (ShardedDim("blocks.*.mlp.experts.*", 0),)

TP_BOUNDARIES = (
    TpBoundary("embedding.tokens", "scatter"),
    TpBoundary("blocks.*.attention", "gather"),
    TpBoundary("blocks.*.attention.output", "scatter"),
    TpBoundary("blocks.*.mlp", "gather"),  # dense layers; a routed layer computes on its part of the sequence
    TpBoundary("blocks.*.mlp.down", "scatter"),
    TpBoundary("blocks.*.mlp.shared", "gather"),
    TpBoundary("blocks.*.mlp.shared.down", "scatter"),
    TpBoundary("head", "gather"),
)


def tp_dim(name: str, parallel: ParallelSpec) -> int | None:
    """The dim of a parameter that tp shards, or None when tp replicates it."""
    name = name.removesuffix("_absmax")  # of a weight in NF4, with which it is sharded
    adapted = adapted_weight(name)
    if adapted is not None:
        return _adapter_dim(adapted[1], tp_dim(adapted[0], parallel), is_expert=is_routed_expert(name))
    if is_routed_expert(name):
        return _dim(name, ETP_SHARDED_DIMS) if parallel.etp > 1 else None
    return _dim(name, TP_SHARDED_DIMS)


def ep_dim(name: str) -> int | None:
    """The dim of a parameter that ep shards: the expert dim."""
    adapted = adapted_weight(name)
    if adapted is not None:
        return ep_dim(adapted[0])
    return _dim(name, EP_SHARDED_DIMS)


def is_routed_expert(name: str) -> bool:
    """Whether a parameter belongs to routed experts, whose state is sharded over other axes."""
    return ".experts." in name


def tp_boundary(module_name: str, *, is_routed: bool) -> Literal["gather", "scatter"] | None:
    """The tp collective of a module, if it has one."""
    depth = module_name.count(".")
    for row in TP_BOUNDARIES:
        if row.pattern.count(".") == depth and fnmatchcase(module_name, row.pattern):
            return None if is_routed and row.pattern == "blocks.*.mlp" else row.kind
    return None


def _adapter_dim(own: str, dim: int | None, *, is_expert: bool) -> int | None:
    """The dim of an adapter's parameter that tp shards, from that of its frozen matrix.

    A has the matrix's input dim, B and the magnitude have its output dim; the factor that lacks the sharded
    dim is replicated. So the adapter's output is sharded or partial exactly as that of the matrix. Changes of
    single tokens' rows are replicated.
    """
    has_input, has_output = own == LORA_A, own in (LORA_B, MAGNITUDE)
    is_column_wise = dim == (1 if is_expert else 0)
    return dim if dim is not None and (has_output if is_column_wise else has_input) else None


def _dim(name: str, table: tuple[ShardedDim, ...]) -> int | None:
    depth = name.count(".")
    return next(
        (row.dim for row in table if row.pattern.count(".") == depth and fnmatchcase(name, row.pattern)), None
    )
