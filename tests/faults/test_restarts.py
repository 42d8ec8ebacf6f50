"""The supervisor restarts ranks that were killed, stopped or hang; the result is that of an undisturbed run.

`make soak` repeats it hundreds of times. Another seed: MESHWRIGHT_TEST_SEED=2 make soak; another number of
trials: MESHWRIGHT_TEST_TRIALS=100.
"""

import os
import random
import time

import psutil
import pytest
from tests.support.fault_table import Trial
from tests.support.faults import (
    RUN,
    assert_undisturbed,
    events,
    finish,
    gil_environment,
    hold_gil,
    kill_all,
    kill_one,
    restarted,
    stop_one,
    survive,
)
from tests.support.live_runs import LONGEST_SECONDS, ranks_of, start, training, wait_for

SEED = int(os.environ.get("MESHWRIGHT_TEST_SEED", "1"))
NUM_TRIALS = int(os.environ.get("MESHWRIGHT_TEST_TRIALS", "500"))
TRIALS_PER_TEST = 25


def test_killed_stopped_and_hanging_ranks_are_restarted_and_the_result_is_the_same(
    tmp_path, undisturbed, record
):
    """8 random kills in start, load, step or save, a stopped rank and one that holds the GIL."""
    faults = [*[kill_one] * 6, *[kill_all] * 2, stop_one, hold_gil]
    rng, env = random.Random(SEED), gil_environment(tmp_path)
    rng.shuffle(faults)
    trials = survive(faults, tmp_path, undisturbed, rng=rng, env=env, report=record)
    assert len(trials) == len(faults)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(-(-NUM_TRIALS // TRIALS_PER_TEST)))
def test_hundreds_of_faults(tmp_path, undisturbed, record, number):
    """Faults at random, most of them kills, in runs that are killed again and again until they finish."""
    rng, env = random.Random(1000 * SEED + number), gil_environment(tmp_path)
    count = min(TRIALS_PER_TEST, NUM_TRIALS - number * TRIALS_PER_TEST)
    faults = rng.choices([kill_one, kill_all, stop_one, hold_gil], weights=[70, 24, 3, 3], k=count)
    started_at = time.monotonic()
    trials = survive(faults, tmp_path, undisturbed, rng=rng, env=env, report=record)
    print(f"{len(trials)} faults in {time.monotonic() - started_at:.0f} s")
    assert len(trials) == count


def test_a_restart_storm_ends_with_its_own_code_and_the_next_start_goes_on(tmp_path, undisturbed, record):
    """Every start is killed before it saves: three starts and no more, and the next command completes."""
    words = ("resilience.restart.backoff_seconds=0.1", "resilience.restart.max_cycles_without_progress=3")
    with start((*RUN, *words, "checkpoint.every_steps=100000"), tmp_path) as launcher:
        wait_for(lambda: events(tmp_path, "start"), launcher)
        first_killed_at = time.monotonic()
        for cycle in range(1, 4):
            wait_for(lambda cycle=cycle: len(events(tmp_path, "start")) == cycle, launcher)
            ranks_of(launcher)[1].kill()
        _, printed = launcher.communicate(timeout=LONGEST_SECONDS)
    seconds = time.monotonic() - first_killed_at
    assert launcher.returncode == 93, printed
    assert "3 starts in a row ended without a newer checkpoint than step 0" in printed
    assert "rank 1 was killed by signal 9" in printed
    assert events(tmp_path, "failure")[-1]["exit_code"] == 93
    restarts = events(tmp_path, "restart")
    assert [restart["cause"] for restart in restarts] == ["killed", "killed"], "bounded retries"
    with start(RUN, tmp_path) as launcher:
        finish(launcher)
    assert_undisturbed(tmp_path, undisturbed)
    lost = sum(restart["lost_steps"] for restart in restarts)
    record(Trial("restart storm: 3 starts killed, exit code 93, started by hand", lost, seconds))


def test_no_process_is_left_and_a_stop_signal_after_a_restart_saves(tmp_path):
    with training(tmp_path) as launcher:
        before = ranks_of(launcher)
        restarted(launcher, tmp_path, "kill -9", lambda: before[1].kill())
        after = ranks_of(launcher)
        assert len(after) == 2 and not any(rank.is_running() for rank in before)
        launcher.terminate()
        _, printed = launcher.communicate(timeout=LONGEST_SECONDS)
    assert launcher.returncode == 130 and "which is saved" in printed
    assert not psutil.wait_procs(after, timeout=LONGEST_SECONDS)[1]


def test_one_rank_alone_is_restarted_where_the_run_asks_for_it(tmp_path):
    with training(tmp_path, "parallel.dp_replicate=1", "resilience.restart.single_rank=true") as launcher:
        restarted(launcher, tmp_path, "kill -9", lambda: ranks_of(launcher)[0].kill())
        assert len(ranks_of(launcher)) == 1
