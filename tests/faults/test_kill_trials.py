"""Runs that are killed, signalled, orphaned and stopped at random times equal the run that was not, bitwise.

Each trial starts the command as a user does, disturbs it one to three times, and starts it again until it is
done. Another seed: MESHWRIGHT_TEST_SEED=2 make soak.
"""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.support.live_runs import LONGEST_SECONDS, SMALL, ranks_of, start
from tests.support.run_directories import assert_same_state

from meshwright.observe.metrics import read_metrics

SEED = int(os.environ.get("MESHWRIGHT_TEST_SEED", "1"))
NUM_STEPS = 60
RUN = (
    *(*SMALL, f"schedule.num_steps={NUM_STEPS}", "checkpoint.every_steps=3"),
    *("observe.evaluate.every_steps=20", "resilience.step_timeout_seconds=30"),
)
NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens", "eval_loss")
Launcher = subprocess.Popen[str]


def _rank_killed(launcher: Launcher, rng: random.Random) -> set[int]:
    for rank in rng.sample(ranks_of(launcher), k=1):
        rank.kill()
    return {4, -9}


def _all_killed(launcher: Launcher, rng: random.Random) -> set[int]:
    for rank in ranks_of(launcher):
        rank.kill()
    launcher.kill()
    return {-9}


def _orphaned(launcher: Launcher, rng: random.Random) -> set[int]:
    """Only the launcher dies; the next start comes at once."""
    launcher.kill()
    return {-9}


def _signalled(launcher: Launcher, rng: random.Random) -> set[int]:
    """As a terminal, a scheduler or `timeout` does it: the group, and the launcher again."""
    number = rng.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1))
    os.killpg(launcher.pid, number)
    launcher.send_signal(number)
    return {130, -number}


def _stopped(launcher: Launcher, rng: random.Random) -> set[int]:
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
    return {0}


FAULTS: tuple[Callable[[Launcher, random.Random], set[int]], ...] = (
    *(_rank_killed, _all_killed, _orphaned, _signalled, _stopped),
)


def _disturbed(run_dir: Path, seconds: float, rng: random.Random) -> str:
    """Start the run, and disturb it after a random time; returns what was done."""
    with start(RUN, run_dir) as launcher:
        time.sleep(rng.uniform(0.5, seconds))
        fault = rng.choice(FAULTS)
        try:
            allowed = fault(launcher, rng)
        except (psutil.NoSuchProcess, ProcessLookupError, IndexError, ValueError):
            allowed = set()  # it was done already, or had no ranks yet
        if fault is not _orphaned:
            _, printed = launcher.communicate(timeout=LONGEST_SECONDS)
            assert launcher.returncode in allowed | {0}, f"{fault.__name__}: {printed}"
        return f"{fault.__name__} -> {launcher.poll()}"


def _finish(run_dir: Path) -> None:
    with start(RUN, run_dir) as launcher:
        _, printed = launcher.communicate(timeout=LONGEST_SECONDS)
    assert launcher.returncode == 0, printed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[Path, float]:
    """The run that nothing happens to, and how long it takes."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    started_at = time.monotonic()
    _finish(run_dir)
    return run_dir, time.monotonic() - started_at


@pytest.mark.soak
@pytest.mark.parametrize("trial", range(100))
def test_a_disturbed_run_equals_the_undisturbed_one(tmp_path, undisturbed, trial):
    whole, seconds = undisturbed
    rng = random.Random(1000 * SEED + trial)
    faults = [_disturbed(tmp_path, seconds, rng) for _ in range(rng.randint(1, 3))]
    print(f"trial {trial}: {', '.join(faults)}")
    _finish(tmp_path)
    assert_same_state(tmp_path, whole)
    rows, expected = read_metrics(tmp_path), read_metrics(whole)
    assert [[row.get(name) for name in NUMBERS] for row in rows] == [
        [row.get(name) for name in NUMBERS] for row in expected
    ]
