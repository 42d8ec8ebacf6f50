"""A run goes on, was killed, or ended: from heartbeats, processes and the summary."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from meshwright.launch.heartbeat import Heartbeat, HeartbeatFile, heartbeat_path
from meshwright.observe.watch.liveness import heartbeats_of, liveness

HERE = socket.gethostname()


def heartbeat(pid: int, *, rank: int = 0, host: str = HERE, at: float | None = None) -> Heartbeat:
    return Heartbeat(rank, host, pid, 12, "step", time.time() if at is None else at)


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_living_process_runs():
    assert liveness([heartbeat(os.getpid())], {}, has_rows=True).state == "running"


def test_a_rank_that_left_its_heartbeat_was_killed():
    found = liveness([heartbeat(os.getpid()), heartbeat(dead_pid(), rank=3)], {}, has_rows=True)
    assert found.state == "killed"
    assert found.text == "rank 3 ended without a word after step 12, in phase step"


def test_a_process_that_began_later_is_another_one():
    long_ago = heartbeat(os.getpid(), at=time.time() - 10**7)
    assert liveness([long_ago], {"outcome": "finished"}, has_rows=True).state == "killed"


def test_another_host_is_silent_after_a_while():
    now = time.time()
    assert (
        liveness([heartbeat(1, host="elsewhere", at=now - 5)], {}, has_rows=True, now=now).state == "running"
    )
    assert (
        liveness([heartbeat(1, host="elsewhere", at=now - 500)], {}, has_rows=True, now=now).state == "silent"
    )


def test_without_heartbeats_the_summary_counts():
    assert liveness([], {"outcome": "failed"}, has_rows=True).state == "failed"
    assert liveness([], {}, has_rows=True).state == "incomplete"
    assert liveness([], {}, has_rows=False).state == "waiting"


def test_heartbeats_are_read_from_the_run_directory(tmp_path: Path):
    assert heartbeats_of(tmp_path) == []
    written = heartbeat(os.getpid(), rank=1)
    file = HeartbeatFile(heartbeat_path(tmp_path, 1))
    file.write(written)
    file.close()
    (tmp_path / "heartbeats" / "rank-2.json").write_text("{")
    assert heartbeats_of(tmp_path) == [written]
