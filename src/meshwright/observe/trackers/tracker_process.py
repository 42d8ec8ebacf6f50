"""A tracker in a process of its own, and the end of it that rank 0 holds.

The package of a tracker takes seconds to import, starts threads, and waits for its server when the
interpreter exits. In another process none of this costs a step, and what hangs can be killed. Both sides
exchange one JSON value per line: the run, then lists of rows, then the ending; each is answered.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from meshwright.errors import RunError
from meshwright.observe.trackers.mlflow_run import MlflowRun
from meshwright.observe.trackers.tracker import Ending, Row, TrackedRun, Tracker
from meshwright.observe.trackers.wandb_run import WandbRun
from meshwright.spec.base import Spec
from meshwright.spec.observe import MlflowSpec, WandbSpec


class TrackerProcess:
    """Rank 0's end of a tracker in another process. `log` and `close` wait for its answer."""

    def __init__(self, name: str, spec: Spec, run: TrackedRun, run_id: str | None) -> None:
        log = run.run_dir / "trackers" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("a") as talk:  # whatever the package prints
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=talk,
                text=True,
                start_new_session=True,  # Ctrl-C is for the run, which then ends the tracker in order
            )
        self._start = {
            "tracker": name,
            "spec": spec.model_dump(mode="json"),
            "run": {**asdict(run), "run_dir": str(run.run_dir)},
            "run_id": run_id,
        }
        self.run_id = run_id or ""

    def open(self) -> None:
        """Wait until the tracker has the run."""
        self.run_id = str(self._exchange(self._start))

    def log(self, rows: Sequence[Row]) -> None:
        """Send the scalars of these steps."""
        self._exchange(rows)

    def close(self, ending: Ending) -> None:
        """Send the ending, and wait until the process is done."""
        self._exchange(ending)
        self._end()

    def kill(self) -> None:
        """End the process at once; whoever waits for its answer gets an error."""
        self._process.kill()

    def _exchange(self, value: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
        except (OSError, ValueError):
            raise RunError(f"its process ended with exit code {self._end()}") from None
        if "error" in answer:
            self._end()
            raise RunError(answer["error"])
        return answer["done"]

    def _end(self) -> int:
        """Wait for the process and close its pipes; returns its exit code."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):  # what is left in the buffer has no reader
            self._process.stdin.close()
        self._process.stdout.close()
        return self._process.wait()


def opened_tracker(start: dict[str, Any]) -> Tracker:
    """The tracker that a first line describes."""
    values = start["run"]
    run = TrackedRun(**{**values, "run_dir": Path(values["run_dir"])})
    if start["tracker"] == "wandb":
        return WandbRun(WandbSpec.model_validate(start["spec"]), run, start["run_id"])
    return MlflowRun(MlflowSpec.model_validate(start["spec"]), run, start["run_id"])


def serve(lines: Iterable[str], answers: TextIO) -> None:
    """Do what each line asks for, and answer it; ends with the lines."""

    def answer(**value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    ending: Ending = "failed"  # rank 0 was killed, unless it sends another one
    tracker: Tracker | None = None
    for value in map(json.loads, lines):
        if tracker is None:
            tracker = opened_tracker(value)
            answer(done=tracker.run_id)
        elif isinstance(value, list):
            tracker.log([Row(*row) for row in value])
            answer(done=None)
        else:
            ending = value
            break
    if tracker is not None:
        tracker.close(ending)
    answer(done=None)


def main() -> None:
    """Serve stdin; what the packages print goes to stderr. An error is the last answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        serve(sys.stdin, answers)
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        print(json.dumps({"error": text}), file=answers, flush=True)
        os._exit(1)  # handlers of the package might wait for its server


if __name__ == "__main__":
    main()
