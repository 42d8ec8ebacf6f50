"""Faults of live runs whose supervisor restarts the ranks: what was done, how long it took, what was lost."""

import json
import math
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.live_runs import LONGEST_SECONDS, ranks_of, wait_for

GIL_SIGNAL = signal.SIGWINCH
"""A rank that gets it holds the GIL for ever, in a run that was started with `gil_environment`."""
# The regular expression backtracks for ages inside C code, without giving the GIL to another thread.
_SITE = f"""
import re, signal
signal.signal({int(GIL_SIGNAL)}, lambda *_: re.match(r"(a+)+b", "a" * 64))
"""


@dataclass(frozen=True)
class Trial:
    """One fault, and what became of the run."""

    fault: str
    lost_steps: int
    detect_seconds: float
    """From the fault until all ranks of the attempt have ended."""
    resume_seconds: float
    """From the fault to the end of the first step after it; NaN where the next fault came before it."""


def gil_environment(folder: Path) -> dict[str, str]:
    """The environment of a run in which GIL_SIGNAL makes a rank hold the GIL."""
    (folder / "sitecustomize.py").write_text(_SITE)
    return {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The events of rank 0 of one kind."""
    path = run_dir / "events-0.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in found if event["kind"] == kind]


def kill_one(launcher: subprocess.Popen[str], rng: random.Random) -> None:
    """kill -9 of a random rank."""
    rng.choice(ranks_of(launcher)).kill()


def kill_all(launcher: subprocess.Popen[str], rng: random.Random) -> None:
    """kill -9 of all ranks."""
    for rank in ranks_of(launcher):
        rank.kill()


def stop_one(launcher: subprocess.Popen[str], rng: random.Random) -> None:
    """SIGSTOP of a random rank."""
    rng.choice(ranks_of(launcher)).suspend()


def hold_gil(launcher: subprocess.Popen[str], rng: random.Random) -> None:
    """A random rank holds the GIL for ever."""
    rng.choice(ranks_of(launcher)).send_signal(GIL_SIGNAL)


Fault = Callable[[subprocess.Popen[str], random.Random], None]


def disturb(launcher: subprocess.Popen[str], run_dir: Path, fault: Fault, rng: random.Random) -> Trial:
    """Do something to a run that trains, and wait until it trains again."""
    restarts = len(events(run_dir, "restart"))
    disturbed_at = time.time()
    fault(launcher, rng)
    wait_for(lambda: len(events(run_dir, "restart")) > restarts, launcher)
    restart = events(run_dir, "restart")[-1]
    wait_for(lambda: _is_training_since(run_dir, restart["time"]), launcher)
    return Trial(
        fault=fault.__name__,
        lost_steps=restart["lost_steps"],
        detect_seconds=restart["failed_at"] - disturbed_at,
        resume_seconds=time.time() - disturbed_at,
    )


def kill_in_a_row(
    launcher: subprocess.Popen[str], run_dir: Path, rng: random.Random, *, count: int
) -> list[Trial]:
    """Kill ranks at random moments of a start, load, step or save, without waiting for the next step."""
    trials: list[Trial] = []
    for _ in range(count):
        restarts = len(events(run_dir, "restart"))
        wait_for(lambda: len(ranks_of(launcher)) == 2, launcher)
        time.sleep(rng.uniform(0.0, 1.2))
        fault, disturbed_at = rng.choice([kill_one, kill_all]), time.time()
        fault(launcher, rng)
        wait_for(lambda before=restarts: len(events(run_dir, "restart")) > before, launcher)
        restart = events(run_dir, "restart")[-1]
        seconds = restart["failed_at"] - disturbed_at
        trials.append(Trial(f"{fault.__name__} at any time", restart["lost_steps"], seconds, math.nan))
    return trials


def _is_training_since(run_dir: Path, at: float) -> bool:
    """Whether a step has ended since then: rank 0 began again, and wrote metrics afterwards."""
    began = [event["time"] for kind in ("start", "resume") for event in events(run_dir, kind)]
    metrics = run_dir / "metrics.jsonl"
    return max(began, default=0.0) > at and metrics.exists() and metrics.stat().st_mtime > max(began)


def finish(launcher: subprocess.Popen[str]) -> str:
    """Wait for the end of a run that must complete; returns what it printed."""
    _, printed = launcher.communicate(timeout=LONGEST_SECONDS)
    assert launcher.returncode == 0, printed
    return printed


def table(trials: Iterable[Trial]) -> str:
    """One line per kind of fault: trials, lost steps, seconds to detect and to resume (median, largest)."""
    by_fault: dict[str, list[Trial]] = {}
    for trial in trials:
        by_fault.setdefault(trial.fault, []).append(trial)
    lines = [f"{'fault':20} trials  survived  lost steps (mean, max)  detect s (median, max)  resume s"]
    for fault, found in by_fault.items():
        lost = [trial.lost_steps for trial in found]
        detect = sorted(trial.detect_seconds for trial in found)
        resume = sorted(trial.resume_seconds for trial in found)
        middle = len(found) // 2
        lines.append(
            f"{fault:20} {len(found):6}  {len(found):8}  {sum(lost) / len(lost):9.1f} {max(lost):12}  "
            f"{detect[middle]:11.1f} {detect[-1]:10.1f}  {resume[middle]:8.1f} {resume[-1]:5.1f}"
        )
    return "\n".join(lines)
