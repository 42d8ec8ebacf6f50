"""The zig-zag layout: which rows of a sequence each cp rank holds.

The sequence is split into 2 cp chunks; rank r holds chunk r and chunk 2 cp - 1 - r, in this order. Under
a causal mask chunk c costs about c + 1/2 blocks, so every rank has the same work: 2 cp.

    cp = 4    chunk  0  1  2  3  4  5  6  7
              rank   0  1  2  3  3  2  1  0

Neighbouring ranks together hold the layout of a smaller cp with longer chunks, so `hierarchical` can nest
one layout in the other.
"""

import torch
from torch import Tensor

from meshwright.data.microbatch import Microbatch
from meshwright.errors import MeshError
from meshwright.ops.attention_tasks import Chunk


def chunks_of(cp_rank: int, cp: int, local_length: int) -> tuple[Chunk, ...]:
    """The two chunks of the full sequence that a rank with `local_length` rows holds."""
    length = local_length // 2
    return Chunk(cp_rank * length, length), Chunk((2 * cp - 1 - cp_rank) * length, length)


def all_chunks(cp: int, local_length: int) -> tuple[Chunk, ...]:
    """All 2 cp chunks, in sequence order."""
    length = local_length // 2
    return tuple(Chunk(index * length, length) for index in range(2 * cp))


def shard_sequence(x: Tensor, dim: int, cp_rank: int, cp: int) -> Tensor:
    """The rows of rank `cp_rank`. x[S] -> x[S_cp], a local copy."""
    if x.shape[dim] % (2 * cp):
        raise MeshError(
            f"a sequence of {x.shape[dim]} tokens does not divide into 2 x cp = {2 * cp} chunks",
            where="parallel.cp",
            hint=f"make data.sequence_length a multiple of {2 * cp}, or lower cp",
        )
    parts = x.chunk(2 * cp, dim)
    return torch.cat([parts[cp_rank], parts[2 * cp - 1 - cp_rank]], dim)


def unshard_sequence(x: Tensor, dim: int, cp: int) -> Tensor:
    """Sequence order from shards concatenated in rank order, as an all-gather leaves them."""
    parts = x.chunk(2 * cp, dim)
    heads, tails = parts[0::2], parts[1::2]
    return torch.cat([*heads, *reversed(tails)], dim)


def rank_order(x: Tensor, dim: int, cp: int) -> Tensor:
    """The inverse of `unshard_sequence`: from sequence order to shards concatenated in rank order."""
    parts = x.chunk(2 * cp, dim)
    return torch.cat([parts[at] for rank in range(cp) for at in (rank, 2 * cp - 1 - rank)], dim)


def shard_microbatch(microbatch: Microbatch, cp_rank: int, cp: int) -> Microbatch:
    """The rows of rank `cp_rank` of every tensor with a sequence dim; all others stay unsharded.

    Positions keep the values they have in their document: rotary needs those, and causality between
    ranks follows from the layout instead.
    """
    return microbatch._replace(num_targets=None).each(
        lambda x: shard_sequence(x, 1, cp_rank, cp) if x.dim() == 2 else x
    )
