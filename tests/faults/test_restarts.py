"""The supervisor restarts ranks that were killed, stopped or hang; the result is that of an undisturbed run.

`make soak` repeats it hundreds of times and prints a table. Another seed: MESHWRIGHT_TEST_SEED=2 make soak.
"""

import os
import random
import shutil
import time
from pathlib import Path

import psutil
import pytest
from tests.support.faults import (
    disturb,
    events,
    finish,
    gil_environment,
    hold_gil,
    kill_all,
    kill_in_a_row,
    kill_one,
    stop_one,
    table,
)
from tests.support.live_runs import ENDLESS, SMALL, ranks_of, start, training, wait_for
from tests.support.run_directories import assert_same_state

from meshwright.observe.metrics import read_metrics

SEED = int(os.environ.get("MESHWRIGHT_TEST_SEED", "1"))
TIMEOUT = 3
NUM_STEPS = 1000
# Starts without progress are no fault of a run that is killed every second.
KILLED = (
    *(f"resilience.step_timeout_seconds={TIMEOUT}", "resilience.restart.max_cycles_without_progress=1000"),
    *("resilience.restart.max_restarts=10000", "resilience.restart.max_backoff_seconds=0"),
    "checkpoint.every_steps=7",
)
NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens")


def _run(num_steps: int) -> tuple[str, ...]:
    return (*SMALL, *KILLED, f"schedule.num_steps={num_steps}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The run that nothing happens to."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    with start(_run(NUM_STEPS), run_dir) as launcher:
        finish(launcher)
    return run_dir


def _disturbed(tmp_path, num_steps: int, faults, rng: random.Random, *, num_kills: int):
    """A run with all of these faults, one after the other, at random times, and kills at any time; returns
    the trials."""
    environment = gil_environment(tmp_path)
    run_dir = tmp_path / "disturbed"
    with start(_run(num_steps), run_dir, env=environment) as launcher:
        try:
            wait_for(lambda: list(run_dir.glob("checkpoints/step-*/manifest.json")), launcher)
            trials = kill_in_a_row(launcher, run_dir, rng, count=num_kills)
            wait_for(lambda: len(events(run_dir, "resume")) and ranks_of(launcher), launcher)
            for fault in faults:
                time.sleep(rng.uniform(0.0, 0.4))
                trials.append(disturb(launcher, run_dir, fault, rng))
            printed = finish(launcher)
        finally:
            launcher.kill()
    assert len(events(run_dir, "restart")) == len(trials), printed
    return run_dir, trials


def _assert_undisturbed(run_dir: Path, whole: Path, num_steps: int) -> None:
    """Equal to the undisturbed run: weights and data position bitwise, no step missing or twice."""
    assert_same_state(run_dir, whole)
    rows, expected = read_metrics(run_dir), read_metrics(whole)
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    assert [[row.get(name) for name in NUMBERS] for row in rows] == [
        [row.get(name) for name in NUMBERS] for row in expected
    ]


def test_killed_stopped_and_hanging_ranks_are_restarted_and_the_result_is_the_same(
    tmp_path, undisturbed, capfd
):
    """20 faults: 15 kills at any time, which may come before the next step, and 5 whose recovery is timed."""
    faults = [kill_one, kill_all, stop_one, hold_gil, kill_one]
    run_dir, trials = _disturbed(tmp_path, NUM_STEPS, faults, random.Random(SEED), num_kills=15)
    with capfd.disabled():
        print(f"\n{table(trials)}")
    assert len(trials) == 20
    assert all(trial.detect_seconds < TIMEOUT + 10 for trial in trials), "2 s on a machine that is idle"
    _assert_undisturbed(run_dir, undisturbed, NUM_STEPS)


def test_starts_without_a_newer_checkpoint_end_the_run_with_its_own_code(tmp_path, undisturbed):
    words = ("resilience.restart.backoff_seconds=0.1", "checkpoint.every_steps=1000000")
    shutil.copytree(undisturbed, tmp_path / "run")
    with start((*ENDLESS, *words), tmp_path / "run") as launcher:
        for cycle in range(1, 4):
            wait_for(lambda cycle=cycle: len(events(tmp_path / "run", "resume")) == cycle, launcher)
            wait_for(lambda: len(ranks_of(launcher)) == 2, launcher)
            ranks_of(launcher)[1].kill()
        _, printed = launcher.communicate(timeout=60)
    assert launcher.returncode == 93, printed
    assert f"3 starts in a row ended without a newer checkpoint than step {NUM_STEPS}" in printed
    assert "rank 1 was killed by signal 9" in printed
    assert events(tmp_path / "run", "failure")[-1]["exit_code"] == 93


def test_no_process_is_left_and_a_stop_signal_after_a_restart_saves(tmp_path):
    with training(tmp_path) as launcher:
        before = ranks_of(launcher)
        disturb(launcher, tmp_path, kill_one, random.Random(SEED))
        after = ranks_of(launcher)
        assert len(after) == 2 and not any(rank.is_running() for rank in before)
        launcher.terminate()
        _, printed = launcher.communicate(timeout=60)
    assert launcher.returncode == 130 and "which is saved" in printed
    assert not psutil.wait_procs(after, timeout=5)[1]


def test_one_rank_alone_is_restarted_where_the_run_asks_for_it(tmp_path):
    with training(tmp_path, "parallel.dp_replicate=1", "resilience.restart.single_rank=true") as launcher:
        disturb(launcher, tmp_path, kill_one, random.Random(SEED))
        assert len(ranks_of(launcher)) == 1


@pytest.mark.soak
def test_hundreds_of_faults(tmp_path, capfd):
    rng = random.Random(SEED)
    num_trials = int(os.environ.get("MESHWRIGHT_TEST_TRIALS", "500"))
    counts = {kill_one: 0.4, kill_all: 0.1, stop_one: 0.04, hold_gil: 0.04}
    faults = [fault for fault, share in counts.items() for _ in range(round(share * num_trials))]
    rng.shuffle(faults)
    num_steps, num_kills = 40 * num_trials, num_trials - len(faults)
    run_dir, trials = _disturbed(tmp_path, num_steps, faults, rng, num_kills=num_kills)
    with capfd.disabled():
        print(f"\n{table(trials)}")
    whole = tmp_path / "undisturbed"
    with start(_run(num_steps), whole) as launcher:
        finish(launcher)
    _assert_undisturbed(run_dir, whole, num_steps)
