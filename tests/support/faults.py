"""Faults of live runs whose supervisor restarts the ranks, and what must be true of a run afterwards.

All of these runs are the same small one (`RUN`), so one run that nothing happens to is the reference of all.
"""

import itertools
import json
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
from tests.support.fault_table import Trial
from tests.support.live_runs import (
    LONGEST_SECONDS,
    SMALL,
    HasFinished,
    Launcher,
    kill_with_ranks,
    newest_step,
    ranks_of,
    start,
    wait_for,
    wait_for_checkpoint,
)
from tests.support.run_directories import assert_same_state

from meshwright.checkpoint.load import complete_checkpoints, read_manifest, verify_files
from meshwright.errors import MeshwrightError
from meshwright.observe.metrics import last_step, read_metrics

NUM_STEPS = 200
TIMEOUT = 5
"""Seconds after which a rank that makes no progress in a step is ended."""
RUN = (
    *(*SMALL, f"schedule.num_steps={NUM_STEPS}", "checkpoint.every_steps=5", "checkpoint.keep_last=3"),
    *(f"resilience.step_timeout_seconds={TIMEOUT}", "resilience.save_timeout_seconds=20"),
    # Starts without progress are no fault of a run that is killed every second.
    *("resilience.start_timeout_seconds=120", "resilience.restart.max_cycles_without_progress=1000"),
    *("resilience.restart.max_restarts=10000", "resilience.restart.max_backoff_seconds=0"),
)
NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens", "eval_loss")
GIL_SIGNAL = signal.SIGWINCH
"""A rank that gets it holds the GIL for ever, in a run that was started with `gil_environment`."""
# The regular expression backtracks for ages inside C code, without giving the GIL to another thread.
_SITE = f"""
import re, signal
signal.signal({int(GIL_SIGNAL)}, lambda *_: re.match(r"(a+)+b", "a" * 64))
"""
Fault = Callable[[Launcher, Path, random.Random], Trial]
"""Does something to the run in a directory; returns when its effect is known. HasFinished where the run has
ended before, so that nothing was tried."""


def gil_environment(folder: Path) -> dict[str, str]:
    """The environment of a run in which GIL_SIGNAL makes a rank hold the GIL."""
    (folder / "sitecustomize.py").write_text(_SITE)
    return {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}


def all_events(run_dir: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The events of a rank, in their order."""
    path = run_dir / f"events-{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The events of rank 0 of one kind."""
    return [event for event in all_events(run_dir) if event["kind"] == kind]


def is_training(run_dir: Path) -> bool:
    """Whether a step has ended since the last restart."""
    found = all_events(run_dir)
    restarts = [number for number, event in enumerate(found) if event["kind"] == "restart"]
    since = found[restarts[-1] :] if restarts else found
    began = [event for event in since if event["kind"] in ("start", "resume")]
    return bool(began) and last_step(run_dir) > began[-1].get("step", 0)


def survive(
    faults: Sequence[Fault],
    folder: Path,
    undisturbed: Path,
    *,
    rng: random.Random,
    env: dict[str, str] | None = None,
    place: Callable[[Path], AbstractContextManager[object]] | None = None,
    report: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """Do all of these to a run, one after the other; where it finishes before, the next ones to another run.

    Every one of these runs must end by itself and equal the undisturbed one. `place` prepares the run
    directory before the start; `report` is called after each trial.
    """
    left, trials = list(faults), list[Trial]()
    for number in itertools.count():
        run_dir = folder / f"run-{number}"
        run_dir.mkdir(parents=True)
        with place(run_dir) if place else nullcontext():
            with start(RUN, run_dir, env=env) as launcher, _killed_at_the_end(launcher):
                with suppress(HasFinished):
                    wait_for_checkpoint(run_dir, launcher)
                    while left:
                        trials.append(left[0](launcher, run_dir, rng))
                        report(trials[-1])
                        del left[0]
                finish(launcher)
            assert_undisturbed(run_dir, undisturbed)
        if not left:
            return trials
    raise AssertionError


@contextmanager
def _killed_at_the_end(launcher: Launcher) -> Iterator[None]:
    try:
        yield
    finally:
        kill_with_ranks(launcher)


def finish(launcher: Launcher) -> str:
    """Wait for the end of a run that must complete; returns what it printed."""
    _, printed = launcher.communicate(timeout=LONGEST_SECONDS)
    assert launcher.returncode == 0, printed
    return printed


def assert_undisturbed(run_dir: Path, undisturbed: Path) -> None:
    """Equal to the run that nothing happened to: weights, optimizer and data position bitwise. No step is
    missing or twice, and each has the numbers that only its own samples give. All checkpoints open."""
    for folder in complete_checkpoints(run_dir / "checkpoints"):
        verify_files(folder, read_manifest(folder))
    assert_same_state(run_dir, undisturbed)
    rows, expected = read_metrics(run_dir), read_metrics(undisturbed)
    assert [row["step"] for row in rows] == list(range(1, len(expected) + 1))
    assert [[row.get(name) for name in NUMBERS] for row in rows] == [
        [row.get(name) for name in NUMBERS] for row in expected
    ]


def require_newest_opens(run_dir: Path) -> None:
    """The newest published checkpoint of a run that goes on is intact; one deleted since was not it."""
    while True:
        before = newest_step(run_dir)
        folder = run_dir / "checkpoints" / f"step-{before:08d}"
        try:
            return verify_files(folder, read_manifest(folder))
        except (OSError, MeshwrightError):
            if newest_step(run_dir) == before:
                raise


def kill_one(launcher: Launcher, run_dir: Path, rng: random.Random) -> Trial:
    """kill -9 of a random rank, at a random moment of a start, load, step or save."""
    return _killed(launcher, run_dir, rng, "kill -9 of one rank")


def kill_all(launcher: Launcher, run_dir: Path, rng: random.Random) -> Trial:
    """kill -9 of all ranks, at a random moment of a start, load, step or save."""
    return _killed(launcher, run_dir, rng, "kill -9 of all ranks")


def _killed(launcher: Launcher, run_dir: Path, rng: random.Random, fault: str) -> Trial:
    """In half of the trials the next fault comes at once, before the run trains again."""
    wait_for(lambda: len(ranks_of(launcher)) == 2, launcher)
    time.sleep(rng.uniform(0.0, 0.3 if is_training(run_dir) else 1.2))
    moment = "in a step or save" if is_training(run_dir) else "in a start or load"
    ranks = ranks_of(launcher)
    chosen = ranks if fault.endswith("all ranks") else rng.sample(ranks, k=min(1, len(ranks)))
    waits = rng.random() < 0.5
    return restarted(launcher, run_dir, f"{fault}, {moment}", lambda: _signal(chosen, 9), waits=waits)


def stop_one(launcher: Launcher, run_dir: Path, rng: random.Random) -> Trial:
    """SIGSTOP of a random rank that trains."""
    return _hung(launcher, run_dir, rng, f"SIGSTOP of one rank, timeout {TIMEOUT} s", signal.SIGSTOP)


def hold_gil(launcher: Launcher, run_dir: Path, rng: random.Random) -> Trial:
    """A random rank that trains holds the GIL for ever."""
    return _hung(launcher, run_dir, rng, f"one rank holds the GIL, timeout {TIMEOUT} s", GIL_SIGNAL)


def _hung(launcher: Launcher, run_dir: Path, rng: random.Random, fault: str, number: int) -> Trial:
    wait_for(lambda: is_training(run_dir), launcher)
    time.sleep(rng.uniform(0.0, 0.3))
    chosen = rng.sample(ranks_of(launcher), k=1)
    return restarted(launcher, run_dir, fault, lambda: _signal(chosen, number))


def _signal(ranks: Sequence[psutil.Process], number: int) -> None:
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(number)


def restarted(
    launcher: Launcher,
    run_dir: Path,
    fault: str,
    action: Callable[[], None],
    *,
    waits: bool = True,
    opens: bool = True,
) -> Trial:
    """Do something that makes the supervisor restart the ranks.

    With `waits`, wait until the run trains again; with `opens`, the newest checkpoint must open right after
    the fault.
    """
    num_restarts = len(events(run_dir, "restart"))
    disturbed_at = time.monotonic()
    action()
    wait_for(lambda: len(events(run_dir, "restart")) > num_restarts, launcher)
    detected_at, restart = time.monotonic(), events(run_dir, "restart")[num_restarts]
    if opens:
        require_newest_opens(run_dir)
    resume_seconds = math.nan
    if waits:
        with suppress(HasFinished):  # it had only its last steps to repeat
            wait_for(lambda: is_training(run_dir), launcher)
        resume_seconds = time.monotonic() - disturbed_at
    return Trial(fault, restart["lost_steps"], detected_at - disturbed_at, resume_seconds)
