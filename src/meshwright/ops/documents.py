"""Where the documents of a micro-batch begin and end (separate documents, document masking, varlen).

Offsets count the rows of all sequences, flattened: position s of sequence b is row b S + s. Every sequence
begins a document. The arithmetic here runs on the device and has no host sync.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.ops.attention_tasks import Chunk


class Documents(NamedTuple):
    """Documents of B sequences of S positions; over cp those of the full sequences."""

    offsets_P: Tensor
    """int32: document p is the rows from entry p to entry p + 1. Entries at the end repeat B S."""
    longest_1: Tensor
    """int32, in host memory: rows of the longest document. Kernels read it without a host sync."""


class Segments(NamedTuple):
    """Query rows and the key rows that they see: segment p of the queries sees segment p of the keys."""

    query_offsets_P: Tensor
    key_offsets_P: Tensor
    longest_1: Tensor
    """At least the rows of the longest segment."""
    causal: bool = True
    """The last query of a segment sees all its keys, each earlier query one less; else all see all."""
    window: int | None = None
    """A query sees at most so many of these keys, the nearest ones."""


def host_number(value: int) -> Tensor:
    """A number as a tensor in host memory: a compiled graph reads it instead of being compiled for it."""
    return torch.tensor([value], dtype=torch.int32, device="cpu")


def one_document_each(num_sequences: int, length: int, device: torch.device) -> Documents:
    """Sequences that are one document each."""
    offsets_P = torch.arange(num_sequences + 1, dtype=torch.int32, device=device) * length
    return Documents(offsets_P, host_number(length))


def self_segments(documents: Documents, window: int | None = None) -> Segments:
    """Every document sees itself, where all rows of the sequences are here."""
    return Segments(documents.offsets_P, documents.offsets_P, documents.longest_1, window=window)


def document_ids(documents: Documents, num_sequences: int, length: int) -> Tensor:
    """ids_BS: the number of each position's document, counted over all sequences."""
    offsets_P = documents.offsets_P
    rows_T = torch.arange(num_sequences * length, dtype=offsets_P.dtype, device=offsets_P.device)
    return torch.searchsorted(offsets_P, rows_T, right=True).view(num_sequences, length)


def rows_before(offsets_P: Tensor, length: int, chunks: tuple[Chunk, ...], rows: slice) -> Tensor:
    """Offsets over some rows of each sequence, from offsets over all `length` rows of it.

    `chunks` are the parts of a sequence that a rank holds, in order; `rows` is a slice of these rows.
    """
    num_rows = rows.stop - rows.start
    sequence_P, position_P = offsets_P // length, offsets_P % length
    held_P = sum((position_P - chunk.start).clamp(0, chunk.length) for chunk in chunks)
    return (sequence_P * num_rows + (held_P - rows.start).clamp(0, num_rows)).int()


def chunk_segments(documents: Documents, num_sequences: int, length: int, chunk: Chunk) -> Segments:
    """One chunk of queries of each sequence against all keys: their documents, up to the chunk's end."""
    device = documents.offsets_P.device
    ends_B = torch.arange(num_sequences, dtype=torch.int32, device=device) * length + chunk.end
    # The keys after the chunk become segments without queries.
    key_offsets_P = torch.cat([documents.offsets_P, ends_B]).sort().values
    query_offsets_P = rows_before(key_offsets_P, length, (chunk,), slice(0, chunk.length))
    return Segments(query_offsets_P, key_offsets_P, documents.longest_1)
