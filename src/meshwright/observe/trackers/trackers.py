"""The trackers of a run, as rank 0 has them."""

import importlib.util
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

from meshwright.errors import SpecError
from meshwright.observe.metrics import StepMetrics
from meshwright.observe.scalars import tagged_scalars
from meshwright.observe.trackers.tracker import Ending, Row, TrackedRun
from meshwright.observe.trackers.tracker_process import TrackerProcess
from meshwright.observe.trackers.tracker_thread import TrackerThread
from meshwright.spec.observe import ObserveSpec

_PACKAGES = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}


def require_trackers(observe: ObserveSpec) -> None:
    """Refuse a tracker whose package is not installed."""
    for name, packages in _PACKAGES.items():
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if getattr(observe, name) is not None and missing:
            raise SpecError(
                f"observe.{name} needs {' and '.join(missing)}, not installed here",
                where=f"observe.{name}",
                hint=f'pip install "meshwright[{name}]", or set observe.{name}=null',
            )


class Trackers:
    """Sends each step's scalars to every tracker of a run. Use as a context; rank 0 only.

    No method waits for a tracker but the end of the context, which waits for a limited time.
    """

    def __init__(self, observe: ObserveSpec, run: TrackedRun, *, warn: Callable[[str], None]) -> None:
        """`warn` is called with what went wrong, from the thread that trains."""
        self._warn = warn
        self._ending: Ending = "failed"
        specs = {"wandb": observe.wandb, "mlflow": observe.mlflow}
        self._threads = [
            TrackerThread(name, run.run_dir, partial(TrackerProcess, name, spec, run))
            for name, spec in specs.items()
            if spec is not None
        ]

    def write(self, metrics: StepMetrics) -> None:
        """Send the figures of this step that are not None."""
        if not self._threads:
            return
        row = Row(metrics.step, time.time(), tagged_scalars(metrics))
        for thread in self._threads:
            thread.write(row)
        self._report()

    def end(self, ending: Ending) -> None:
        """Set how the run ended; without a call it has failed."""
        self._ending = ending

    def _report(self) -> None:
        for thread in self._threads:
            for text in thread.pop_warnings():
                self._warn(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for thread in self._threads:
            thread.close(self._ending)
        self._report()
