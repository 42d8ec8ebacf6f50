"""Elastic down and up: 4 -> 3 -> 4 ranks on one machine, with every sample used once and in order."""

import time

import pytest
from tests.support.fault_table import Trial
from tests.support.faults import events, is_training, require_newest_opens
from tests.support.live_runs import (
    LONGEST_SECONDS,
    SMALL,
    newest_step,
    ranks_of,
    start,
    wait_for,
    wait_for_checkpoint,
)

from meshwright.observe.metrics import read_metrics

RUN = (
    *(*SMALL, "precision.compute=fp64", "data.batch_sequences=12", "data.microbatch_sequences=1"),
    *("schedule.num_steps=100000", "checkpoint.every_steps=10", "checkpoint.keep_last=2"),
    # Training amplifies rounding: at the usual rate two meshes differ by 1e-9 after 90 steps, by 1e-4 after
    # 150, and how many steps a restart takes depends on the machine.
    "optim.lr=1e-6",
)
ELASTIC = (
    *("parallel.dp_replicate=4", "resilience.elastic.min_ranks=2"),
    *("resilience.elastic.failures_per_device=1", "resilience.elastic.return_seconds=3"),
)


def test_a_run_goes_on_with_three_of_four_ranks_and_takes_the_fourth_back(tmp_path, record):
    with start((*RUN, *ELASTIC), tmp_path / "elastic") as launcher:
        run_dir = tmp_path / "elastic"
        wait_for_checkpoint(run_dir, launcher)
        assert len(ranks_of(launcher)) == 4
        killed_at = time.time()
        ranks_of(launcher)[2].kill()
        wait_for(lambda: events(run_dir, "restart") and is_training(run_dir), launcher)
        resume_seconds = time.time() - killed_at
        require_newest_opens(run_dir)
        wait_for(lambda: len(events(run_dir, "restart")) == 2, launcher)
        down, up = events(run_dir, "restart")
        wait_for(lambda: is_training(run_dir), launcher)
        up_seconds = time.time() - up["failed_at"]
        wait_for(lambda: len(ranks_of(launcher)) == 4 and newest_step(run_dir) > up["step"], launcher)
        launcher.terminate()
        _, printed = launcher.communicate(timeout=LONGEST_SECONDS)
    detect_seconds = down["failed_at"] - killed_at
    record(Trial("elastic 4 -> 3: kill -9 of one rank", down["lost_steps"], detect_seconds, resume_seconds))
    record(Trial("elastic 3 -> 4: the device is used again", up["lost_steps"], resume_seconds=up_seconds))
    assert launcher.returncode == 130, printed
    assert (down["cause"], down["num_ranks"]) == ("killed", 3)
    assert (up["cause"], up["num_ranks"], up["lost_steps"]) == ("resized", 4, 0), "it saved before it grew"
    assert "device 2 is left out; 4 ranks (dp_replicate=4) -> 3 ranks (dp_replicate=3)" in printed
    assert "devices are used again: going on with 4 ranks (dp_replicate=4)" in printed
    _assert_same_samples(tmp_path, run_dir)


def _assert_same_samples(tmp_path, run_dir) -> None:
    """Every step once, with the loss that its samples have in a run on one rank: sums in another order."""
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    words = (*RUN, "parallel.dp_replicate=1", "--stop-after", str(len(rows)))
    with start(words, tmp_path / "whole") as launcher:
        _, printed = launcher.communicate(timeout=LONGEST_SECONDS)
    assert launcher.returncode == 0, printed
    expected = read_metrics(tmp_path / "whole")
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in expected]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=1e-9)
