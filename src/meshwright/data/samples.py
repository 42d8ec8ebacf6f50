"""Samples of a token source: sequences with targets, positions and document ids."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.sources import TokenSource
from meshwright.errors import DataError

PADDING = -1
"""The sample id of a padding row of a micro-batch, in which no target counts."""


class Rows(NamedTuple):
    """Samples as arrays: B sequences of S positions each."""

    tokens_BS: NDArray[np.int64]
    targets_BS: NDArray[np.int64]
    counts_BS: NDArray[np.bool_]
    """True where the target counts in the loss."""
    positions_BS: NDArray[np.int64]
    documents_BS: NDArray[np.int64] | None
    """Document ids of each row from 0; None when documents are joined."""


@dataclass(frozen=True)
class Samples:
    """Sample i is the tokens [i S, (i+1) S) with the next tokens as targets; documents may span samples.

    Tokens after the last full sample, fewer than S + 1, are never read.
    """

    source: TokenSource
    sequence_length: int
    separate: bool
    """Separate documents (document masking): attention, positions and loss stop at document ends."""

    def __len__(self) -> int:
        return max(0, (len(self.source.tokens) - 1) // self.sequence_length)

    def num_targets(self, ids: NDArray[np.int64]) -> int:
        """Target tokens of these samples that count, computed from document ends: no token is read."""
        real = ids[ids != PADDING]
        total = len(real) * self.sequence_length
        if not self.separate:
            return total
        first, last = self._documents_ending_in(real)
        return total - int((last - first).sum())

    def rows(self, ids: NDArray[np.int64]) -> Rows:
        """The samples of these ids, in their order; PADDING is a row in which no target counts."""
        window = np.zeros((len(ids), self.sequence_length + 1), dtype=np.int64)
        for row, sample in enumerate(ids):
            if sample != PADDING:
                start = int(sample) * self.sequence_length
                window[row] = self.source.tokens[start : start + self.sequence_length + 1]
        self._require_vocabulary(window)
        counts = np.repeat((ids != PADDING)[:, None], self.sequence_length, axis=1)
        positions = np.tile(np.arange(self.sequence_length), (len(ids), 1))
        documents = self._separate(ids, counts, positions) if self.separate else None
        return Rows(window[:, :-1], window[:, 1:], counts, positions, documents)

    def _separate(
        self, ids: NDArray[np.int64], counts: NDArray[np.bool_], positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The document ids of each row; clears counts at document ends and restarts positions, in place."""
        begins = np.zeros(positions.shape, dtype=np.int64)
        starts = np.zeros(positions.shape, dtype=np.int64)
        first, last = self._documents_ending_in(np.maximum(ids, 0))
        for row in np.flatnonzero((ids != PADDING) & (last > first)):
            ends = self.source.document_ends[first[row] : last[row]] - ids[row] * self.sequence_length
            self._require_increasing(ends)
            counts[row, ends - 1] = False  # the token after a document's last one is of another document
            inside = ends[ends < self.sequence_length]
            begins[row, inside], starts[row, inside] = 1, inside
        positions -= np.maximum.accumulate(starts, axis=1)
        return begins.cumsum(axis=1)

    def _documents_ending_in(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The range of documents that end in each sample: after its first and up to its last position."""
        ends, start = self.source.document_ends, ids * self.sequence_length
        first = np.searchsorted(ends, start, side="right")
        return first, np.searchsorted(ends, start + self.sequence_length, side="right")

    def _require_increasing(self, ends: NDArray[np.int64]) -> None:
        if ends[0] < 1 or ends[-1] > self.sequence_length or (np.diff(ends) <= 0).any():
            raise DataError(
                "document ends do not increase",
                where=self.source.name,
                hint="the dataset is damaged: `meshwright data verify` shows where",
            )

    def _require_vocabulary(self, window: NDArray[np.int64]) -> None:
        if (largest := int(window.max(initial=0))) >= self.source.vocab_size:
            raise DataError(
                f"token {largest} is outside the dataset's vocabulary of {self.source.vocab_size} tokens",
                where=self.source.name,
                hint="the dataset is damaged: `meshwright data verify` shows where",
            )
