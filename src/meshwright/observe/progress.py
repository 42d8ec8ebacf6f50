"""Progress of a run on stderr: a live bar on a terminal, a plain line every few seconds elsewhere."""

import math
import sys
import time
from collections import deque
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from meshwright.observe.metrics import StepMetrics
from meshwright.units import show_count, show_seconds

# The ETA follows the median of this many last steps.
_ETA_STEPS = 50
# Columns of the bar and of the spaces around it on a narrow terminal.
_SMALLEST_BAR = 10


class ProgressView(Protocol):
    """The interface of both forms. Rank 0 has one; it never uses a device."""

    def update(self, metrics: StepMetrics) -> None:
        """Show this step."""
        ...

    def print(self, text: str) -> None:
        """Print one line, above the bar."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def open_progress(
    name: str,
    *,
    total_steps: int,
    counted: str = "tokens",
    every_seconds: float = 10.0,
    stream: TextIO | None = None,
    quiet: bool = False,
) -> ProgressView:
    """A live bar when the stream (stderr) is a terminal, else a plain line every `every_seconds`.

    `quiet` shows nothing.
    """
    if quiet:
        return NoProgress()
    out: TextIO = sys.stderr if stream is None else stream
    if Console(file=out).is_terminal:
        return LiveProgress(name, total_steps=total_steps, counted=counted, stream=out)
    return PlainProgress(
        name, total_steps=total_steps, counted=counted, every_seconds=every_seconds, stream=out
    )


class _Eta:
    """Seconds left, from the median duration of the last steps; the first one compiles and warms up."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._recent: deque[float] | None = None

    def after(self, metrics: StepMetrics) -> float | None:
        """Seconds left; None while there is no estimate."""
        steps_left = max(0, self._total_steps - metrics.step)
        if self._recent is None:
            self._recent = deque(maxlen=_ETA_STEPS)
            return None if steps_left else 0.0
        self._recent.append(metrics.step_seconds)
        return sorted(self._recent)[len(self._recent) // 2] * steps_left


def _facts(metrics: StepMetrics, eta_seconds: float | None, counted: str) -> list[str]:
    rate = metrics.tokens_per_second
    parts = [f"loss {metrics.loss:.4f}" if math.isfinite(metrics.loss) else f"loss {metrics.loss}"]
    parts += [f"{show_count(float(f'{rate:.3g}'))} {counted}/s"] if rate else []
    parts += [f"MFU {metrics.mfu:.1%}"] if metrics.mfu is not None else []
    if eta_seconds is None:
        return parts
    return [*parts, f"ETA {show_seconds(eta_seconds)}" if eta_seconds else "done"]


class NoProgress:
    """Shows nothing (`--quiet`)."""

    def update(self, metrics: StepMetrics) -> None:
        """Show nothing of this step."""

    def print(self, text: str) -> None:
        """Print nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


class LiveProgress:
    """A progress bar that is redrawn in place."""

    def __init__(self, name: str, *, total_steps: int, counted: str = "tokens", stream: TextIO) -> None:
        self._name, self._total_steps = name, total_steps
        self._eta, self._counted = _Eta(total_steps), counted
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            # On a narrow terminal the bar shrinks, and the count stays.
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[facts]}"),
            console=Console(file=stream, highlight=False),
            expand=True,
        )
        self._task = self._progress.add_task(self._shown_name(), total=total_steps, facts="starting")

    def _shown_name(self) -> str:
        """The name of the run, in at most a quarter of the terminal as it is now."""
        room = self._progress.console.width // 4
        return self._name if len(self._name) <= room else self._name[: room - 3] + "..."

    def update(self, metrics: StepMetrics) -> None:
        """Move the bar to this step."""
        name, facts = self._shown_name(), _facts(metrics, self._eta.after(metrics), self._counted)
        others = len(name) + 2 * len(str(self._total_steps)) + _SMALLEST_BAR
        while len(facts) > 1 and len("  ".join(facts)) > self._progress.console.width - others:
            facts.pop()
        self._progress.update(self._task, description=name, completed=metrics.step, facts="  ".join(facts))

    def refresh(self) -> None:
        """Redraw the bar now; otherwise that happens ten times a second."""
        self._progress.refresh()

    def print(self, text: str) -> None:
        """Print one line above the bar."""
        self._progress.console.print(text, markup=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class PlainProgress:
    """Plain lines without control characters, for log files and pipes."""

    def __init__(
        self, name: str, *, total_steps: int, counted: str = "tokens", every_seconds: float, stream: TextIO
    ) -> None:
        self._name, self._counted = name, counted
        self._total_steps = total_steps
        self._every_seconds = every_seconds
        self._stream = stream
        self._eta = _Eta(total_steps)
        self._last_line_at = -math.inf
        self._unshown: str | None = None

    def update(self, metrics: StepMetrics) -> None:
        """Print a line for the first step, the last one, and when the previous line is old enough."""
        facts = ", ".join(_facts(metrics, self._eta.after(metrics), self._counted))
        line = f"{self._name}: step {metrics.step}/{self._total_steps}, {facts}"
        now = time.monotonic()
        if metrics.step < self._total_steps and now - self._last_line_at < self._every_seconds:
            self._unshown = line
            return
        self._last_line_at, self._unshown = now, None
        self.print(line)

    def print(self, text: str) -> None:
        """Print one line, after the line of the step at which it is printed."""
        step, self._unshown = self._unshown, None
        print(f"{step}\n{text}" if step else text, file=self._stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The step at which the run stopped is always printed."""
        last, self._unshown = self._unshown, None
        if last:
            self.print(last)
