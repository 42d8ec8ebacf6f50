"""One run directory that is watched: its files as they grow, and what the page shows of them."""

import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.observe.events import Event, events_path, read_events
from meshwright.observe.goodput import Goodput, goodput_of
from meshwright.observe.histograms import HISTOGRAMS_NAME, HistogramIndex
from meshwright.observe.metrics import METRICS_NAME
from meshwright.observe.rank_times import RECENT_LINES, RankHistory, read_rank_times
from meshwright.observe.run_files import RUN_NAME, read_yaml
from meshwright.observe.run_report import event_line
from meshwright.observe.summary import read_summary
from meshwright.observe.watch.columns import down_sample
from meshwright.observe.watch.histogram_view import histogram_view
from meshwright.observe.watch.liveness import Liveness, heartbeats_of, liveness
from meshwright.observe.watch.metrics_tail import MetricsTail
from meshwright.observe.watch.pipeline import read_timeline, timeline_path
from meshwright.observe.watch.predicted import Predicted, predicted

_MAX_EVENTS = 200
_MAX_OTHER_RANKS = 64
_OTHER_RANKS_KINDS = ("failure", "warning", "restart")
_HEAT_COLUMNS = 240
_RECENT_STEPS = 50


class WatchedRun:
    """The state of one run; one thread calls `poll`, any thread calls the others."""

    def __init__(self, run_dir: Path, label: str, *, on: str = "") -> None:
        self.run_dir, self.label, self._on = run_dir, label, on
        self.tail = MetricsTail(run_dir)
        self._lock = threading.Lock()
        self._run: dict[str, Any] = {}
        self._summary: dict[str, Any] = {}
        self._events: list[Event] = []
        self._ranks: RankHistory = read_rank_times(run_dir / "nothing")
        self._liveness = Liveness("waiting", "")
        self._predicted: Predicted | None = None
        self._timeline: dict[str, Any] | None = None
        self._histograms: HistogramIndex | None = None
        self._files = {
            run_dir / RUN_NAME: self._read_run,
            run_dir / "summary.json": self._read_summary,
            events_path(run_dir, 0): self._read_events,
            run_dir / "ranks.jsonl": self._read_ranks,
            timeline_path(run_dir): self._read_timeline,
            run_dir / HISTOGRAMS_NAME: self._read_histograms,
        }
        self._seen: dict[Path, tuple[int, int, int]] = {}
        self.version = 0
        """Increases with everything that the page shows."""

    def poll(self) -> bool:
        """Read what is new; whether the metrics have more to read at once."""
        with self._lock:
            is_changed = self.tail.read()
            for path, read in self._files.items():
                is_changed |= self._read_if_changed(path, read)
            found = liveness(heartbeats_of(self.run_dir), self._summary, has_rows=len(self.tail.columns) > 0)
            is_changed |= found != self._liveness
            self._liveness = found
            self.version += is_changed
        if self.tail.is_complete and self._predicted is None and self._run:
            self._predict()
        return not self.tail.is_complete

    def _read_if_changed(self, path: Path, read: Callable[[], None]) -> bool:
        try:
            status = path.stat()
        except OSError:
            return False
        seen = (status.st_ino, status.st_size, status.st_mtime_ns)
        if self._seen.get(path) == seen:
            return False
        self._seen[path] = seen
        read()
        return True

    def _read_run(self) -> None:
        _, self._run = read_yaml(self.run_dir / RUN_NAME)
        self._predicted = None

    def _read_summary(self) -> None:
        self._summary = read_summary(self.run_dir)

    def _read_ranks(self) -> None:
        self._ranks = read_rank_times(self.run_dir)

    def _read_timeline(self) -> None:
        self._timeline = read_timeline(self.run_dir)

    def _read_histograms(self) -> None:
        self._histograms = HistogramIndex(self.run_dir)

    def _read_events(self) -> None:
        found = read_events(events_path(self.run_dir, 0))
        for rank in range(1, _MAX_OTHER_RANKS):
            path = events_path(self.run_dir, rank)
            if not path.exists():
                break
            found += [event for event in read_events(path) if event["kind"] in _OTHER_RANKS_KINDS]
        self._events = sorted(found, key=lambda event: event["time"])

    def _predict(self) -> None:
        """Price the run, without the lock: it takes a second."""
        found = predicted(self.run_dir / RUN_NAME, self._device(), self._on)
        with self._lock:
            self._predicted = found
            self.version += 1

    def _device(self) -> str | None:
        recorded = [event.get("device") for event in self._events if event["kind"] == "start"]
        device = self._summary.get("device") or (recorded[-1] if recorded else None)
        return device if isinstance(device, str) else None

    # What the page asks for ---------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Everything but curves: state, newest figures, prediction, events."""
        with self._lock:
            columns = self.tail.columns
            latest = {name: columns.last(name) for name in columns.names}
            step = int(columns.steps[-1]) if len(columns) else None
            goodput = self._goodput()
            return {
                "name": self.label,
                "directory": str(self.run_dir),
                "subtitle": self._subtitle(),
                "state": self._liveness.state,
                "state_text": self._liveness.text,
                "step": step,
                "num_steps": self._num_steps(),
                "latest": latest,
                "eta_seconds": self._eta_seconds(step),
                "goodput": None if goodput is None else goodput.share,
                "goodput_causes": None if goodput is None else goodput.causes(),
                "predicted": asdict(self._predicted or Predicted()),
                "progress": self.tail.progress,
                "generation": self.tail.generation,
                "num_rows": len(columns),
                "num_histograms": 0 if self._histograms is None else len(self._histograms.steps),
                "version": self.version,
            }

    def curves(self, num_buckets: int, first: int | None, last: int | None) -> dict[str, Any]:
        """All columns between two steps, down-sampled, and the steps of checkpoints and resumes."""
        with self._lock:
            columns = self.tail.columns
            start = 0 if first is None else int(np.searchsorted(columns.steps, first))
            end = len(columns) if last is None else int(np.searchsorted(columns.steps, last, side="right"))
            steps = columns.steps[start:end]
            curves = {
                name: asdict(down_sample(steps, columns.values(name)[start:end], num_buckets))
                for name in columns.names
            }
            return {
                "generation": self.tail.generation,
                "num_rows": len(columns),
                "curves": curves,
                "marks": {kind: self._steps_of(kind) for kind in ("checkpoint", "resume", "overflow")},
            }

    def events(self) -> list[tuple[str, str, str]]:
        """(time, kind, sentence) of the newest events, the newest first."""
        with self._lock:
            shown = [event for event in self._events if event["kind"] != "time"]
            return [event_line(event) for event in shown[-_MAX_EVENTS:]][::-1]

    def timeline(self) -> dict[str, Any] | None:
        """The pipeline of the last profiled step, measured and predicted; None where there is none."""
        with self._lock:
            return self._timeline

    def histograms(
        self, *, kind: str, name: str, step: int | None, layer: int | None
    ) -> dict[str, Any] | None:
        """Magnitudes of a matmul by layer and over steps; None where the run has no histograms."""
        with self._lock:
            index = self._histograms
        return None if index is None else histogram_view(index, kind=kind, name=name, step=step, layer=layer)

    def heat_map(self) -> dict[str, Any]:
        """Own step time of each rank over time, the slowest rank first, and its newest memory."""
        with self._lock:
            ranks = self._ranks
        lines = (
            np.unique(np.linspace(0, len(ranks.steps) - 1, _HEAT_COLUMNS).astype(int)) if ranks.steps else []
        )
        order = ranks.slowest_first
        own = ranks.own_seconds[lines] if len(order) else np.empty((0, 0))
        recent = slice(-RECENT_LINES, None)
        return {
            "steps": [ranks.steps[line] for line in lines],
            "order": order,
            "own_seconds": [_numbers(own[:, rank]) for rank in order],
            "medians": [_number(np.median(ranks.own_seconds[recent, rank])) for rank in order],
            "data_wait_seconds": [
                _number(np.median(ranks.data_wait_seconds[recent, rank])) for rank in order
            ],
            "peak_bytes": ranks.peak_bytes[-1].tolist() if ranks.steps else [],
        }

    def _goodput(self) -> Goodput | None:
        """Where the wall time went, up to the newest step in the metrics."""
        own = [event for event in self._events if event.get("rank", 0) == 0]
        try:
            until = (self.run_dir / METRICS_NAME).stat().st_mtime
        except OSError:
            until = None
        return goodput_of(own, until=until)

    def _steps_of(self, kind: str) -> list[int]:
        steps = {event.get("step") for event in self._events if event["kind"] == kind}
        return sorted(step for step in steps if isinstance(step, int))[-300:]

    def _num_steps(self) -> int | None:
        schedule = self._run.get("schedule")
        found = schedule.get("num_steps") if isinstance(schedule, dict) else None
        return found if isinstance(found, int) else None

    def _eta_seconds(self, step: int | None) -> float | None:
        """Steps that are left x the median time of recent ones; None unless the run goes on."""
        total = self._num_steps()
        columns = self.tail.columns
        if (
            self._liveness.state != "running"
            or not total
            or step is None
            or "step_seconds" not in columns.names
        ):
            return None
        recent = columns.values("step_seconds")[-_RECENT_STEPS:]
        recent = recent[np.isfinite(recent)]
        return float(np.median(recent)) * max(0, total - step) if len(recent) else None

    def _subtitle(self) -> str:
        model = self._run.get("model")
        family = model.get("family") if isinstance(model, dict) else None
        parallel = self._run.get("parallel")
        axes = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
        degrees = parallel if isinstance(parallel, dict) else {}
        layout = [f"{axis}={degrees[axis]}" for axis in axes if degrees.get(axis, 1) != 1]
        zero = [f"zero={degrees['zero']}"] if degrees.get("zero") else []
        return " · ".join(filter(None, [str(family or ""), " ".join(layout + zero), self._device() or ""]))


def _number(value: Any) -> float | None:
    return float(f"{value:.5g}") if np.isfinite(value) else None


def _numbers(values: np.ndarray) -> list[float | None]:
    return [_number(value) for value in values]
