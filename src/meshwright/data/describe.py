"""Statistics of a packed dataset: document lengths, unigrams, packing."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.data.corpus import entropy_of, token_counts
from meshwright.data.packing import plan_packing
from meshwright.data.samples import Samples
from meshwright.data.sources import TokenFile

_BLOCK_SAMPLES = 1 << 20
_MAX_EVEN_BARS = 12
# Planning this many documents takes a few seconds; the fill of the others is the same.
_PLANNED_DOCUMENTS = 1 << 21


@dataclass(frozen=True)
class Lengths:
    """Document lengths in tokens, the end of document included."""

    shortest: int
    median: float
    mean: float
    percentile_95: float
    longest: int


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram: documents of at_least <= length < below tokens."""

    at_least: int
    below: int
    num_documents: int


@dataclass(frozen=True)
class Unigrams:
    """Token frequencies."""

    entropy_nats: float
    num_distinct: int
    most_frequent: list[tuple[int, int]]
    """(token, count), largest count first."""


@dataclass(frozen=True)
class Packing:
    """The result of splitting the dataset into sequences of one length."""

    sequence_length: int
    num_sequences: int
    unused_tokens: int
    """Tokens after the last full sequence."""
    documents_per_sequence: float
    target_share: float
    """Share of positions whose target counts with separate documents; the others are document ends."""
    split_share: float
    """Share of documents that are split between two sequences."""
    padded_share: float
    """For comparison: share of positions with a token if each document had its own, padded rows."""
    whole_share: float
    """Share of positions with a token where sequences hold whole documents (`packing: whole`, best fit)."""


def document_lengths(dataset: TokenFile) -> NDArray[np.int64]:
    """Document lengths in tokens, the end of document included."""
    return np.diff(dataset.document_ends, prepend=0)


def describe_lengths(lengths: NDArray[np.int64]) -> Lengths:
    """Shortest, median, mean, 95th percentile and longest."""
    median, percentile_95 = np.percentile(lengths, [50, 95])
    return Lengths(
        int(lengths.min()), float(median), float(lengths.mean()), float(percentile_95), int(lengths.max())
    )


def histogram(lengths: NDArray[np.int64]) -> list[Bar]:
    """Documents by length: in even steps when lengths are similar, else in powers of two."""
    edges = _bar_edges(int(lengths.min()), int(lengths.max()))
    counts = np.bincount(np.searchsorted(edges, lengths, side="right") - 1, minlength=len(edges) - 1)
    return [Bar(edges[i], edges[i + 1], int(count)) for i, count in enumerate(counts)]


def _bar_edges(shortest: int, longest: int) -> list[int]:
    if longest >= 8 * shortest:
        return [1 << power for power in range(shortest.bit_length() - 1, longest.bit_length() + 1)]
    step = next(step for step in _round_steps() if (longest - shortest) // step < _MAX_EVEN_BARS)
    return list(range(shortest // step * step, longest + step + 1, step))


def _round_steps() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, ..."""
    return (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))


def describe_unigrams(dataset: TokenFile, *, num_most: int = 10) -> Unigrams:
    """Token frequencies, in one pass over every token."""
    counts = token_counts(dataset.tokens)
    most = [int(token) for token in np.argsort(-counts, kind="stable")[:num_most] if counts[token]]
    return Unigrams(
        entropy_nats=entropy_of(counts),
        num_distinct=int(np.count_nonzero(counts)),
        most_frequent=[(token, int(counts[token])) for token in most],
    )


def describe_packing(dataset: TokenFile, sequence_length: int) -> Packing:
    """The packing of the dataset with this sequence length; reads document ends only."""
    samples = Samples(dataset, sequence_length, separate=True)
    num_positions = len(samples) * sequence_length
    ends, lengths = dataset.document_ends, document_lengths(dataset)
    starts = ends - lengths
    rows = -(-lengths // sequence_length)
    return Packing(
        sequence_length=sequence_length,
        num_sequences=len(samples),
        unused_tokens=len(dataset.tokens) - num_positions,
        documents_per_sequence=float(len(ends) / max(1, len(samples))),
        target_share=_num_targets(samples) / max(1, num_positions),
        split_share=float((starts // sequence_length != (ends - 1) // sequence_length).mean()),
        padded_share=float(lengths.sum() / (rows.sum() * sequence_length)),
        whole_share=plan_packing(ends[:_PLANNED_DOCUMENTS], sequence_length).fill(sequence_length),
    )


def _num_targets(samples: Samples) -> int:
    blocks = range(0, len(samples), _BLOCK_SAMPLES)
    ids = (np.arange(start, min(start + _BLOCK_SAMPLES, len(samples)), dtype=np.int64) for start in blocks)
    return sum(samples.targets(block).count for block in ids)
