"""Lengths of separate documents (document masking, varlen), which decide what attention costs.

A token sees the tokens before it in its own document, so attention costs the sum of squared lengths. Lengths
are those of documents after sequences split them: a sequence begins and ends documents. They come from the
ends in a packed dataset (documents.bin), or from an assumed distribution.
"""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.workload.flops import mean_keys_seen
from meshwright.spec.data import DataSpec

Ends = NDArray[np.int64]

DOCUMENTS_FILE = "documents.bin"
# Assumed where no dataset is named: an eighth of a sequence on average, but not less than web text has, with
# lengths that are lognormal: the mean is 1.6 times the median.
ASSUMED_SHARE, ASSUMED_LEAST, ASSUMED_SIGMA = 8, 512, 1.0
# A large dataset is sampled: blocks of consecutive documents, evenly spread over it.
MOST_DOCUMENTS, NUM_BLOCKS = 1 << 21, 64
# Sequences whose work over cp is computed position by position.
BALANCED_TOKENS, MOST_BALANCED = 1 << 21, 64
LARGEST_CP = 256
STRIPES = (1, 2, 4, 8)


@dataclass(frozen=True)
class DocumentLengths:
    """Documents of a dataset as sequences split them, in classes of similar length."""

    mean_tokens: float
    """Mean length of a document before sequences split it."""
    lengths: tuple[float, ...]
    """Length of each class: that of the document of a mean token of the class."""
    shares: tuple[float, ...]
    """Share of all tokens that each class has."""
    slowest_cp: tuple[tuple[float, ...], ...]
    """Pairs of the cp rank with the most of them over those of the mean rank, for cp = 1, 2, 4 ..., each with
    1, 2, 4 ... stripes."""
    source: str = ""
    """The dataset that was read; empty for an assumed distribution."""

    def keys_seen(self, window: int | None) -> float:
        """Mean number of keys that a causal query sees."""
        seen = (mean_keys_seen(length, window) for length in self.lengths)
        return sum(share * keys for share, keys in zip(self.shares, seen, strict=True))

    @property
    def mean_of_tokens(self) -> float:
        """Mean length of the document that a token is in: long documents have most of the tokens."""
        return sum(share * length for share, length in zip(self.shares, self.lengths, strict=True))

    def slowest_rank(
        self, cp: NDArray[np.int64], stripes: NDArray[np.int64] | int = 1
    ) -> NDArray[np.float64]:
        """Pairs of the slowest cp rank over those of the mean rank, for each of these degrees."""
        table = np.asarray(self.slowest_cp)
        row = np.minimum(np.ceil(np.log2(np.maximum(cp, 1))).astype(np.int64), table.shape[0] - 1)
        column = np.minimum(np.log2(np.maximum(stripes, 1)).astype(np.int64), table.shape[1] - 1)
        return table[row, column]

    def __str__(self) -> str:
        mean = f"separate documents of {self.mean_tokens:,.0f} tokens on average"
        return f"{mean} in {self.source}" if self.source else f"{mean}, lognormal"


def documents_of(data: DataSpec) -> DocumentLengths | None:
    """The documents of a run: of its datasets where these exist here, else assumed; None where joined."""
    if data.documents == "joined":
        return None
    total = sum(part.weight for part in data.sources)
    parts = [(part.weight / total, _documents_at(part.path, data)) for part in data.sources]
    return parts[0][1] if len(parts) == 1 else _blended(parts)


def _documents_at(path: str | None, data: DataSpec) -> DocumentLengths:
    """The documents of one dataset, assumed where it is not a packed one on this machine."""
    file = Path(path or "") / DOCUMENTS_FILE
    if path is None or not file.is_file() or file.stat().st_size < np.dtype(np.int64).itemsize:
        return assumed_documents(data.sequence_length)
    is_cut = data.packing == "cut"
    return _read_documents(file, file.stat().st_mtime_ns, data.sequence_length, is_cut=is_cut)


def _blended(parts: list[tuple[float, DocumentLengths]]) -> DocumentLengths:
    """Documents of several datasets, each with its share of the tokens; a source only where all have one."""
    degrees = min(len(each.slowest_cp) for _, each in parts)
    sources = [each.source for _, each in parts]
    return DocumentLengths(
        mean_tokens=1.0 / sum(weight / each.mean_tokens for weight, each in parts),
        lengths=tuple(length for _, each in parts for length in each.lengths),
        shares=tuple(weight * share for weight, each in parts for share in each.shares),
        slowest_cp=tuple(
            tuple(
                sum(weight * each.slowest_cp[power][column] for weight, each in parts)
                for column in range(len(STRIPES))
            )
            for power in range(degrees)
        ),
        source=", ".join(sources) if all(sources) else "",
    )


@cache
def assumed_documents(sequence_length: int, mean_tokens: int | None = None) -> DocumentLengths:
    """Lognormal documents, drawn once with a fixed seed."""
    mean = mean_tokens or max(ASSUMED_LEAST, sequence_length // ASSUMED_SHARE)
    num_tokens = max(64 * sequence_length, BALANCED_TOKENS)
    centre = np.log(mean) - ASSUMED_SIGMA**2 / 2
    drawn = np.random.default_rng(0).lognormal(centre, ASSUMED_SIGMA, size=2 * num_tokens // mean + 64)
    ends = np.cumsum(np.maximum(1, np.rint(drawn)).astype(np.int64))
    ends = np.append(ends[ends < num_tokens], num_tokens)
    found = _lengths([ends], 0, sequence_length, is_cut=True)
    return DocumentLengths(float(mean), *found)


@cache
def _read_documents(file: Path, modified_at: int, sequence_length: int, *, is_cut: bool) -> DocumentLengths:
    """The lengths in a packed dataset; `modified_at` makes a changed file a new entry of the cache."""
    ends: Ends = np.memmap(file, dtype=np.int64, mode="r")
    mean = float(ends[-1]) / len(ends)
    size = MOST_DOCUMENTS // NUM_BLOCKS
    starts = [0] if len(ends) <= MOST_DOCUMENTS else np.linspace(0, len(ends) - size, NUM_BLOCKS).astype(int)
    count = len(ends) if len(ends) <= MOST_DOCUMENTS else size
    blocks = [np.asarray(ends[start : start + count]) for start in starts]
    first = int(ends[starts[0] - 1]) if starts[0] else 0
    found = _lengths(blocks, first, sequence_length, is_cut=is_cut)
    return DocumentLengths(mean, *found, source=str(file.parent))


def _lengths(
    blocks: list[Ends], begin: int, sequence_length: int, *, is_cut: bool
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """Classes of lengths, their shares of the tokens, and the balance over cp, from blocks of ends.

    The first document of every block but the first is left out: where it begins is not in the block.
    `is_cut`: sequences end anywhere in a document; else only documents longer than a sequence are split.
    """
    starts = [begin, *(int(ends[0]) for ends in blocks[1:])]
    split = _cut if is_cut else _split
    parts = [split(ends, start, sequence_length) for ends, start in zip(blocks, starts, strict=True)]
    lengths = np.concatenate(parts).astype(np.float64)
    lengths = lengths[lengths > 0] if (lengths > 0).any() else np.ones(1)
    balance = _cp_balance(blocks[0], begin, sequence_length)
    classes = np.floor(2.0 * np.log2(lengths)).astype(np.int64)
    tokens, squares = (np.bincount(classes, weights=lengths**power) for power in (1, 2))
    used = tokens > 0
    means, shares = squares[used] / tokens[used], tokens[used] / tokens.sum()
    return tuple(map(float, means)), tuple(map(float, shares)), balance


def _cut(ends: Ends, start: int, sequence_length: int) -> Ends:
    """Lengths of documents that are concatenated and cut at every sequence."""
    borders = np.arange(start // sequence_length + 1, int(ends[-1]) // sequence_length + 1)
    return np.diff(np.union1d(np.append(ends, start), borders * sequence_length))


def _split(ends: Ends, start: int, sequence_length: int) -> Ends:
    """Lengths of documents of which only those longer than a sequence are split."""
    lengths = np.diff(np.append(start, ends))
    full, rest = np.divmod(lengths, sequence_length)
    return np.concatenate([np.full(int(full.sum()), sequence_length), rest[rest > 0]])


def _cp_balance(ends: Ends, begin: int, sequence_length: int) -> tuple[tuple[float, ...], ...]:
    """Pairs of the slowest rank over the mean in the zig-zag layout, for powers of two of cp and stripes.

    Ranks wait for each other in every layer, so the mean over sequences is that of their slowest ranks.
    """
    first = -(-begin // sequence_length)
    count = int(ends[-1]) // sequence_length - first
    count = min(count, max(2, BALANCED_TOKENS // sequence_length), MOST_BALANCED)
    if count < 1:
        return ((1.0,) * len(STRIPES),)
    rows = first * sequence_length + np.arange(count * sequence_length)
    starts = np.append(begin, ends)[np.searchsorted(ends, rows, side="right")]
    begins = np.maximum(starts, rows // sequence_length * sequence_length)
    seen = (rows - begins + 0.5).reshape(count, sequence_length)
    # The chunks of every degree and stripe are made of the smallest ones. Halves add up without rounding.
    smallest = math.gcd(sequence_length, 2 * LARGEST_CP * max(STRIPES))
    chunks = seen.reshape(count, smallest, -1).sum(axis=2)
    found = [(1.0,) * len(STRIPES)]
    cp = 2
    while cp <= LARGEST_CP and sequence_length % (2 * cp) == 0:
        found.append(tuple(_slowest_over_mean(chunks, cp, stripes) for stripes in STRIPES))
        cp *= 2
    return tuple(found)


def _slowest_over_mean(pairs: NDArray[np.floating], cp: int, stripes: int) -> float:
    """Work of the slowest rank over the mean, from the pairs of the smallest chunks of each sequence.

    With one stripe where so many do not divide the sequence.
    """
    if pairs.shape[1] % (2 * cp * stripes):
        stripes = 1
    chunks = pairs.reshape(len(pairs), stripes, 2 * cp, -1).sum(axis=3)
    ranks = (chunks[..., :cp] + chunks[..., : cp - 1 : -1]).sum(axis=1)
    return float(ranks.max(axis=1).mean() / ranks.mean())
