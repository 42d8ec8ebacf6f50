"""Samples of preference pairs: each row has complete pairs, so both answers are in one micro-batch and rank.

A pair is packed as one piece (best fit decreasing). Its two answers, each with the prompt before it, are
separate documents that follow each other.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.packed_samples import PackedSamples
from meshwright.data.packing import PackingPlan, plan_packing
from meshwright.data.samples import PADDING, Rows, Targets
from meshwright.data.sources import TokenSource
from meshwright.errors import DataError

NO_PAIR = -1


class RowPairs(NamedTuple):
    """The pairs of several rows."""

    answers_BS: NDArray[np.int32]
    """Answer of each target in its row: 2 p is the chosen, 2 p + 1 the rejected one of pair p."""
    pairs_BPF: NDArray[np.float64]
    """Weight of each pair, and the reference log-probs of its chosen and rejected answer; 0 for padding."""


@dataclass
class PairSamples:
    """Sample i is row i of a packing plan of pairs."""

    packed: PackedSamples
    reference: NDArray[np.float64] | None = None
    """Reference log-probs of the two answers of each pair of the dataset; None: the loss has no reference."""

    @staticmethod
    def open(source: TokenSource, sequence_length: int) -> "PairSamples":
        """The samples of a dataset whose documents 2 i and 2 i + 1 are the answers of pair i."""
        return PairSamples(
            PackedSamples(source, sequence_length, plan_pairs(source.document_ends, sequence_length))
        )

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def sequence_length(self) -> int:
        """Positions of one sample."""
        return self.packed.sequence_length

    @property
    def separate(self) -> bool:
        """True: answers never attend to each other."""
        return True

    @property
    def name(self) -> str:
        """Name of the source."""
        return self.packed.name

    @property
    def vocab_size(self) -> int:
        """Vocabulary of the source."""
        return self.packed.vocab_size

    @property
    def num_pairs(self) -> int:
        """Pairs of the dataset."""
        return len(self.packed.source.document_ends) // 2

    def require_unchanged(self) -> None:
        """DataError where the source was changed since it was opened."""
        self.packed.require_unchanged()

    def targets(self, ids: NDArray[np.int64]) -> Targets:
        """The targets of these samples together."""
        return self.packed.targets(ids)

    def rows(self, ids: NDArray[np.int64]) -> Rows:
        """The samples of these ids, in their order; PADDING is a row in which no target counts."""
        return self.packed.rows(ids)

    def pair_ids(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The pairs of each row, padded to one number with NO_PAIR."""
        plan = self.packed.plan
        real = np.maximum(ids, 0)
        counts = np.where(ids == PADDING, 0, (plan.row_offsets[real + 1] - plan.row_offsets[real]) // 2)
        found = np.full((len(ids), max(1, int(counts.max(initial=0)))), NO_PAIR, dtype=np.int64)
        for row, (sample, count) in enumerate(zip(real.tolist(), counts.tolist(), strict=True)):
            first = int(plan.row_offsets[sample])
            starts = plan.starts[first : first + 2 * count : 2]
            found[row, :count] = np.searchsorted(self.packed.source.document_ends, starts, side="right") // 2
        return found

    def row_pairs(self, rows: Rows, ids: NDArray[np.int64], total_ids: NDArray[np.int64]) -> RowPairs:
        """The pairs of these rows, each with the weight 1 / pairs of `total_ids`."""
        assert rows.documents_BS is not None
        pair_ids = self.pair_ids(ids)
        is_pair = pair_ids != NO_PAIR
        pairs = np.zeros((*pair_ids.shape, 3), dtype=np.float64)
        pairs[..., 0] = is_pair / max(1, int((self.pair_ids(total_ids) != NO_PAIR).sum()))
        if self.reference is not None:
            pairs[..., 1:][is_pair] = self.reference[pair_ids[is_pair]]
        # Padding after the last pair is a document of its own, in which nothing counts.
        answers = np.minimum(rows.documents_BS, 2 * pair_ids.shape[1] - 1).astype(np.int32)
        return RowPairs(answers, pairs)


def plan_pairs(document_ends: NDArray[np.int64], sequence_length: int) -> PackingPlan:
    """The packing of pairs of documents; both documents of a pair are in one row, one after the other."""
    if len(document_ends) % 2:
        raise DataError("a dataset of pairs has an even number of documents", where="packing")
    plan = plan_packing(document_ends[1::2], sequence_length)
    # A pair longer than a row would be split; it is refused before.
    assert len(plan.starts) == len(document_ends) // 2
    middle = document_ends[np.searchsorted(document_ends, plan.starts, side="right")]
    ends = plan.starts + plan.lengths
    num_pairs = np.diff(plan.row_offsets)
    return PackingPlan(
        starts=np.stack([plan.starts, middle], axis=1).ravel(),
        lengths=np.stack([middle - plan.starts, ends - middle], axis=1).ravel(),
        row_offsets=plan.row_offsets * 2,
        targets=plan.targets - num_pairs,
    )
