"""Blends: which source has the sample at each index of a weighted mixture, in constant time.

Weights are exact fractions with a common denominator D, so a blend repeats after D places. One period is
planned at the start. The j-th sample of a source with share c of D comes at place floor(j D/c) at the
earliest and before place ceil((j+1) D/c); of all samples that may come, the one that is due first comes next.
So among the first n samples each source has n x weight, with an error below one, for every n. (This is a
proportionate-fair schedule, Pfair; on one processor it always exists.) A look-up is a division by D.

A source that does not repeat ends where its samples are used up, and a curriculum changes the weights at
given places. Both begin a new segment with a period of its own; numbers of samples are counted on.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DataError
from meshwright.spec.data import MAX_BLEND_PERIOD, exact_shares


@dataclass(frozen=True)
class Period:
    """One period of a blend of K sources, D places long."""

    sources_D: NDArray[np.int64]
    """The source at each place."""
    before_D: NDArray[np.int64]
    """Samples of that source at earlier places of the period."""
    shares_K: NDArray[np.int64]
    """Samples of each source in one period."""

    def __len__(self) -> int:
        return len(self.sources_D)

    def at(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(source, samples of that source at earlier places) at each index of the repeated period."""
        periods, place = np.divmod(index, len(self))
        sources = self.sources_D[place]
        return sources, periods * self.shares_K[sources] + self.before_D[place]

    def drawn(self, count: int) -> NDArray[np.int64]:
        """Samples of each source among the first `count` places."""
        periods, rest = divmod(count, len(self))
        within = np.bincount(self.sources_D[:rest], minlength=len(self.shares_K))
        return periods * self.shares_K + within

    def index_of(self, source: int, number: int) -> int:
        """The index of a source's sample number `number`, counted from 0."""
        periods, rest = divmod(number, int(self.shares_K[source]))
        return periods * len(self) + int(self._places[source][rest])

    @cached_property
    def _places(self) -> list[NDArray[np.int64]]:
        return [np.flatnonzero(self.sources_D == source) for source in range(len(self.shares_K))]


def plan_period(weights: Sequence[float]) -> Period:
    """One period of a blend with these weights; a weight of 0 has no place in it."""
    shares = _shares(weights)
    length = sum(shares)
    sources = np.empty(length, dtype=np.int64)
    # Entries are (due, source, number); a source has one entry, in `waiting` until it may come.
    ready: list[tuple[int, int, int]] = []
    waiting = [(0, source, 0) for source, share in enumerate(shares) if share]
    for place in range(length):
        while waiting and waiting[0][0] <= place:
            _, source, number = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(number + 1) * length // shares[source]), source, number))
        _, source, number = heapq.heappop(ready)
        sources[place] = source
        if number + 1 < shares[source]:
            heapq.heappush(waiting, ((number + 1) * length // shares[source], source, number + 1))
    before = np.empty(length, dtype=np.int64)
    for source, share in enumerate(shares):
        before[sources == source] = np.arange(share)
    return Period(sources, before, np.array(shares, dtype=np.int64))


def _shares(weights: Sequence[float]) -> list[int]:
    if not weights or min(weights) < 0 or not any(weights):
        raise DataError(f"weights {list(weights)} do not add up to more than 0", where="blend")
    shares = exact_shares(weights)
    if (period := sum(shares)) > MAX_BLEND_PERIOD:
        raise DataError(
            f"weights {', '.join(map(str, weights))} repeat after {period} samples only; "
            f"at most {MAX_BLEND_PERIOD} are planned",
            where="blend",
            hint="round the weights to a few digits",
        )
    return shares


class Phase(NamedTuple):
    """The weights of a blend from one index on."""

    start: int
    weights: tuple[float, ...]


@dataclass(frozen=True)
class _Segment:
    """A part of a blend in which the weights and the set of sources stay the same."""

    start: int
    period: Period
    drawn_K: NDArray[np.int64]
    """Samples of each source before `start`."""


class Blend:
    """A weighted mixture of sources: a pure function from an index to a source and a number in it."""

    def __init__(self, phases: Sequence[Phase], limits: Sequence[int | None]) -> None:
        """`limits` has the samples that each source gives before it ends; None repeats it without end."""
        self.num_sources = len(limits)
        self._segments: list[_Segment] = []
        self.num_samples = self._plan(phases, limits)
        """Samples until every source has ended; None where one repeats without end."""
        self._starts = np.array([one.start for one in self._segments], dtype=np.int64)

    def at(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(source, samples drawn from that source before) at each index."""
        sources, numbers = np.empty_like(index), np.empty_like(index)
        which = np.searchsorted(self._starts, index, side="right") - 1
        for number in np.unique(which):
            segment, here = self._segments[number], which == number
            source, before = segment.period.at(index[here] - segment.start)
            sources[here], numbers[here] = source, segment.drawn_K[source] + before
        return sources, numbers

    def drawn(self, count: int) -> NDArray[np.int64]:
        """Samples of each source among the first `count` of the blend."""
        count = count if self.num_samples is None else min(count, self.num_samples)
        segment = self._segments[int(np.searchsorted(self._starts, count, side="right")) - 1]
        return segment.drawn_K + segment.period.drawn(count - segment.start)

    def _plan(self, phases: Sequence[Phase], limits: Sequence[int | None]) -> int | None:
        """Fill `_segments`; returns where the blend ends."""
        start, drawn = 0, np.zeros(len(limits), dtype=np.int64)
        ends = [phase.start for phase in phases[1:]] + [None]
        for phase, phase_end in zip(phases, ends, strict=True):
            while phase_end is None or start < phase_end:
                has_ended = [
                    limit is not None and int(before) >= limit
                    for limit, before in zip(limits, drawn, strict=True)
                ]
                weights = [
                    0.0 if ended else weight for weight, ended in zip(phase.weights, has_ended, strict=True)
                ]
                if not any(weights):
                    return start
                segment = _Segment(start, plan_period(weights), drawn)
                self._segments.append(segment)
                end = _end_of(segment, limits, phase_end)
                if end is None:
                    return None
                drawn = drawn + segment.period.drawn(end - start)
                start = end
        raise AssertionError("the last phase has no end")


def _end_of(segment: _Segment, limits: Sequence[int | None], phase_end: int | None) -> int | None:
    """Where the first source of a segment ends, or the phase; None for neither."""
    ends = [] if phase_end is None else [phase_end]
    for source, (limit, drawn) in enumerate(zip(limits, segment.drawn_K, strict=True)):
        if limit is not None and segment.period.shares_K[source]:
            ends.append(segment.start + segment.period.index_of(source, limit - int(drawn) - 1) + 1)
    return min(ends, default=None)


def phases_of(weights: Sequence[float], changes: Sequence[tuple[int, Sequence[float]]]) -> list[Phase]:
    """The phases of a curriculum: `changes` are (end, weights) of the first phases, `weights` come after."""
    starts = [0, *(end for end, _ in changes)]
    if any(end <= start for start, end in pairwise(starts)):
        raise DataError(f"the phases end at {starts[1:]}, which does not increase", where="data.curriculum")
    each = [*(one for _, one in changes), weights]
    return [Phase(start, tuple(one)) for start, one in zip(starts, each, strict=True)]
