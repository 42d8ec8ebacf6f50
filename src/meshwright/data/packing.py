"""Packing of whole documents into rows of S tokens, planned on lengths alone (best fit decreasing).

Documents are planned in windows. Within a window the longest come first, and each goes into the fullest row
that still has room for it. A document longer than S is split: its full rows stand alone, and its rest is
packed like a document. A row is a list of pieces. No token is read: the plan is a pure function of lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DataError

WINDOW_DOCUMENTS = 1 << 16


@dataclass(frozen=True)
class PackingPlan:
    """The pieces of each row: row r has the pieces from row_offsets[r] to row_offsets[r + 1]."""

    starts: NDArray[np.int64]
    """First token of each piece in the source."""
    lengths: NDArray[np.int64]
    """Tokens of each piece."""
    row_offsets: NDArray[np.int64]
    targets: NDArray[np.int64]
    """Targets that count in each row: its tokens, without the last token of each document."""

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    def fill(self, sequence_length: int) -> float:
        """The share of all positions that are tokens, not padding."""
        return float(self.lengths.sum()) / max(1, len(self) * sequence_length)


def plan_packing(
    document_ends: NDArray[np.int64], sequence_length: int, *, chosen: NDArray[np.bool_] | None = None
) -> PackingPlan:
    """The packing of documents that end at these tokens into rows of `sequence_length` tokens.

    `chosen` is True for the documents to pack; None packs all.
    """
    starts = np.concatenate([[0], document_ends[:-1]]).astype(np.int64)
    lengths = np.diff(document_ends, prepend=0)
    if len(lengths) == 0 or lengths.min() < 1:
        raise DataError("document ends do not increase", where="packing")
    if chosen is not None:
        starts, lengths = starts[chosen], lengths[chosen]
    parts = [
        _plan_window(starts[first:last], lengths[first:last], sequence_length)
        for first in range(0, len(lengths), WINDOW_DOCUMENTS)
        if (last := first + WINDOW_DOCUMENTS)
    ]
    return joined_plans(parts)


def joined_plans(parts: Sequence[PackingPlan]) -> PackingPlan:
    """The rows of several plans, one plan after the other."""
    counts = np.concatenate([np.diff(part.row_offsets) for part in parts])
    return PackingPlan(
        starts=np.concatenate([part.starts for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
        row_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        targets=np.concatenate([part.targets for part in parts]),
    )


def _plan_window(starts: NDArray[np.int64], lengths: NDArray[np.int64], size: int) -> PackingPlan:
    """The rows of one window: full rows of long documents first, then the rest by best fit decreasing."""
    num_full, rest = np.divmod(lengths, size)
    full_starts = np.repeat(starts, num_full) + size * count_up(num_full)
    # A document of exactly n rows ends with its last full row, in which the last token has no target.
    ends_document = (full_starts + size) == np.repeat(starts + lengths, num_full)
    packed = np.flatnonzero(rest)
    rows = best_fit_rows(rest[packed], size)
    order = np.argsort(rows, kind="stable")
    members = packed[order]
    counts = np.bincount(rows, minlength=int(rows.max(initial=-1)) + 1)
    piece_lengths = rest[members]
    row_tokens = np.bincount(rows, weights=rest[packed], minlength=len(counts)).astype(np.int64)
    offsets = np.concatenate([np.ones(len(full_starts), dtype=np.int64), counts])
    return PackingPlan(
        starts=np.concatenate([full_starts, starts[members] + num_full[members] * size]),
        lengths=np.concatenate([np.full(len(full_starts), size), piece_lengths]),
        row_offsets=np.concatenate([[0], np.cumsum(offsets)]).astype(np.int64),
        targets=np.concatenate([size - ends_document.astype(np.int64), row_tokens - counts]),
    )


def best_fit_rows(lengths: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The row of each piece, by best fit decreasing: the fullest row with room for it, or a new one.

    Pieces of one length are placed together. `room` is a bit set of the free tokens of all open rows, so the
    fullest row with room for a piece is its lowest bit from the length of the piece on.
    """
    order = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(-lengths[order], return_counts=True)
    rows: list[int] = []
    open_rows: dict[int, list[int]] = {}
    room, num_rows = 0, 0
    for length, count in zip((-distinct).tolist(), counts.tolist(), strict=True):
        while count:
            fitting = room >> length
            if fitting:
                free = length + (fitting & -fitting).bit_length() - 1
                having = open_rows[free]
                if count < len(having):
                    chosen = having[-count:]
                    del having[-count:]
                else:
                    chosen = open_rows.pop(free)
                    room ^= 1 << free
                per_row = 1
            else:
                free, per_row = size, min(count, size // length)
                num_new = count // per_row
                chosen = list(range(num_rows, num_rows + num_new))
                num_rows += num_new
            rows += chosen if per_row == 1 else [row for row in chosen for _ in range(per_row)]
            count -= len(chosen) * per_row
            if left := free - per_row * length:
                if left in open_rows:
                    open_rows[left] += chosen
                else:
                    open_rows[left] = chosen
                    room |= 1 << left
    found = np.empty(len(lengths), dtype=np.int64)
    found[order] = rows
    return found


def count_up(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 ... n - 1 for each count n, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
