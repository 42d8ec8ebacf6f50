"""How each axis cuts each parameter, and where activations cross ranks: one table of plain data.

`parallel/` applies it and `plan/` prices it, so what is predicted is what runs. Patterns are shell
patterns over parameter and module names. What is in no row is whole on every rank of the axis.

tp cuts the first matrix of a pair by columns (its output dim, dim 0 of a torch weight) and the second by
rows (its input dim, dim 1): between them each rank works on its own heads or inner units. sp is the other
half of tp: outside those pairs the sequence is cut instead, so entering a pair gathers x[B, S_tp, D] and
leaving it scatters the partial sums.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from meshwright.spec.parallel import ParallelSpec


@dataclass(frozen=True)
class ShardedDim:
    """The dim of a parameter that an axis cuts."""

    pattern: str
    dim: int


@dataclass(frozen=True)
class TpBoundary:
    """A module at whose border x[B, S, D] crosses tp ranks, once forward and once (transposed) backward."""

    pattern: str
    kind: Literal["gather", "scatter"]
    """gather: the input is gathered along S; scatter: the output is summed and cut along S."""


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
# Routed experts over tp when etp = tp; with etp = 1 every tp rank has them whole and its own tokens.
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
    TpBoundary("blocks.*.mlp", "gather"),  # dense layers; a routed layer works on its part of the sequence
    TpBoundary("blocks.*.mlp.down", "scatter"),
    TpBoundary("blocks.*.mlp.shared", "gather"),
    TpBoundary("blocks.*.mlp.shared.down", "scatter"),
    TpBoundary("head", "gather"),
)


def tp_dim(name: str, parallel: ParallelSpec) -> int | None:
    """The dim of a parameter that tp cuts, or None when each tp rank has it whole."""
    if is_routed_expert(name):
        return _dim(name, ETP_SHARDED_DIMS) if parallel.etp > 1 else None
    return _dim(name, TP_SHARDED_DIMS)


def ep_dim(name: str) -> int | None:
    """The dim of a parameter that ep cuts: the expert."""
    return _dim(name, EP_SHARDED_DIMS)


def is_routed_expert(name: str) -> bool:
    """Whether a parameter belongs to routed experts, whose state is cut over its own axes."""
    return ".experts." in name


def tp_boundary(module_name: str, *, is_routed: bool) -> Literal["gather", "scatter"] | None:
    """What happens to activations at the border of a module under tp."""
    depth = module_name.count(".")
    for row in TP_BOUNDARIES:
        if row.pattern.count(".") == depth and fnmatchcase(module_name, row.pattern):
            return None if is_routed and row.pattern == "blocks.*.mlp" else row.kind
    return None


def _dim(name: str, cuts: tuple[ShardedDim, ...]) -> int | None:
    depth = name.count(".")
    return next(
        (cut.dim for cut in cuts if cut.pattern.count(".") == depth and fnmatchcase(name, cut.pattern)), None
    )
