"""The runs that are watched, and the thread that reads them."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from meshwright.errors import DataError
from meshwright.observe.metrics import METRICS_NAME
from meshwright.observe.run_files import RUN_NAME, require_run
from meshwright.observe.watch.watched_run import WatchedRun

POLL_SECONDS = 0.5
MAX_RUNS = 24


class WatchedRuns:
    """Runs that a thread of their own keeps up to date. Use as a context."""

    def __init__(self, run_dirs: Sequence[Path], *, on: str = "", poll_seconds: float = POLL_SECONDS) -> None:
        labels = _labels(run_dirs)
        self.runs = [WatchedRun(path, label, on=on) for path, label in zip(run_dirs, labels, strict=True)]
        self._poll_seconds = poll_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="watch", daemon=True)

    @property
    def version(self) -> int:
        """Increases with everything that the page shows."""
        return sum(run.version for run in self.runs)

    def _follow(self) -> None:
        while not self._stop.is_set():
            has_more = [run.poll() for run in self.runs]
            self._stop.wait(0.0 if any(has_more) else self._poll_seconds)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The run directories that were named, and those inside of named folders, the newest first.

    DataError where there is none, and where there are more than MAX_RUNS.
    """
    found: list[Path] = []
    for folder in folders:
        inside = sorted(_runs_inside(folder), key=lambda path: -path.stat().st_mtime)
        if not inside:
            require_run(folder)  # says what is wrong with it
        found += inside or [folder]
    unique = list({path.resolve(): path for path in found}.values())
    if len(unique) > MAX_RUNS:
        raise DataError(
            f"{len(unique)} runs are too many for one page: {MAX_RUNS} at most",
            where=str(folders[0]),
            hint="name the run directories that you want to see",
        )
    return unique


def _runs_inside(folder: Path) -> list[Path]:
    if not folder.is_dir() or any((folder / name).is_file() for name in (RUN_NAME, METRICS_NAME)):
        return []
    return [path.parent for path in folder.glob(f"*/{RUN_NAME}")]


def _labels(run_dirs: Sequence[Path]) -> list[str]:
    """The names of the directories, with as much of their paths as makes them different."""
    names = [path.resolve().name for path in run_dirs]
    return [name if names.count(name) == 1 else str(path) for name, path in zip(names, run_dirs, strict=True)]
