"""Sums over intervals of time that may overlap."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals that are in order and do not overlap."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Time in any of the intervals."""
    return sum(end - start for start, end in union(intervals))


def without(intervals: Iterable[Interval], removed: Iterable[Interval]) -> list[Interval]:
    """The time of `intervals` that is not in `removed`."""
    left: list[Interval] = []
    holes, index = union(removed), 0
    for start, end in union(intervals):
        while index < len(holes) and holes[index][1] <= start:
            index += 1
        at, hole = start, index
        while hole < len(holes) and holes[hole][0] < end:
            if holes[hole][0] > at:
                left.append((at, holes[hole][0]))
            at = max(at, holes[hole][1])
            hole += 1
        if at < end:
            left.append((at, end))
    return left


def within(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """The parts of the intervals between two instants."""
    return [(max(a, start), min(b, end)) for a, b in intervals if a < end and b > start]


class Cover:
    """Answers whether an instant is in any of some intervals."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self._merged: Sequence[Interval] = union(intervals)
        self._starts = [start for start, _ in self._merged]

    def __contains__(self, at: float) -> bool:
        index = bisect_right(self._starts, at) - 1
        return index >= 0 and at < self._merged[index][1]

    def index(self, at: float) -> int:
        """How many of the merged intervals have started by this instant."""
        return bisect_right(self._starts, at)
