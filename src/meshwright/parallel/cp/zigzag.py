"""The zig-zag layout: which rows of a sequence each cp rank holds.

The sequence is split into 2 cp chunks; rank r holds chunk r and chunk 2 cp - 1 - r, in this order. Under
a causal mask chunk c costs about c + 1/2 blocks, so every rank has the same work: 2 cp.

    cp = 4    chunk  0  1  2  3  4  5  6  7
              rank   0  1  2  3  3  2  1  0

Neighbouring ranks together hold the layout of a smaller cp with longer chunks, so `hierarchical` can nest
one layout in the other.

With separate documents a chunk costs what its documents cost, and a rank with the ends of long ones has more
work than others. `stripes` cuts the sequence into so many parts first, each with a zig-zag of its own: every
rank then holds chunks from all over the sequence, and a long document is spread over all ranks.
"""

import torch
from torch import Tensor

from meshwright.data.microbatch import Microbatch
from meshwright.errors import MeshError
from meshwright.ops.attention_tasks import Chunk


def chunk_numbers(cp_rank: int, cp: int, stripes: int = 1) -> list[int]:
    """The chunks that a rank holds, in sequence order, of 2 cp stripes in all."""
    first = range(0, 2 * cp * stripes, 2 * cp)
    return [start + number for start in first for number in (cp_rank, 2 * cp - 1 - cp_rank)]


def chunks_of(cp_rank: int, cp: int, local_length: int, stripes: int = 1) -> tuple[Chunk, ...]:
    """The chunks of the full sequence that a rank with `local_length` rows holds."""
    length = local_length // (2 * stripes)
    return tuple(Chunk(number * length, length) for number in chunk_numbers(cp_rank, cp, stripes))


def all_chunks(cp: int, local_length: int, stripes: int = 1) -> tuple[Chunk, ...]:
    """All chunks, in sequence order."""
    length = local_length // (2 * stripes)
    return tuple(Chunk(index * length, length) for index in range(2 * cp * stripes))


def shard_sequence(x: Tensor, dim: int, cp_rank: int, cp: int, stripes: int = 1) -> Tensor:
    """The rows of rank `cp_rank`. x[S] -> x[S_cp], a local copy."""
    num_chunks = 2 * cp * stripes
    if x.shape[dim] % num_chunks:
        formula = f"2 x cp{' x cp_stripes' if stripes > 1 else ''} = {num_chunks}"
        raise MeshError(
            f"a sequence of {x.shape[dim]} tokens does not divide into {formula} chunks",
            where="parallel.cp",
            hint=f"make data.sequence_length a multiple of {num_chunks}, or lower cp",
        )
    parts = x.chunk(num_chunks, dim)
    return torch.cat([parts[number] for number in chunk_numbers(cp_rank, cp, stripes)], dim)


def unshard_sequence(x: Tensor, dim: int, cp: int, stripes: int = 1) -> Tensor:
    """Sequence order from shards concatenated in rank order, as an all-gather leaves them."""
    order = _rank_order(cp, stripes)
    parts = x.chunk(len(order), dim)
    places = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat([parts[place] for place in places], dim)


def rank_order(x: Tensor, dim: int, cp: int) -> Tensor:
    """The inverse of `unshard_sequence`: from sequence order to shards concatenated in rank order."""
    parts = x.chunk(2 * cp, dim)
    return torch.cat([parts[number] for number in _rank_order(cp, 1)], dim)


def _rank_order(cp: int, stripes: int) -> list[int]:
    """The chunks of all ranks, rank by rank."""
    return [number for rank in range(cp) for number in chunk_numbers(rank, cp, stripes)]


def shard_microbatch(microbatch: Microbatch, cp_rank: int, cp: int, stripes: int = 1) -> Microbatch:
    """The rows of rank `cp_rank` of every tensor with a sequence dim; all others stay unsharded.

    Positions keep the values they have in their document: rotary needs those, and causality between
    ranks follows from the layout instead.
    """
    return microbatch._replace(num_targets=None).each(
        lambda x: shard_sequence(x, 1, cp_rank, cp, stripes) if x.dim() == 2 else x
    )
