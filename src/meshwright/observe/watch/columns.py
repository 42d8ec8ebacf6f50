"""Columns of metrics that grow, and their down-sampled view: a million steps are a few arrays of float32."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.observe.history import values_of
from meshwright.observe.metrics import NON_FINITE

Values = NDArray[np.float32]
Steps = NDArray[np.int64]

_FIRST_CAPACITY = 1024


class Columns:
    """Steps and values, appended row by row. NaN: the row has no value; infinite: the value is not finite."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._steps = np.empty(_FIRST_CAPACITY, np.int64)
        self._values: dict[str, Values] = {}
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns that have a value."""
        return tuple(self._values)

    @property
    def steps(self) -> Steps:
        """The steps, one per row."""
        return self._steps[: self._num_rows]

    def values(self, name: str) -> Values:
        """The values of a column, one per row."""
        return self._values[name][: self._num_rows]

    def last(self, name: str) -> float | None:
        """The newest value of a column that is a finite number; None where there is none."""
        if name not in self._values:
            return None
        found = self.values(name)
        recent = found[-1000:][np.isfinite(found[-1000:])]
        if not len(recent):
            recent = found[np.isfinite(found)]
        return float(recent[-1]) if len(recent) else None

    def take(self, steps: Steps, values: Mapping[str, Values]) -> None:
        """Start with these rows, whose steps ascend; the arrays are not copied."""
        assert not self._num_rows
        self._steps, self._values, self._num_rows = steps, dict(values), len(steps)

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows; one whose step is not above the last one replaces the rows from there on."""
        for start, end in _ascending(rows):
            self._append(rows[start:end])

    def _append(self, rows: Sequence[dict[str, Any]]) -> None:
        steps = np.array([row["step"] for row in rows], np.int64)
        start = int(np.searchsorted(self.steps, steps[0]))
        end = start + len(rows)
        self._reserve(end)
        self._steps[start:end] = steps
        for name in self._names:
            found = values_of(rows, name)
            if name not in self._values:
                if found.count(None) == len(found):
                    continue
                self._values[name] = np.full(len(self._steps), np.nan, np.float32)
            self._values[name][start:end] = _as_values(found)
        self._num_rows = end

    def _reserve(self, num_rows: int) -> None:
        capacity = len(self._steps)
        if num_rows <= capacity:
            return
        capacity = max(num_rows, capacity + capacity // 2)
        self._steps = np.concatenate([self.steps, np.empty(capacity - self._num_rows, np.int64)])
        for name in self._values:  # one column at a time: memory holds the columns once
            rest = np.full(capacity - self._num_rows, np.nan, np.float32)
            self._values[name] = np.concatenate([self.values(name), rest])


def _ascending(rows: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """Start and end of each part whose steps ascend."""
    if not rows:
        return []
    steps = np.array([row["step"] for row in rows], np.int64)
    breaks = (np.flatnonzero(np.diff(steps) <= 0) + 1).tolist()
    return list(zip([0, *breaks], [*breaks, len(rows)], strict=True))


def _as_values(found: list[Any]) -> Values:
    if len(kinds := set(map(type, found))) == 1 and kinds <= {float, int}:
        try:
            return _narrow(np.array(found, np.float64))
        except OverflowError:  # an integer beyond float64 in a damaged file
            pass
    return _narrow(np.array([_number(value) for value in found], np.float64))


def _narrow(values: NDArray[np.float64]) -> Values:
    with np.errstate(over="ignore"):  # a loss beyond float32 is as good as infinite
        return values.astype(np.float32)


def _number(value: Any) -> float:
    """The value; infinite for the texts of numbers that are not finite, NaN for anything else."""
    if isinstance(value, str):
        return np.inf if value in NON_FINITE else np.nan
    try:
        return float(value) if isinstance(value, bool | int | float) else np.nan
    except OverflowError:
        return np.nan


@dataclass(frozen=True)
class Curve:
    """A down-sampled column: of each bucket of neighbouring steps the lowest, the highest and the mean."""

    steps: list[int]
    low: list[float | None]
    high: list[float | None]
    mean: list[float | None]
    """None: no value of the bucket is finite."""
    broken: list[int]
    """Steps whose value is not finite, the first of each bucket."""


def down_sample(steps: Steps, values: Values, num_buckets: int) -> Curve:
    """A curve of at most `num_buckets` buckets: no spike and no dip is lost."""
    kept = ~np.isnan(values)
    steps, found = steps[kept], values[kept].astype(np.float64)
    if not len(steps):
        return Curve([], [], [], [], [])
    starts = np.unique(np.linspace(0, len(steps), min(num_buckets, len(steps)) + 1).astype(np.int64)[:-1])
    is_finite = np.isfinite(found)
    counts = np.add.reduceat(is_finite.astype(np.int64), starts)
    low = np.minimum.reduceat(np.where(is_finite, found, np.inf), starts)
    high = np.maximum.reduceat(np.where(is_finite, found, -np.inf), starts)
    total = np.add.reduceat(np.where(is_finite, found, 0.0), starts)
    mean = np.where(counts > 0, total / np.maximum(counts, 1), np.inf)
    ends = np.append(starts[1:], len(steps)) - 1
    broken = steps[~is_finite]
    return Curve(
        steps=((steps[starts] + steps[ends]) // 2).tolist(),
        low=_shown(low),
        high=_shown(high),
        mean=_shown(mean),
        broken=broken[:: max(1, len(broken) // 60)].tolist(),
    )


def _shown(values: NDArray[np.float64]) -> list[float | None]:
    return [float(f"{value:.6g}") if abs(value) < np.inf else None for value in values.tolist()]
