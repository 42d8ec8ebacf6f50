"""Samples of whole documents: each row has complete documents (packing: whole), padded at its end."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.data.packing import PackingPlan, count_up
from meshwright.data.samples import PADDING, Rows, Targets, marks_of, require_vocabulary
from meshwright.data.sources import TokenSource


@dataclass(frozen=True)
class PackedSamples:
    """Sample i is row i of a packing plan. Documents never attend to each other, and positions restart.

    A document longer than S is split into rows of S and a rest; the last target of such a row is the first
    token of the next one, so every token but a document's first is a target once.
    """

    source: TokenSource
    sequence_length: int
    plan: PackingPlan
    separate: bool = True

    def __len__(self) -> int:
        return len(self.plan)

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
        """Targets of these samples, from the plan; loss weights are read where the source has them."""
        real = ids[ids != PADDING]
        if self.source.loss_weights is None:
            count = int(self.plan.targets[real].sum())
            return Targets(count, float(count))
        layout = self._layout(real)
        weights = self._loss_weights(layout, self._counts(layout))
        return Targets(int(np.count_nonzero(weights)), float(np.abs(weights).sum(dtype=np.float64)))

    def rows(self, ids: NDArray[np.int64]) -> Rows:
        """The rows of these ids, in their order; PADDING is a row in which no target counts."""
        layout = self._layout(ids)
        window = layout.gather(self.source.tokens, self.source.tokens.dtype)
        require_vocabulary(self.source, window, ids, self.sequence_length)
        counts, pieces = self._counts(layout), layout.pieces
        begins = np.concatenate([pieces.begins, pieces.used])
        rows = np.concatenate([pieces.rows, np.arange(len(ids))])
        inside = (begins > 0) & (begins < self.sequence_length)
        marks = marks_of(counts, rows[inside], begins[inside])
        if self.source.loss_weights is None:
            return Rows(window, counts, marks.positions, marks.documents)
        weights = self._loss_weights(layout, counts)
        return Rows(window, weights != 0, marks.positions, marks.documents, weights)

    def _layout(self, ids: NDArray[np.int64]) -> "_Layout":
        pieces, width = self._pieces(ids), self.sequence_length + 1
        within = count_up(pieces.lengths)
        ends, document_ends = pieces.starts + pieces.lengths, self.source.document_ends
        goes_on = document_ends[np.searchsorted(document_ends, ends)] != ends
        return _Layout(
            pieces=pieces,
            shape=(len(ids), width),
            places=np.repeat(pieces.rows * width + pieces.begins, pieces.lengths) + within,
            tokens=np.repeat(pieces.starts, pieces.lengths) + within,
            continued=pieces.rows[goes_on],
            next_tokens=ends[goes_on],
        )

    def _pieces(self, ids: NDArray[np.int64]) -> "_Pieces":
        plan, real = self.plan, np.maximum(ids, 0)
        num_pieces = np.where(ids == PADDING, 0, plan.row_offsets[real + 1] - plan.row_offsets[real])
        rows = np.repeat(np.arange(len(ids)), num_pieces)
        which = plan.row_offsets[real[rows]] + count_up(num_pieces)
        lengths = plan.lengths[which]
        before = np.cumsum(lengths) - lengths
        used = np.bincount(rows, weights=lengths, minlength=len(ids)).astype(np.int64)
        return _Pieces(rows, before - (np.cumsum(used) - used)[rows], plan.starts[which], lengths, used)

    def _counts(self, layout: "_Layout") -> NDArray[np.bool_]:
        counts, pieces = np.zeros(layout.shape, dtype=np.bool_), layout.pieces
        counts.reshape(-1)[layout.places] = True
        counts[pieces.rows, pieces.begins + pieces.lengths - 1] = False  # no target in the next document
        counts[layout.continued, self.sequence_length - 1] = True
        return counts[:, :-1].copy()

    def _loss_weights(self, layout: "_Layout", counts: NDArray[np.bool_]) -> NDArray[np.float32]:
        assert self.source.loss_weights is not None
        return layout.gather(self.source.loss_weights, np.dtype(np.float32))[:, 1:] * counts


@dataclass(frozen=True)
class _Pieces:
    """The pieces of several rows, one after the other."""

    rows: NDArray[np.int64]
    begins: NDArray[np.int64]
    """First position of each piece in its row."""
    starts: NDArray[np.int64]
    """First token of each piece in the source."""
    lengths: NDArray[np.int64]
    used: NDArray[np.int64]
    """Tokens of each row."""


@dataclass(frozen=True)
class _Layout:
    """Where the tokens of several rows come from."""

    pieces: _Pieces
    shape: tuple[int, int]
    """Rows, and their S + 1 tokens."""
    places: NDArray[np.int64]
    """The place of each token, counted over all rows."""
    tokens: NDArray[np.int64]
    """The index of each token in the source."""
    continued: NDArray[np.int64]
    """Rows that one document fills and continues after: their last target is one more token."""
    next_tokens: NDArray[np.int64]
    """The index of that token."""

    def gather(self, values: NDArray, dtype: np.dtype) -> NDArray:
        """The values of all tokens, in rows; 0 in padding."""
        rows = np.zeros(self.shape, dtype=dtype)
        rows.reshape(-1)[self.places] = values[self.tokens]
        rows[self.continued, -1] = values[self.next_tokens]
        return rows
