"""Stop signals as terminals, `timeout` and schedulers send them; a launcher that dies; ranks that are killed.

One small run on two ranks, started as a user does. Every trial must leave a checkpoint that the same command
resumes from.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

TRAIN = ("train", "demo", "parallel.dp_replicate=2", "schedule.num_steps=100000", "observe.every_steps=5000")
SMALL = ("model.num_layers=1", "model.width=32", "model.attention.num_heads=2", "data.sequence_length=32")
LONGEST_SECONDS = 300


@contextmanager
def training(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """`meshwright train` in a process group of its own, with both ranks past their first steps."""
    command = [sys.executable, "-m", "meshwright", *TRAIN, *SMALL, "checkpoint.every_steps=10"]
    with subprocess.Popen(
        [*command, "--dir", str(run_dir)], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as launcher:
        try:
            _wait_for(lambda: list(run_dir.glob("checkpoints/step-*/manifest.json")))
            yield launcher
        finally:
            for rank in _ranks(launcher.pid):
                rank.kill()
            launcher.kill()


def _ranks(launcher: int) -> list[psutil.Process]:
    try:
        return psutil.Process(launcher).children()
    except psutil.NoSuchProcess:
        return []


def _wait_for(found) -> None:
    deadline = time.monotonic() + LONGEST_SECONDS
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _newest(run_dir: Path) -> int:
    return max(int(path.parent.name[5:]) for path in run_dir.glob("checkpoints/step-*/manifest.json"))


def _last_event(run_dir: Path) -> dict:
    return json.loads((run_dir / "events-0.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
def test_a_signal_to_the_group_and_to_the_launcher_saves_the_step_it_stops_at(tmp_path, number):
    with training(tmp_path) as launcher:
        os.killpg(launcher.pid, number)  # a terminal or a scheduler
        launcher.send_signal(number)  # and `timeout`, which signals the command too
        _, printed = launcher.communicate(timeout=LONGEST_SECONDS)
    assert launcher.returncode == 130, printed
    assert "which is saved" in printed
    interrupted = [
        json.loads(line) for line in next(tmp_path.glob("events-*0.jsonl")).read_text().splitlines()
    ]
    assert interrupted[-1]["step"] == _newest(tmp_path)
    assert not (tmp_path / ".lock").exists()


def test_no_rank_outlives_a_launcher_that_was_killed(tmp_path):
    with training(tmp_path) as launcher:
        ranks = _ranks(launcher.pid)
        assert len(ranks) == 2
        launcher.kill()
        gone, alive = psutil.wait_procs(ranks, timeout=5)
        assert len(gone) == 2 and not alive


def test_a_killed_rank_is_named_and_the_run_fails(tmp_path):
    with training(tmp_path) as launcher:
        _ranks(launcher.pid)[1].kill()
        _, printed = launcher.communicate(timeout=LONGEST_SECONDS)
    assert launcher.returncode == 4, printed
    assert "rank 1 was killed by signal 9 (SIGKILL); was host memory full?" in printed
    assert "fault" not in printed


def test_a_second_writer_is_refused_and_ranks_listen_on_loopback_only(tmp_path):
    with training(tmp_path) as launcher:
        sockets = [socket for rank in _ranks(launcher.pid) for socket in rank.net_connections("inet")]
        listening = {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
        assert listening and listening <= {"127.0.0.1", "::1"}
        command = [sys.executable, "-m", "meshwright", *TRAIN, *SMALL, "checkpoint.every_steps=10"]
        second = subprocess.run(
            [*command, "--dir", str(tmp_path)], capture_output=True, text=True, timeout=LONGEST_SECONDS
        )
    assert second.returncode == 2, second.stderr
    assert "is training into this directory" in second.stderr
