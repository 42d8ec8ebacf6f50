"""Stop signals as terminals, `timeout` and schedulers send them; a launcher that dies; ranks that are killed.

One small run on two ranks, started as a user does. Every trial must leave a checkpoint that the same command
resumes from.
"""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from tests.support.live_runs import ENDLESS, LONGEST_SECONDS, last_event, newest_step, ranks_of, training


# SIGHUP has the handler of SIGTERM, with which other tests end their runs.
@pytest.mark.parametrize("number", (signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.soak)))
def test_a_signal_to_the_group_and_to_the_launcher_saves_the_step_it_stops_at(tmp_path, number):
    with training(tmp_path) as launcher:
        os.killpg(launcher.pid, number)  # a terminal or a scheduler
        launcher.send_signal(number)  # and `timeout`, which signals the command too
        _, printed = launcher.communicate(timeout=LONGEST_SECONDS)
    assert launcher.returncode == 130, printed
    assert "which is saved" in printed
    assert last_event(tmp_path)["step"] == newest_step(tmp_path)
    assert not (tmp_path / ".lock").exists()


def test_a_killed_rank_is_named_and_the_run_fails(tmp_path):
    with training(tmp_path, "resilience.restart.max_restarts=0") as launcher:
        ranks_of(launcher)[1].kill()
        _, printed = launcher.communicate(timeout=LONGEST_SECONDS)
    assert launcher.returncode == 4, printed
    assert "rank 1 was killed by signal 9 (SIGKILL); was host memory full?" in printed
    assert "a fault of ours" not in printed


def test_a_second_writer_is_refused_and_no_rank_outlives_a_launcher_that_was_killed(tmp_path):
    """Ranks of one machine listen on loopback only."""
    with training(tmp_path) as launcher:
        sockets = [socket for rank in ranks_of(launcher) for socket in rank.net_connections("inet")]
        listening = {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
        assert listening and listening <= {"127.0.0.1", "::1"}
        command = [sys.executable, "-m", "meshwright", *ENDLESS, "--dir", str(tmp_path)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_SECONDS)
        assert second.returncode == 2, second.stderr
        assert "is training into this directory" in second.stderr
        ranks = ranks_of(launcher)
        assert len(ranks) == 2
        launcher.kill()
        assert not psutil.wait_procs(ranks, timeout=LONGEST_SECONDS)[1]
