"""The metrics of a run as columns: a million steps are a few arrays, not a million dictionaries."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from meshwright.files import regular_file
from meshwright.observe.metrics import METRICS_NAME, NON_FINITE

Numbers = NDArray[np.float64]
# Large enough that little is done per block, small enough that its rows need little memory.
_BLOCK_BYTES = 2 << 20
_MAX_STEP = 2**53


@dataclass(frozen=True)
class History:
    """Columns of metrics.jsonl, one value per step, sorted by step."""

    steps: NDArray[np.int64]
    columns: dict[str, Numbers]
    """NaN where a step does not have the quantity, and where it is NaN: `recorded` tells them apart."""
    recorded: dict[str, NDArray[np.bool_]]

    def __len__(self) -> int:
        return len(self.steps)

    def points(self, name: str) -> Numbers:
        """(step, value) of each step that has the quantity: an array of two columns."""
        if name not in self.columns:
            return np.empty((0, 2))
        kept = self.recorded[name]
        return np.stack([self.steps[kept].astype(np.float64), self.columns[name][kept]], axis=1)

    def values(self, name: str) -> Numbers:
        """The values of the steps that have the quantity."""
        return self.points(name)[:, 1]

    def up_to(self, last_step: int | None) -> "History":
        """The history without steps after `last_step`; None keeps all."""
        return self if last_step is None else self._select(self.steps <= last_step)

    def _select(self, kept: NDArray[Any]) -> "History":
        """The steps of a mask or of indices, in their order."""
        return History(
            self.steps[kept],
            {name: column[kept] for name, column in self.columns.items()},
            {name: mask[kept] for name, mask in self.recorded.items()},
        )


def read_history(path: Path | str, names: Sequence[str]) -> History:
    """These columns of a metrics.jsonl, or of that of a run directory.

    Anything but a complete line with a step is skipped, a missing or unreadable file has no steps, and the
    last line of a step counts.
    """
    path = Path(path)
    path = path / METRICS_NAME if path.is_dir() else path
    chunks = [_Chunk.of(rows, present) for rows, present in _chunks(path, names)]
    steps = np.concatenate([np.empty(0, np.int64), *(chunk.steps for chunk in chunks)])
    columns, recorded = {}, {}
    for name in names:
        if any(name in chunk.columns for chunk in chunks):
            # Taken out of the chunks one column at a time: memory holds the history once.
            parts = [chunk.take(name) for chunk in chunks]
            columns[name] = np.concatenate([values for values, _ in parts])
            recorded[name] = np.concatenate([mask for _, mask in parts])
    return _sorted(History(steps, columns, recorded))


def _sorted(history: History) -> History:
    if (np.diff(history.steps) > 0).all():
        return history
    # np.unique gives the first of equal steps: reversed, that is the last line.
    _, first = np.unique(history.steps[::-1], return_index=True)
    return history._select(len(history) - 1 - first)


class _Column(NamedTuple):
    values: Numbers
    recorded: NDArray[np.bool_]


class _Chunk(NamedTuple):
    """Some thousand lines; a column that none of them has is left out."""

    steps: NDArray[np.int64]
    columns: dict[str, _Column]

    @staticmethod
    def of(rows: list[dict[str, Any]], names: Sequence[str]) -> "_Chunk":
        found = {name: values_of(rows, name) for name in names}
        columns = {name: _column(values) for name, values in found.items() if values.count(None) < len(rows)}
        return _Chunk(np.array([row["step"] for row in rows], np.int64), columns)

    def take(self, name: str) -> _Column:
        absent = _Column(np.full(len(self.steps), math.nan), np.zeros(len(self.steps), np.bool_))
        return self.columns.pop(name, absent)


def values_of(rows: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """One value per row; None where a row has none."""
    try:
        return list(map(itemgetter(name), rows))
    except KeyError:
        return [row.get(name) for row in rows]


def _column(values: list[Any]) -> _Column:
    """The values as floats, and where there is one."""
    if None in values:  # few have one, such as losses of evaluations: look at these alone
        mask = np.array([value is not None for value in values], np.bool_)
        found = _column([value for value in values if value is not None])
        filled = np.full(len(values), math.nan)
        filled[mask] = found.values
        mask[mask] = found.recorded
        return _Column(filled, mask)
    try:
        found = np.array(values)
        if found.dtype.kind in "fib" and found.ndim == 1:
            return _Column(found.astype(np.float64, copy=False), np.ones(len(values), np.bool_))
    except ValueError:  # lists of different lengths in a damaged file
        pass
    numbers = [_number(value) for value in values]
    mask = np.array([number is not None for number in numbers], np.bool_)
    return _Column(np.array([math.nan if number is None else number for number in numbers]), mask)


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return NON_FINITE.get(value)
    if not isinstance(value, bool | int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _chunks(path: Path, names: Sequence[str]) -> Iterator[tuple[list[dict[str, Any]], list[str]]]:
    """The well-formed rows of a file, some thousand at a time, and the names that occur in them."""
    try:
        with regular_file(path) as file:
            rest = b""
            while block := file.read(_BLOCK_BYTES):
                complete, newline, rest = (rest + block).rpartition(b"\n")
                rest = rest[:_BLOCK_BYTES]  # no line of ours is so long: the file is damaged
                if newline and (rows := json_rows(complete)):
                    yield rows, [name for name in names if name.encode() in complete]
    except OSError:
        return


def json_rows(lines: bytes) -> list[dict[str, Any]]:
    """The rows of complete lines that have a step; the usual case makes no object per line."""
    try:
        rows = from_json(b"[" + lines.replace(b"\n", b",") + b"]")
    except ValueError:
        rows = [value for line in lines.split(b"\n") if (value := _value(line)) is not None]
    return rows if _all_have_steps(rows) else [row for row in rows if _has_step(row)]


def _all_have_steps(rows: list[Any]) -> bool:
    """Whether every row is well-formed, seen without a call per row."""
    try:
        steps = np.array(list(map(itemgetter("step"), rows)))
    except (KeyError, TypeError, IndexError):
        return False
    is_whole = steps.ndim == 1 and steps.dtype == np.int64
    return is_whole and len(steps) > 0 and steps.min() >= 0 and steps.max() <= _MAX_STEP


def _value(line: bytes) -> Any:
    try:
        return from_json(line)
    except ValueError:
        return None


def _has_step(row: Any) -> bool:
    step = row.get("step") if isinstance(row, dict) else None
    return type(step) is int and 0 <= step <= _MAX_STEP
