"""Commands that are killed, signalled, orphaned and stopped at random times equal one that was not, bitwise.

Each trial starts the command as a user does, disturbs it one to three times, and starts it again until it is
done. Another seed: MESHWRIGHT_TEST_SEED=2 make soak.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.support.fault_table import Trial
from tests.support.faults import assert_undisturbed, finish
from tests.support.live_runs import LONGEST_SECONDS, SMALL, Launcher, ranks_of, start

SEED = int(os.environ.get("MESHWRIGHT_TEST_SEED", "1"))
NUM_STEPS = 60
RUN = (
    *(*SMALL, f"schedule.num_steps={NUM_STEPS}", "checkpoint.every_steps=3"),
    *("observe.evaluate.every_steps=20", "resilience.step_timeout_seconds=30"),
)
Fault = Callable[[Launcher, random.Random], set[int]]
"""Does something to a command; returns the exit codes that it may end with, besides 0."""


def _kill_rank(launcher: Launcher, rng: random.Random) -> set[int]:
    for rank in rng.sample(ranks_of(launcher), k=1):
        rank.kill()
    return {4, -9}


def _kill_everything(launcher: Launcher, rng: random.Random) -> set[int]:
    for rank in ranks_of(launcher):
        rank.kill()
    launcher.kill()
    return {-9}


def _orphan(launcher: Launcher, rng: random.Random) -> set[int]:
    """Only the launcher dies; the next start comes at once."""
    launcher.kill()
    return {-9}


def _send_signal(launcher: Launcher, rng: random.Random) -> set[int]:
    """As a terminal, a scheduler or `timeout` does it: the group, and the launcher again."""
    number = rng.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1))
    os.killpg(launcher.pid, number)
    launcher.send_signal(number)
    return {130, -number}


def _stop(launcher: Launcher, rng: random.Random) -> set[int]:
    """A rank is stopped: until the timeout, until a signal to the launcher, or for a second."""
    for rank in rng.sample(ranks_of(launcher), k=1):
        rank.suspend()
        what = rng.choice(("timeout", "signal", "continue"))
        if what == "timeout":
            return {4}
        time.sleep(1.0)
        if what == "signal":
            launcher.send_signal(signal.SIGTERM)
            return {130}
        rank.resume()
    return set()


FAULTS: dict[str, Fault] = {
    "kill -9 of one rank, from the first moment of the command on": _kill_rank,
    "kill -9 of launcher and ranks, command started again": _kill_everything,
    "kill -9 of the launcher, command started again at once": _orphan,
    "stop signal to the group and the launcher, command started again": _send_signal,
    "SIGSTOP of one rank until the timeout, a stop signal or SIGCONT": _stop,
}


def _disturbed(run_dir: Path, seconds: float, rng: random.Random) -> Trial:
    """Start the run, and disturb it after a random time."""
    with start(RUN, run_dir) as launcher:
        time.sleep(rng.uniform(0.5, seconds))
        name = rng.choice(list(FAULTS))
        try:
            allowed = FAULTS[name](launcher, rng)
        except (psutil.NoSuchProcess, ProcessLookupError, IndexError, ValueError):
            allowed = set()  # it was done already, or had no ranks yet
        if FAULTS[name] is not _orphan:
            _, printed = launcher.communicate(timeout=LONGEST_SECONDS)
            assert launcher.returncode in allowed | {0}, f"{name}: {printed}"
    return Trial(name, lost_steps=None)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> tuple[Path, float]:
    """The run that nothing happens to, and how long it takes."""
    run_dir = tmp_path_factory.mktemp("whole")
    started_at = time.monotonic()
    with start(RUN, run_dir) as launcher:
        finish(launcher)
    return run_dir, time.monotonic() - started_at


@pytest.mark.soak
@pytest.mark.parametrize("trial", range(100))
def test_a_disturbed_run_equals_the_undisturbed_one(tmp_path, whole_run, record, trial):
    whole, seconds = whole_run
    rng = random.Random(1000 * SEED + trial)
    for _ in range(rng.randint(1, 3)):
        record(_disturbed(tmp_path, seconds, rng))
    with start(RUN, tmp_path) as launcher:
        finish(launcher)
    assert_undisturbed(tmp_path, whole)
