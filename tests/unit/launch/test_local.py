"""Local ranks: what is printed when one of them fails, and the exit code."""

import subprocess
import sys
from typing import Any

import pytest

from meshwright.launch import local, rank_process
from meshwright.launch.launched import is_local_rank, launched_rank
from meshwright.launch.watch import Watched
from meshwright.spec import ResilienceSpec

GENUINE = subprocess.Popen


def _ranks(monkeypatch: pytest.MonkeyPatch, program: str, *, fail_together: bool = False) -> None:
    """Every rank runs this program in place of meshwright. Ranks that fail together may start apart from each
    other, on a busy machine."""
    if fail_together:
        monkeypatch.setattr(local, "_TOGETHER_SECONDS", 60.0)
        monkeypatch.setattr(local, "_GRACE_SECONDS", 60.0)

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return GENUINE(
            [sys.executable, "-c", f"import os, sys, time; rank = os.environ['RANK']; {program}"], **options
        )

    monkeypatch.setattr(rank_process.subprocess, "Popen", start)


def test_the_output_of_a_rank_that_fails_alone_is_printed(monkeypatch, capfd):
    _ranks(monkeypatch, "print('lost', file=sys.stderr); sys.exit(70 if rank == '1' else 0)")
    assert local.run_local([], num_ranks=2) == 70
    assert capfd.readouterr().err.endswith("rank 1 failed first:\nlost\n")


def test_a_refusal_by_all_is_printed_once(monkeypatch, capfd):
    """Rank 0 is the last to come to it, long after the others."""
    program = "time.sleep(1.5 * (rank == '0')); print('refused', file=sys.stderr); sys.exit(2)"
    _ranks(monkeypatch, program)
    assert local.run_local([], num_ranks=2) == 2
    assert capfd.readouterr().err == "refused\n"


def test_a_rank_that_ctrl_c_ended_counts_as_interrupted(monkeypatch):
    _ranks(
        monkeypatch, "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); os.kill(os.getpid(), 2)"
    )
    assert local.run_local([], num_ranks=1) == 130


def test_an_oom_is_the_reason_where_other_ranks_fail_with_it(monkeypatch, capfd):
    """The others lose the connection to the rank that ran out of memory."""
    program = "print('oom' if rank == '1' else 'lost', file=sys.stderr); sys.exit(5 if rank == '1' else 4)"
    _ranks(monkeypatch, program, fail_together=True)
    assert local.run_local([], num_ranks=3) == 5
    assert capfd.readouterr().err.endswith("rank 1 failed first:\noom\n")


def test_a_rank_knows_who_started_it(monkeypatch):
    _ranks(monkeypatch, "from meshwright.launch.launched import is_local_rank; sys.exit(not is_local_rank())")
    assert local.run_local([], num_ranks=1) == 0
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}.items():  # torchrun
        monkeypatch.setenv(name, value)
    assert launched_rank() is not None and not is_local_rank()


def test_the_rank_that_was_killed_is_named_and_not_those_that_lost_it(monkeypatch, capfd):
    _ranks(monkeypatch, "os.kill(os.getpid(), 9) if rank == '2' else sys.exit(4)", fail_together=True)
    assert local.run_local([], num_ranks=3) == 4
    assert "rank 2 was killed by signal 9 (SIGKILL); was host memory full?" in capfd.readouterr().err


def test_an_error_of_the_input_explains_lost_connections(monkeypatch, capfd):
    """A token outside of the vocabulary on rank 1: rank 0 only loses the connection."""
    _ranks(
        monkeypatch,
        "print('token 9', file=sys.stderr) if rank == '1' else 0; sys.exit(2 if rank == '1' else 4)",
        fail_together=True,
    )
    assert local.run_local([], num_ranks=2) == 2
    assert capfd.readouterr().err.endswith("rank 1 failed first:\ntoken 9\n")


def test_a_signal_during_the_start_is_passed_on_and_named(monkeypatch, capfd):
    _ranks(monkeypatch, "os.kill(os.getppid(), 15) if rank == '0' else 0; time.sleep(60)")
    assert local.run_local([], num_ranks=2) == 130
    assert "stopped by SIGTERM before the first step" in capfd.readouterr().err


WATCHED = """
import faulthandler, signal
from pathlib import Path
from meshwright.launch.heartbeat import Heartbeat, HeartbeatFile, heartbeat_path
from meshwright.launch.stacks import write_stacks_on_signal
write_stacks_on_signal()
# One that starts late, on a busy machine, would be behind the other one, and not wait for it.
Path({run_dir!r}, "up-" + rank).touch()
while not Path({run_dir!r}, "up-" + str(1 - int(rank))).exists(): time.sleep(0.01)
file = HeartbeatFile(heartbeat_path(Path({run_dir!r}), int(rank)))
file.write(Heartbeat(int(rank), "h", os.getpid(), 7, {phase!r}, 1.0))
{then}
while True: time.sleep(0.1)
"""


def _watched(monkeypatch, tmp_path, then: str, phase: str = "step", *, timeout_seconds: float = 1) -> int:
    program = WATCHED.format(run_dir=str(tmp_path), phase=phase, then=then)
    _ranks(monkeypatch, f"exec({program!r})")
    timeouts = ResilienceSpec(step_timeout_seconds=timeout_seconds, start_timeout_seconds=300)
    return local.run_attempt([], num_ranks=2, watched=Watched(tmp_path, timeouts)).code


def test_a_stopped_rank_is_named_with_its_stack_and_the_run_fails(monkeypatch, capfd, tmp_path):
    stop = "os.kill(os.getpid(), signal.SIGSTOP) if rank == '1' else 0"
    assert _watched(monkeypatch, tmp_path, stop) == 4
    printed = capfd.readouterr().err
    assert (
        "note: rank 1 (process " in printed
        and "is stopped; without SIGCONT the run ends after 1 s" in printed
    )
    assert "error: rank 1 on " in printed and "is stopped (SIGSTOP): last step 7, phase step" in printed
    assert "rank 0 waits: last step 7, phase step" in printed
    assert "resilience.step_timeout_seconds=1" in printed
    assert "stack of rank 1:\n" in printed and "most recent call first" in printed
    assert "stack of rank 0:\n" in printed and "failed first" not in printed and "killed by" not in printed
    assert "rank 0 is in no collective: " in printed


def test_ranks_that_hang_are_ended_though_they_ignore_sigterm(monkeypatch, capfd, tmp_path):
    assert _watched(monkeypatch, tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)") == 4
    printed = capfd.readouterr().err
    assert "rank 0 on " in printed and "makes no progress: last step 7, phase step" in printed
    assert "stack of rank 0:" in printed and "stack of rank 1:" in printed


def test_a_clock_that_jumps_is_no_hang(monkeypatch, tmp_path):
    """Time without progress is counted on the watcher's monotonic clock; heartbeats may have any time."""
    jumps = """
for step in range(25):
    at = (1.0, 2e9, 5e8)[step % 3]
    file.write(Heartbeat(int(rank), "h", os.getpid(), step, "step", at))
    time.sleep(0.1)
sys.exit(0)
"""
    assert _watched(monkeypatch, tmp_path, jumps, timeout_seconds=20) == 0, "a busy machine is no hang either"


def test_a_stop_signal_reaches_a_stopped_rank(monkeypatch, tmp_path):
    """The signal alone would wait until somebody continues the rank."""
    then = (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130)); "
        "os.kill(os.getppid(), signal.SIGTERM) if rank == '0' else os.kill(os.getpid(), signal.SIGSTOP)"
    )
    assert _watched(monkeypatch, tmp_path, then, phase="save") == 130
