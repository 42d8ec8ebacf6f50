"""Small runs on two ranks, started as a user starts them: as processes that can be signalled and killed."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

LONGEST_SECONDS = 300
SMALL = (
    *("train", "demo", "parallel.dp_replicate=2", "model.num_layers=1", "model.width=32"),
    *("model.attention.num_heads=2", "data.sequence_length=32"),
)
ENDLESS = (*SMALL, "schedule.num_steps=100000", "observe.every_steps=5000", "checkpoint.every_steps=10")


def start(
    words: Sequence[str], run_dir: Path, *, launcher: Sequence[str] = (), env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """`python [launcher] -m meshwright <words> --dir DIR`, in a process group of its own."""
    command = [sys.executable, *launcher, "-m", "meshwright", *words, "--dir", str(run_dir)]
    # Nobody reads the pipe while the run goes: it must hold the text of hundreds of restarts.
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, pipesize=2**20, text=True, start_new_session=True, env=env
    )


@contextmanager
def training(run_dir: Path, *words: str, launcher: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """An endless run with both ranks past their first steps; everything that is left of it is killed."""
    with start((*ENDLESS, *words), run_dir, launcher=launcher) as process:
        try:
            wait_for(lambda: list(run_dir.glob("checkpoints/step-*/manifest.json")), process)
            yield process
        finally:
            for rank in ranks_of(process):
                rank.kill()
            process.kill()


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks that a launcher has started, in their order."""
    try:
        return sorted(psutil.Process(launcher.pid).children(), key=lambda process: process.pid)
    except psutil.NoSuchProcess:
        return []


def wait_for(found: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Wait until something is found, as long as the process lives."""
    deadline = time.monotonic() + LONGEST_SECONDS
    while not found():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)


def newest_step(run_dir: Path) -> int:
    """The step of the newest complete checkpoint."""
    return max(int(path.parent.name[5:]) for path in run_dir.glob("checkpoints/step-*/manifest.json"))


def last_event(run_dir: Path, rank: int = 0) -> dict:
    """The last event of a rank."""
    return json.loads((run_dir / f"events-{rank}.jsonl").read_text().splitlines()[-1])
