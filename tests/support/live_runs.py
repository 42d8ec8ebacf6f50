"""Small runs on two ranks, started as a user starts them: as processes that can be signalled and killed."""

import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

LONGEST_SECONDS = 300
POLL_SECONDS = 0.02
SMALL = (
    *("train", "demo", "parallel.dp_replicate=2", "model.num_layers=1", "model.width=32"),
    *("model.attention.num_heads=2", "data.sequence_length=32"),
)
ENDLESS = (*SMALL, "schedule.num_steps=100000", "observe.every_steps=5000", "checkpoint.every_steps=10")


class HasFinished(Exception):
    """The run has ended with code 0 before what the test waits for."""


class Launcher(subprocess.Popen[str]):
    """A command whose stderr goes to a file in memory: it never waits for a reader of what it prints."""

    def __init__(self, command: Sequence[str], *, env: dict[str, str] | None = None) -> None:
        self._output = os.memfd_create("stderr")
        weakref.finalize(self, os.close, self._output)
        super().__init__(command, stderr=self._output, text=True, start_new_session=True, env=env)

    @property
    def printed(self) -> str:
        """What was printed to stderr so far."""
        content = os.pread(self._output, os.fstat(self._output).st_size, 0)
        return content.decode(errors="replace")

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[Any, str]:
        """Wait for the end; returns None and what was printed to stderr."""
        self.wait(timeout)
        return None, self.printed


def start(
    words: Sequence[str], run_dir: Path, *, launcher: Sequence[str] = (), env: dict[str, str] | None = None
) -> Launcher:
    """`python [launcher] -m meshwright <words> --dir DIR`, in a process group of its own."""
    command = [sys.executable, *launcher, "-m", "meshwright", *words, "--dir", str(run_dir)]
    return Launcher(command, env=env)


@contextmanager
def training(run_dir: Path, *words: str, launcher: Sequence[str] = ()) -> Iterator[Launcher]:
    """An endless run with both ranks past their first steps; everything that is left of it is killed."""
    with start((*ENDLESS, *words), run_dir, launcher=launcher) as process:
        try:
            wait_for_checkpoint(run_dir, process)
            yield process
        finally:
            kill_with_ranks(process)


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks that a launcher has started, in their order."""
    try:
        return sorted(psutil.Process(launcher.pid).children(), key=lambda process: process.pid)
    except psutil.NoSuchProcess:
        return []


def kill_with_ranks(launcher: subprocess.Popen[str]) -> None:
    """Kill a launcher and what it has started, and wait until all of them have ended."""
    ranks = ranks_of(launcher)
    launcher.kill()
    for rank in ranks:
        try:
            rank.kill()
        except psutil.NoSuchProcess:
            continue
    launcher.wait()
    psutil.wait_procs(ranks, timeout=LONGEST_SECONDS)


def wait_for(found: Callable[[], object], process: Launcher | None = None) -> None:
    """Wait until something is found, as long as the process lives. HasFinished where it has ended well."""
    deadline = time.monotonic() + LONGEST_SECONDS
    while not found():
        printed = process.printed if process and time.monotonic() > deadline else ""
        assert time.monotonic() < deadline, f"not within {LONGEST_SECONDS} s: {printed}"
        if process is not None and process.poll() is not None and not found():
            if process.returncode == 0:
                raise HasFinished
            raise AssertionError(f"exit code {process.returncode}: {process.printed}")
        time.sleep(POLL_SECONDS)


def wait_for_checkpoint(run_dir: Path, process: Launcher, *, step: int = 1) -> None:
    """Wait until a checkpoint of this step or a later one is complete; they are written in the background."""
    wait_for(lambda: newest_step(run_dir) >= step, process)


def newest_step(run_dir: Path) -> int:
    """The step of the newest complete checkpoint; 0 without any."""
    found = run_dir.glob("checkpoints/step-*/manifest.json")
    return max((int(path.parent.name[5:]) for path in found), default=0)


def last_event(run_dir: Path, rank: int = 0) -> dict[str, Any]:
    """The last event of a rank."""
    return json.loads((run_dir / f"events-{rank}.jsonl").read_text().splitlines()[-1])
