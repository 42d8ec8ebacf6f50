"""A rank that is stopped (SIGSTOP) is noticed, reported and ended; stop signals reach it."""

import signal
import socket

import psutil
from tests.support.live_runs import LONGEST_SECONDS, last_event, newest_step, ranks_of, training, wait_for

TIMEOUT = 5


def test_a_stopped_rank_is_reported_with_its_stack_and_the_run_fails(tmp_path):
    words = (f"resilience.step_timeout_seconds={TIMEOUT}", "resilience.restart.max_restarts=0")
    with training(tmp_path, *words) as launcher:
        stopped = ranks_of(launcher)[1]
        stopped.suspend()
        _, printed = launcher.communicate(timeout=LONGEST_SECONDS)
        assert not stopped.is_running()
    assert launcher.returncode == 4, printed
    named = f"rank 1 on {socket.gethostname()} (process {stopped.pid}) is stopped (SIGSTOP): last step "
    assert named in printed and f"resilience.step_timeout_seconds={TIMEOUT}" in printed
    assert "rank 0 waits: last step " in printed
    assert "in drive" in printed.partition("stack of rank 1:")[2], "the loop is in the stack"
    assert "a fault of ours" not in printed and "failed first" not in printed


def test_a_stop_signal_while_a_rank_is_stopped_saves_and_ends(tmp_path):
    with training(tmp_path) as launcher:
        stopped = ranks_of(launcher)[0]
        stopped.suspend()
        wait_for(lambda: stopped.status() == psutil.STATUS_STOPPED, launcher)
        launcher.send_signal(signal.SIGTERM)
        _, printed = launcher.communicate(timeout=LONGEST_SECONDS)
    assert launcher.returncode == 130, printed
    assert last_event(tmp_path)["step"] == newest_step(tmp_path)
