"""Stragglers: a rank that is slower than the others for a while, with the likely cause.

In synchronous training all ranks take the same wall time, because they wait for the slowest one. What differs
is the time that is a rank's own. Imports no torch.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshwright.observe.rank_times import Numbers, RankFigures
from meshwright.units import show_seconds

# Means of at least a second each; a rank that was slow in most of them is a straggler, one pause is not.
_OBSERVATION_SECONDS, _NUM_OBSERVATIONS, _SLOW_SHARE = 1.0, 12, 0.8
# Where at least half of the excess is waiting for batches, data is the cause.
_DATA_SHARE = 0.5


@dataclass(frozen=True)
class Straggler:
    """A rank that holds the others up."""

    rank: int
    ratio: float
    """Its own time of a step / the median of the other ranks."""
    excess_seconds: float
    """How much longer than the median of the others it takes for a step."""
    cause: str

    def text(self, host: str) -> str:
        """One sentence for people."""
        return (
            f"rank {self.rank} on {host} is a straggler: its own time of a step is {self.ratio:.2f} times "
            f"that of the other ranks ({show_seconds(self.excess_seconds)} more); likely cause: {self.cause}"
        )


class StragglerWatch:
    """Takes in the figures of recorded steps; on rank 0 only."""

    def __init__(self, factor: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`factor` times the median own time of the other ranks is slow; None: nobody looks."""
        self._factor, self._clock = factor, clock
        self._since: list[RankFigures] = []
        self._observed_at = clock()
        self._recent: deque[tuple[Numbers, Numbers]] = deque(maxlen=_NUM_OBSERVATIONS)
        self._known: set[int] = set()

    def look(self, figures: RankFigures) -> list[Straggler]:
        """The stragglers that are new since the last call; one that recovers may be found again."""
        if self._factor is None or len(figures.own_seconds) < 2 or np.isnan(figures.own_seconds).any():
            return []
        self._since.append(figures)
        if self._clock() - self._observed_at < _OBSERVATION_SECONDS:
            return []
        own = np.mean([one.own_seconds for one in self._since], axis=0)
        waited = np.mean([one.data_wait_seconds for one in self._since], axis=0)
        self._recent.append((own, waited))
        self._since, self._observed_at = [], self._clock()
        if len(self._recent) < _NUM_OBSERVATIONS:
            return []
        found = self._stragglers(self._factor)
        new = [one for one in found if one.rank not in self._known]
        self._known = {one.rank for one in found}
        return new

    def _stragglers(self, factor: float) -> list[Straggler]:
        own = np.array([one for one, _ in self._recent])
        waited = np.array([one for _, one in self._recent])
        others = _median_of_others(own)
        slow_share = np.mean(own >= factor * others, axis=0)
        ranks = np.nonzero(slow_share >= _SLOW_SHARE)[0]
        return [_straggler(int(rank), own, waited, others) for rank in ranks]


def _straggler(rank: int, own: Numbers, waited: Numbers, others: Numbers) -> Straggler:
    excess = float(np.median(own[:, rank] - others[:, rank]))
    data_excess = float(np.median(waited[:, rank] - _median_of_others(waited)[:, rank]))
    is_data = data_excess >= _DATA_SHARE * excess
    cause = (
        f"it waits for its batches ({show_seconds(data_excess)} more per step than the others)"
        if is_data
        else "its own compute: clocks or temperature of its device, a busy host, or more work than the others"
    )
    ratio = float(np.median(own[:, rank] / np.maximum(others[:, rank], 1e-9)))
    return Straggler(rank, ratio, excess, cause)


def _median_of_others(values: Numbers) -> Numbers:
    """For each rank the median of the others, per observation: [observation, rank]."""
    num_ranks = values.shape[1]
    if num_ranks > 64:  # one rank more or less does not move the median
        return np.repeat(np.median(values, axis=1, keepdims=True), num_ranks, axis=1)
    return np.stack([np.median(np.delete(values, rank, axis=1), axis=1) for rank in range(num_ranks)], axis=1)
