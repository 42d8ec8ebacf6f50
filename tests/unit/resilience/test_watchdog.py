"""Heartbeats of a rank, and the watchdog of ranks that another launcher started."""

import os
import subprocess
import sys
import time

from meshwright.launch.heartbeat import Heartbeat, HeartbeatFile, heartbeat_path, read_heartbeats
from meshwright.resilience.watchdog import HeartbeatWriter, silent_ranks

HANG = """
import sys, time
from pathlib import Path
from meshwright.resilience.watchdog import HeartbeatWriter, Watchdog
from meshwright.spec import ResilienceSpec
run_dir = Path(sys.argv[1])
def hang_here():
    time.sleep(600)
with HeartbeatWriter(run_dir, rank=0, num_ranks=2, step=3) as writer:
    writer.enter("step", 4)
    with Watchdog(writer, run_dir, ResilienceSpec(step_timeout_seconds=1), 2):
        hang_here()
"""


def _write(run_dir, heartbeat: Heartbeat) -> None:
    file = HeartbeatFile(heartbeat_path(run_dir, heartbeat.rank))
    file.write(heartbeat)
    file.close()


def test_the_file_has_the_last_phase_and_is_removed_at_the_end(tmp_path):
    with HeartbeatWriter(tmp_path, rank=0, num_ranks=1, step=5) as writer:
        (first,) = read_heartbeats(tmp_path, 1)
        assert (first.step, first.phase, first.pid) == (5, "start", os.getpid())
        writer.enter("save", 6)
        deadline = time.monotonic() + 60
        while (found := read_heartbeats(tmp_path, 1)[0]).phase == "start":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert (found.step, found.phase) == (6, "save")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_does_not_end_the_run(tmp_path):
    (tmp_path / "heartbeats").write_text("in the way")
    with HeartbeatWriter(tmp_path, rank=0, num_ranks=1, step=0) as writer:
        writer.enter("step", 1)


def test_a_rank_that_hangs_ends_with_its_stack_and_names_the_silent_rank(tmp_path):
    _write(tmp_path, Heartbeat(1, "elsewhere", 99, 4, "step", time.time() - 50))
    ended = subprocess.run(
        [sys.executable, "-c", HANG, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 4, ended.stderr
    assert "makes no progress for 1 s: last step 4, phase step" in ended.stderr
    assert "where: resilience.step_timeout_seconds=1" in ended.stderr
    silent = "no sign of life from rank 1 on elsewhere (process 99; last step 4, phase step)"
    assert silent in ended.stderr and "hang_here" in ended.stderr


def test_who_is_furthest_behind_where_all_or_none_are_silent(tmp_path):
    now = time.time()
    for rank, step in enumerate((4, 3)):
        _write(tmp_path, Heartbeat(rank, "elsewhere", 9, step, "step", now))
    assert silent_ranks(tmp_path, 2, since=now - 1) == "furthest behind, at step 3: rank 1"
    assert silent_ranks(tmp_path, 2, since=now + 1) == "furthest behind, at step 3: rank 1"
    assert silent_ranks(tmp_path, 3, since=now - 1) == "no sign of life from rank 2 (no heartbeat)"
