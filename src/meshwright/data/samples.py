"""Samples of token sources: sequences with targets, positions, documents and loss weights."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.data.sources import TokenSource
from meshwright.errors import DataError

PADDING = -1
"""The sample id of a padding row of a micro-batch, in which no target counts."""


class Rows(NamedTuple):
    """Samples as arrays: B sequences of S positions each."""

    window_BW: NDArray[np.unsignedinteger]
    """S + 1 tokens of each row, in the type of the source: the inputs and, one further, their targets."""
    counts_BS: NDArray[np.bool_]
    """True where the target counts in the loss."""
    positions_BS: NDArray[np.int64]
    documents_BS: NDArray[np.int64] | None
    """Document ids of each row from 0; None when documents are joined."""
    loss_weights_BS: NDArray[np.float32] | None = None
    """Weight of each target where the source has loss weights, 0 where it does not count; a negative one
    lowers the probability of its target (an advantage)."""

    @property
    def tokens_BS(self) -> NDArray[np.unsignedinteger]:
        """Input tokens."""
        return self.window_BW[:, :-1]

    @property
    def targets_BS(self) -> NDArray[np.unsignedinteger]:
        """Target tokens: the next token of each token."""
        return self.window_BW[:, 1:]


class Targets(NamedTuple):
    """The targets of several samples together."""

    count: int
    """Targets that count."""
    weight: float
    """Sum of the sizes of their loss weights (some may be negative); `count` where the source has none."""


class TokenSamples(Protocol):
    """Samples by id: every way of making sequences from token sources."""

    @property
    def sequence_length(self) -> int:
        """Positions of one sample."""
        ...

    @property
    def separate(self) -> bool:
        """Whether attention, positions and loss stop at document ends."""
        ...

    @property
    def name(self) -> str:
        """Name of the source in messages."""
        ...

    @property
    def vocab_size(self) -> int:
        """Largest possible token id + 1."""
        ...

    def __len__(self) -> int: ...

    def targets(self, ids: NDArray[np.int64]) -> Targets:
        """The targets of these samples together, computed without reading tokens."""
        ...

    def rows(self, ids: NDArray[np.int64]) -> Rows:
        """The samples of these ids, in their order; PADDING is a row in which no target counts."""
        ...

    def require_unchanged(self) -> None:
        """DataError where a source was changed since it was opened."""
        ...


@dataclass(frozen=True)
class Samples:
    """Sample i is the tokens [i S, (i+1) S) with the next tokens as targets; documents may span samples.

    This is packing by concatenation. Tokens after the last full sample, fewer than S + 1, are never read.
    """

    source: TokenSource
    sequence_length: int
    separate: bool
    """Separate documents (document masking): attention, positions and loss stop at document ends."""

    def __len__(self) -> int:
        return max(0, (len(self.source.tokens) - 1) // self.sequence_length)

    @property
    def name(self) -> str:
        """Name of the source."""
        return self.source.name

    @property
    def vocab_size(self) -> int:
        """Vocabulary of the source."""
        return self.source.vocab_size

    def require_unchanged(self) -> None:
        """DataError where the source was changed since it was opened."""
        self.source.require_unchanged()

    def targets(self, ids: NDArray[np.int64]) -> Targets:
        """Targets of these samples, computed from document ends and loss weights: no token is read."""
        real = ids[ids != PADDING]
        if self.source.loss_weights is not None:
            weights = self._loss_weights(real, self._marks(real).counts)
            return Targets(int(np.count_nonzero(weights)), float(np.abs(weights).sum(dtype=np.float64)))
        total = len(real) * self.sequence_length
        if self.separate:
            first, last = self._documents_ending_in(real)
            total -= int((last - first).sum())
        return Targets(total, float(total))

    def rows(self, ids: NDArray[np.int64]) -> Rows:
        """The samples of these ids, in their order; PADDING is a row in which no target counts."""
        window = self.windows[np.maximum(ids, 0)]
        window[ids == PADDING] = 0
        require_vocabulary(self.source, window, ids, self.sequence_length)
        marks = self._marks(ids)
        weights = None if self.source.loss_weights is None else self._loss_weights(ids, marks.counts)
        counts = marks.counts if weights is None else weights != 0
        return Rows(window, counts, marks.positions, marks.documents, weights)

    @cached_property
    def windows(self) -> NDArray[np.unsignedinteger]:
        """A view of all samples: S + 1 tokens each."""
        return _windows(self.source.tokens, len(self), self.sequence_length)

    def _loss_weights(self, ids: NDArray[np.int64], counts: NDArray[np.bool_]) -> NDArray[np.float32]:
        assert self.source.loss_weights is not None
        windows = _windows(self.source.loss_weights, len(self), self.sequence_length)
        return windows[np.maximum(ids, 0), 1:].astype(np.float32) * counts

    def _marks(self, ids: NDArray[np.int64]) -> "Marks":
        """Counts, positions and documents of these samples."""
        length = self.sequence_length
        counts = np.repeat((ids != PADDING)[:, None], length, axis=1)
        if not self.separate:
            return Marks(counts, np.tile(np.arange(length), (len(ids), 1)), None)
        first, last = self._documents_ending_in(np.maximum(ids, 0))
        num_ends = np.where(ids == PADDING, 0, last - first)
        row = np.repeat(np.arange(len(ids)), num_ends)
        within = np.arange(len(row)) - np.repeat(np.cumsum(num_ends) - num_ends, num_ends)
        ends = self.source.document_ends[first[row] + within] - ids[row] * length
        self._require_increasing(ends, row)
        counts[row, ends - 1] = False  # the token after a document's last one is of another document
        inside = ends < length
        return marks_of(counts, row[inside], ends[inside])

    def _documents_ending_in(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The range [first, last) of documents whose last token is an input of each sample."""
        ends, start = self.source.document_ends, ids * self.sequence_length
        first = np.searchsorted(ends, start, side="right")
        return first, np.searchsorted(ends, start + self.sequence_length, side="right")

    def _require_increasing(self, ends: NDArray[np.int64], row: NDArray[np.int64]) -> None:
        steps = np.diff(ends)[row[1:] == row[:-1]]
        if len(ends) and (ends.min() < 1 or ends.max() > self.sequence_length or (steps <= 0).any()):
            raise DataError(
                "document ends do not increase",
                where=self.source.name,
                hint="the dataset is damaged: `meshwright data verify` shows where",
            )


class Marks(NamedTuple):
    """What a row says about its tokens."""

    counts: NDArray[np.bool_]
    positions: NDArray[np.int64]
    documents: NDArray[np.int64] | None


def marks_of(counts: NDArray[np.bool_], row: NDArray[np.int64], begin: NDArray[np.int64]) -> Marks:
    """The marks of rows in which documents begin at `begin` of `row`, beside the one at the row's start."""
    begins = np.zeros(counts.shape, dtype=np.int64)
    starts = np.zeros(counts.shape, dtype=np.int64)
    begins[row, begin], starts[row, begin] = 1, begin
    positions = np.arange(counts.shape[1]) - np.maximum.accumulate(starts, axis=1)
    return Marks(counts, positions, begins.cumsum(axis=1))


def require_vocabulary(
    source: TokenSource, window: NDArray[np.unsignedinteger], ids: NDArray[np.int64], sequence_length: int
) -> None:
    """DataError where a token is outside the vocabulary of its source; names the sample and its place."""
    if (largest := int(window.max(initial=0))) < source.vocab_size:
        return
    sample = int(ids[window.max(axis=1).argmax()])
    raise DataError(
        f"token {largest} is outside the dataset's vocabulary of {source.vocab_size} tokens",
        where=f"{source.name}, sample {sample}, sequences of {sequence_length}",
        hint="the dataset is damaged: `meshwright data verify` shows where",
    )


def _windows(values: NDArray, count: int, sequence_length: int) -> NDArray:
    """A view with one row of S + 1 values for each sample: row i begins at value i S. Nothing is copied."""
    step = values.strides[0]
    return np.lib.stride_tricks.as_strided(
        values, (count, sequence_length + 1), (sequence_length * step, step), writeable=False
    )
