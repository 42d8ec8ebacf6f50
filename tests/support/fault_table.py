"""The table of faults: what was done to runs, how many survived, what it cost.

Tests call `record` for each trial. The table at the end of `make test` and `make soak` is made of their
reports, so it is complete with several test processes too. With MESHWRIGHT_TEST_TRIALS_FILE=FILE the trials
are appended to a file, and `python -m tests.support.fault_table FILE` prints the table of many sessions.
"""

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROPERTY = "fault trial"
_COLUMNS = ("fault", "trials", "survived", "lost steps", "seconds to detect", "seconds to resume")


@dataclass(frozen=True)
class Trial:
    """One fault, and what became of the run."""

    fault: str
    lost_steps: int | None = 0
    """Steps that were trained once more; None where they were not counted."""
    detect_seconds: float = math.nan
    """From the fault until all ranks of the attempt have ended, or until the run has reported it."""
    resume_seconds: float = math.nan
    """From the fault to the end of the first step after it; for a disk, a store or a network, from its repair
    to the next checkpoint or step there. NaN where the next fault came before, or nothing was resumed."""
    survived: bool = True
    """Whether the test that made the trial has passed."""


def record(item: Any, trial: Trial) -> None:
    """Add a trial to the report of a test: `item` is `request.node`."""
    item.user_properties.append((PROPERTY, json.dumps(asdict(trial))))


def recorded(reports: Iterable[Any]) -> list[Trial]:
    """The trials in the reports of a session; those of a test that failed have not survived."""
    found: list[Trial] = []
    for report in reports:
        for name, text in getattr(report, "user_properties", ()):
            if name == PROPERTY and report.when == "call":
                found.append(Trial(**json.loads(text) | {"survived": report.outcome == "passed"}))
    return found


def table(trials: Iterable[Trial]) -> str:
    """A Markdown table with one line per fault; pairs of numbers are mean or median, and largest."""
    by_fault: dict[str, list[Trial]] = {}
    for trial in trials:
        by_fault.setdefault(trial.fault, []).append(trial)
    rows = [_COLUMNS, *(_row(fault, found) for fault, found in by_fault.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    ruler = "-|-".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in (lines[0], ruler, *lines[1:]))


def _row(fault: str, trials: list[Trial]) -> tuple[str, ...]:
    lost = [trial.lost_steps for trial in trials if trial.lost_steps is not None]
    return (
        fault,
        str(len(trials)),
        str(sum(trial.survived for trial in trials)),
        f"mean {sum(lost) / len(lost):.1f}, max {max(lost)}" if lost else "-",
        _median_and_largest([trial.detect_seconds for trial in trials]),
        _median_and_largest([trial.resume_seconds for trial in trials]),
    )


def _median_and_largest(seconds: Sequence[float]) -> str:
    known = sorted(one for one in seconds if not math.isnan(one))
    if not known:
        return "-"
    return f"{known[len(known) // 2]:.1f}" + (f", max {known[-1]:.1f}" if len(known) > 1 else "")


def append_to_file(trials: Iterable[Trial]) -> None:
    """Append the trials, with the load of the machine, to the file in MESHWRIGHT_TEST_TRIALS_FILE."""
    name = os.environ.get("MESHWRIGHT_TEST_TRIALS_FILE")
    if name:
        load = round(os.getloadavg()[2], 1)
        with Path(name).open("a") as file:
            file.writelines(json.dumps({**asdict(trial), "load": load}) + "\n" for trial in trials)


def _read(names: Sequence[str]) -> list[Trial]:
    lines = [json.loads(line) for name in names for line in Path(name).read_text().splitlines()]
    return [Trial(**{key: value for key, value in line.items() if key != "load"}) for line in lines]


if __name__ == "__main__":
    print(table(sorted(_read(sys.argv[1:]), key=lambda trial: trial.fault)))
