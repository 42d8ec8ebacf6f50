"""The placement of a dim that two mesh axes shard, the inner one first.

When tp has sharded dim 0 and ZeRO shards the rest of it, the shards of one ZeRO rank are not contiguous in
the full parameter. The public `Shard` has no field for that order. FSDP2 uses the private class below for
the same case, so both agree on where a shard lies.
"""

from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def row_shard(split_factor: int) -> Placement:
    """The placement of rows that inner axes have already split `split_factor` ways."""
    return _StridedShard(0, split_factor=split_factor) if split_factor > 1 else Shard(0)


def is_strided(placement: Placement) -> bool:
    """Whether an inner axis has sharded the same dim before."""
    return isinstance(placement, _StridedShard)


def moved_to_dim(placement: Placement, dim: int) -> Placement:
    """The same placement for another dim."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)


def sharded_dim(placement: Placement) -> int:
    """The dim that a placement shards; the placement must not be Replicate."""
    return placement.dim  # pyright: ignore[reportAttributeAccessIssue]  Shard and _StridedShard have one
