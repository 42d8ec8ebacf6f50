"""ranks.jsonl: step time, data wait and memory of every rank, one line for some steps.

Metrics are reductions over ranks, and in synchronous training all ranks take the same wall time: a straggler
shows only in the time that is a rank's own, without waiting for the others.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.observe.json_lines import last_lines, row_of_step
from meshwright.observe.step_lines import StepLines

RANKS_NAME = "ranks.jsonl"
# Ranks in a line per second between two lines: the file grows by about 200 bytes per second at most.
_RANKS_PER_SECOND = 8
RECENT_LINES = 30
"""Lines that decide which rank is slow now."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class RankFigures:
    """Figures of one step, one value per rank."""

    own_seconds: Numbers
    """Step time without the wait for gradients of other ranks; NaN where that wait is not measured."""
    data_wait_seconds: Numbers
    """Part of own_seconds in which the rank waited for its batch."""
    peak_bytes: Numbers


class RankTimesWriter(StepLines):
    """Appends to ranks.jsonl, on rank 0 only: means over the steps since the last line. Use as a context."""

    def __init__(
        self, run_dir: Path | str, *, restored_step: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(Path(run_dir) / RANKS_NAME, restored_step=restored_step)
        self._clock = clock
        self._since: list[RankFigures] = []
        self._due_at = 0.0

    def write(self, step: int, figures: RankFigures) -> None:
        """Take in one step; writes a line when one is due."""
        self._since.append(figures)
        num_ranks = len(figures.peak_bytes)
        if num_ranks == 1 or self._clock() < self._due_at:
            return
        self._due_at = self._clock() + max(1.0, num_ranks / _RANKS_PER_SECOND)
        self.append(
            {
                "step": step,
                "own_seconds": _rounded([one.own_seconds for one in self._since]),
                "data_wait_seconds": _rounded([one.data_wait_seconds for one in self._since]),
                "peak_bytes": [int(value) for value in figures.peak_bytes],
            }
        )
        self._since = []


def _rounded(values: list[Numbers]) -> list[float | None]:
    means = np.mean(values, axis=0)
    return [None if np.isnan(mean) else float(f"{mean:.4g}") for mean in means]


@dataclass(frozen=True)
class RankHistory:
    """The lines of ranks.jsonl as arrays of [line, rank]; NaN where a value is missing."""

    steps: list[int]
    own_seconds: Numbers
    data_wait_seconds: Numbers
    peak_bytes: Numbers

    @property
    def slowest_first(self) -> list[int]:
        """Ranks by their median own time in the newest lines; empty where these have no such times."""
        recent = self.own_seconds[-RECENT_LINES:]
        if np.isnan(recent).all():
            return []
        medians = np.median(np.where(np.isnan(recent), -1.0, recent), axis=0)
        return np.argsort(-medians, kind="stable").tolist()


def read_rank_times(run_dir: Path | str, *, max_lines: int = 2000) -> RankHistory:
    """The last `max_lines` well-formed lines with as many ranks as the last one; none where there is no file.

    Anything but a complete line is skipped.
    """
    rows = [row for line in last_lines(Path(run_dir) / RANKS_NAME, max_lines) if (row := _parse(line))]
    num_ranks = len(rows[-1]["peak_bytes"]) if rows else 0
    rows = [row for row in rows if all(len(row[name]) == num_ranks for name in _COLUMNS)]
    columns = [
        np.array([row[name] for row in rows], dtype=np.float64).reshape(len(rows), num_ranks)
        for name in _COLUMNS
    ]
    return RankHistory([row["step"] for row in rows], *columns)


_COLUMNS = ("own_seconds", "data_wait_seconds", "peak_bytes")


def _parse(line: bytes) -> dict[str, Any] | None:
    row = row_of_step(line)
    return row if row is not None and all(_is_numbers(row.get(name)) for name in _COLUMNS) else None


def _is_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values
    )
