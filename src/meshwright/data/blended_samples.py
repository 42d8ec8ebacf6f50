"""Samples of several sources as one: their ids follow each other, and a blend says which comes when."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.data.blend import Blend
from meshwright.data.order import SampleOrder
from meshwright.data.samples import PADDING, Rows, Targets, TokenSamples


class BlendedSamples:
    """The samples of K sources: id 0 ... n - 1 are those of the first one, and so on."""

    def __init__(self, parts: Sequence[TokenSamples]) -> None:
        self.parts = tuple(parts)
        self.sequence_length, self.separate = parts[0].sequence_length, parts[0].separate
        self.offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        """First id of each source, and the number of all samples."""
        self.vocab_size = max(part.vocab_size for part in parts)

    def __len__(self) -> int:
        return int(self.offsets[-1])

    @property
    def name(self) -> str:
        """Names of all sources."""
        return ", ".join(part.name for part in self.parts)

    def require_unchanged(self) -> None:
        """DataError where a source was changed since it was opened."""
        for part in self.parts:
            part.require_unchanged()

    def targets(self, ids: NDArray[np.int64]) -> Targets:
        """The targets of these samples together."""
        found = [self.parts[part].targets(local) for part, _, local in self._by_part(ids)]
        return Targets(sum(one.count for one in found), sum(one.weight for one in found))

    def rows(self, ids: NDArray[np.int64]) -> Rows:
        """The samples of these ids, in their order; PADDING is a row in which no target counts."""
        parts = [(here, self.parts[part].rows(local)) for part, here, local in self._by_part(ids)]
        parts = parts or [(np.arange(len(ids)), self.parts[0].rows(ids))]
        dtype = np.result_type(*(rows.window_BW.dtype for _, rows in parts))
        length = self.sequence_length
        window = np.zeros((len(ids), length + 1), dtype=dtype)
        counts = np.zeros((len(ids), length), dtype=np.bool_)
        positions = np.tile(np.arange(length), (len(ids), 1))
        documents = np.zeros((len(ids), length), dtype=np.int64) if self.separate else None
        is_weighted = any(rows.loss_weights_BS is not None for _, rows in parts)
        weights = np.zeros((len(ids), length), dtype=np.float32) if is_weighted else None
        for here, rows in parts:
            window[here], counts[here], positions[here] = rows.window_BW, rows.counts_BS, rows.positions_BS
            if documents is not None and rows.documents_BS is not None:
                documents[here] = rows.documents_BS
            if weights is not None:
                weights[here] = rows.counts_BS if rows.loss_weights_BS is None else rows.loss_weights_BS
        return Rows(window, counts, positions, documents, weights)

    def _by_part(self, ids: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """(source, places in `ids`, ids within the source) of each source that occurs."""
        which = np.searchsorted(self.offsets, ids, side="right") - 1
        found = []
        for part in np.unique(which[ids != PADDING]).tolist():
            here = np.flatnonzero(which == part)
            found.append((part, here, ids[here] - self.offsets[part]))
        return found


class BlendOrder:
    """The sample at each global index of a blend; each source has epochs of its own."""

    def __init__(self, blend: Blend, orders: Sequence[SampleOrder], offsets: NDArray[np.int64]) -> None:
        """`offsets` has the first id of each source."""
        self.blend, self.orders, self._offsets = blend, tuple(orders), offsets

    def sample_ids(self, position: int, count: int) -> NDArray[np.int64]:
        """The `count` samples from global index `position` on."""
        sources, numbers = self.blend.at(np.arange(position, position + count, dtype=np.int64))
        ids = np.empty(count, dtype=np.int64)
        for source in np.unique(sources).tolist():
            here = sources == source
            ids[here] = self._offsets[source] + self.orders[source].at(numbers[here])
        return ids
