"""Corrupt samples: each is replaced by a substitute that follows from its id, and counted against a limit.

A substitute takes the place of the corrupt sample in its row. So no other row moves, on this rank or another,
and the stream after it stays the same. The targets of a substitute are weighted so that the row counts as
much as was planned: the other ranks, which never see the corrupt sample, divide by the same total.
"""

import sys
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.data.order import permute
from meshwright.data.samples import PADDING, Rows, TokenSamples
from meshwright.errors import DataError

_NUM_ATTEMPTS = 8


@dataclass
class BadSamples:
    """The corrupt samples that one rank has met."""

    limit: int
    """Corrupt samples that are replaced; one more is an error."""
    found: dict[int, int] = field(default_factory=dict)
    """The substitute of each corrupt sample."""

    def rows(self, samples: TokenSamples, ids: NDArray[np.int64]) -> Rows:
        """The rows of these samples, with substitutes for those that are corrupt."""
        try:
            return samples.rows(ids)
        except DataError:
            if self.limit == 0:
                raise
            chosen = np.array([self._good(samples, int(one)) for one in ids], dtype=np.int64)
        return _as_planned(samples, ids, chosen)

    def _good(self, samples: TokenSamples, sample: int) -> int:
        """The sample itself, or its substitute."""
        if sample == PADDING or (error := trouble_of(samples, sample)) is None:
            return sample
        if sample not in self.found:
            self._require_below_limit(error)
            self.found[sample] = self._substitute(samples, sample, error)
            note = f"note: {error.where}: {error.fact}; sample {self.found[sample]} takes its place"
            print(note, file=sys.stderr)
        return self.found[sample]

    def _substitute(self, samples: TokenSamples, sample: int, error: DataError) -> int:
        for candidate in substitutes(sample, len(samples)):
            if trouble_of(samples, candidate) is None:
                return candidate
        raise error

    def _require_below_limit(self, error: DataError) -> None:
        if len(self.found) >= self.limit:
            raise DataError(
                f"{error.fact}; {len(self.found)} corrupt samples before it were replaced",
                where=error.where,
                hint=f"repair the dataset, or raise data.max_bad_samples above {self.limit}",
            ) from error


def substitutes(sample: int, num_samples: int) -> list[int]:
    """The samples that may take the place of a corrupt one, in order: a function of its id alone."""
    index = np.arange(min(_NUM_ATTEMPTS, num_samples), dtype=np.int64)
    found = permute(index, num_items=num_samples, seed=sample, epoch=0).tolist()
    return [one for one in found if one != sample]


def trouble_of(samples: TokenSamples, sample: int) -> DataError | None:
    """The error of a corrupt sample; None for an intact one."""
    try:
        samples.rows(np.array([sample], dtype=np.int64))
    except DataError as error:
        return error
    return None


def _as_planned(samples: TokenSamples, planned: NDArray[np.int64], chosen: NDArray[np.int64]) -> Rows:
    """The rows of `chosen`, weighted so that each counts as much as the row that was planned."""
    rows = samples.rows(chosen)
    weights = rows.counts_BS.astype(np.float32) if rows.loss_weights_BS is None else rows.loss_weights_BS
    for row in np.flatnonzero(planned != chosen):
        here = slice(row, row + 1)
        weights[row] *= samples.targets(planned[here]).weight / (samples.targets(chosen[here]).weight or 1)
    return rows._replace(loss_weights_BS=weights)
