"""Context parallel: each rank of cp holds a part of every sequence, and attention sees all of it.

Everything but attention works on tokens one by one, so cp changes two places: micro-batches are sharded in
the zig-zag layout (zigzag.py), and each block's `attend` is replaced by one of four kinds that give
the result and gradients of one device (gather.py, ring.py, ulysses.py). The gradient of a parameter is
then a sum over cp as well as over dp.
"""

from meshwright.parallel.cp.replace_attend import CpGroups, apply_cp, cp_groups
from meshwright.parallel.cp.zigzag import shard_microbatch, shard_sequence, unshard_sequence

__all__ = ["CpGroups", "apply_cp", "cp_groups", "shard_microbatch", "shard_sequence", "unshard_sequence"]
