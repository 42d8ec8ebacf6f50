"""Hands rows to a tracker from a thread: no step waits for it, and no error of it ends the run."""

import json
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from meshwright.observe.trackers.tracker import Ending, Row, Tracker


class RemoteTracker(Tracker, Protocol):
    """A tracker that can be given up."""

    def open(self) -> None:
        """Wait until the tracker has the run."""
        ...

    def kill(self) -> None:
        """End it at once; whoever waits for it gets an error."""
        ...


StartTracker = Callable[[str | None], RemoteTracker]
"""Starts a tracker without waiting; takes the identity of the run where it is known already."""

_MAX_WAITING_ROWS = 10_000
_BATCH_SECONDS = 1.0
CLOSE_SECONDS: dict[Ending, float] = {"finished": 60.0, "interrupted": 20.0, "failed": 5.0}
"""A run waits at most this long for a tracker at its end; after a failure a restart may be near."""


class TrackerThread:
    """Hands rows to a tracker, and remembers in `<run>/trackers/<name>.json` what it has taken.

    A resumed run continues the same run of the tracker. Steps that it repeats were sent before, and are
    not sent again.
    """

    def __init__(self, name: str, run_dir: Path, start_tracker: StartTracker) -> None:
        self.name = name
        self._path = run_dir / "trackers" / f"{name}.json"
        self._memory = self._recall()
        self._tracker = start_tracker(self._memory.get("run_id"))
        self._rows: queue.Queue[Row | Ending] = queue.Queue(maxsize=_MAX_WAITING_ROWS)
        self._warnings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._num_dropped = 0
        self._has_failed = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        """Take in the scalars of one step; never waits."""
        if self._has_failed:
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._num_dropped += 1

    def close(self, ending: Ending) -> None:
        """Wait until the tracker has everything, `CLOSE_SECONDS` at most."""
        timeout_seconds = CLOSE_SECONDS[ending]
        if self._num_dropped:
            self._warnings.put(f"{self.name} was too slow: {self._num_dropped} steps were not sent")
        with suppress(queue.Full):
            self._rows.put(ending, timeout=0 if self._has_failed else timeout_seconds)
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            self._has_failed = True
            self._warnings.put(
                f"{self.name} did not end within {timeout_seconds:g} s; the run ends without it"
            )
            self._tracker.kill()

    def pop_warnings(self) -> list[str]:
        """What went wrong since the last call."""
        found: list[str] = []
        while not self._warnings.empty():
            found.append(self._warnings.get())
        return found

    def _work(self) -> None:
        try:
            self._serve()
        except Exception as error:  # whatever it is, the run goes on
            if self._has_failed:
                return
            self._has_failed = True
            text = " ".join(str(error).split()) or type(error).__name__
            self._warnings.put(f"{self.name} failed, and the run goes on without it: {text}")

    def _serve(self) -> None:
        tracker = self._tracker
        tracker.open()
        memory = {"run_id": tracker.run_id, "logged_step": self._memory.get("logged_step", 0)}
        self._remember(memory)
        ending: Ending | None = None
        while ending is None:
            rows, ending = self._next_rows()
            rows = [row for row in rows if row.step > memory["logged_step"]]
            if rows:
                tracker.log(rows)
                memory["logged_step"] = rows[-1].step
                self._remember(memory)
        tracker.close(ending)

    def _next_rows(self) -> tuple[list[Row], Ending | None]:
        """Rows of about a second, or up to the ending."""
        rows: list[Row] = []
        until = time.monotonic() + _BATCH_SECONDS
        while (left := until - time.monotonic()) > 0:
            try:
                item = self._rows.get(timeout=left)
            except queue.Empty:
                break
            if isinstance(item, str):
                return rows, item
            rows.append(item)
        return rows, None

    def _recall(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        is_sound = isinstance(found, dict) and isinstance(found.get("run_id"), str)
        return found if is_sound and isinstance(found.get("logged_step"), int) else {}

    def _remember(self, memory: dict[str, Any]) -> None:
        self._path.parent.mkdir(exist_ok=True)
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps(memory) + "\n")
        draft.replace(self._path)
